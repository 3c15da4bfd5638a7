"""Writes the compact trace form that ``replay.traces`` reads.

Covers: requests -> prefix tree -> one zstd frame of one msgpack map.
Does not cover: where requests come from (``jsonl``, ``sessions``).
Who calls it: converters and tests; writes one file.

Every block of a prefix-hashed trace has exactly one predecessor, so a request is one
node of a tree. ``parent``, ``leaf`` and ``t_ms`` are stored as differences.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import zstandard

from shmoffload.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence
    from pathlib import Path

    import numpy.typing as npt

VERSION: Final = 1
_LEVEL: Final = 19
_MAX: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request.

    Attributes:
        t_ms: arrival.
        num_input_tokens: prompt, the partial last block included.
        num_output_tokens: 0 if the source does not say.
        blocks: names of its blocks, head first; a name counts together with all
            before it.
        session: conversation, -1 if the source does not say.
    """

    t_ms: int
    num_input_tokens: int
    num_output_tokens: int
    blocks: Sequence[Hashable]
    session: int = -1


@dataclass(frozen=True, slots=True)
class SourceTrace:
    """Requests as a source has them.

    Attributes:
        rows: in any order.
        block_tokens: tokens of a block.
        has_partial_tail: the last block of a request may not be full.
        meta: what the file should say of its origin.
    """

    rows: Sequence[TraceRow]
    block_tokens: int
    has_partial_tail: bool
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Written:
    """What was written.

    Attributes:
        num_requests: requests.
        num_blocks: nodes of the tree.
        block_tokens: tokens of each.
        span_s: from the first arrival to the last.
        num_bytes: of the file.
    """

    num_requests: int
    num_blocks: int
    block_tokens: int
    span_s: float
    num_bytes: int


def write_compact(source: SourceTrace, path: Path) -> Written:
    """Write requests in order of arrival; times stay as the source has them.

    Raises:
        TraceError: no request, a number out of range, or the file cannot be
            written.
    """
    rows = sorted(source.rows, key=lambda row: row.t_ms)
    if not rows:
        raise TraceError("the source has no requests: nothing was written")
    for row in rows:
        _check(row)
    parent, leaf = _tree(row.blocks for row in rows)
    columns: dict[str, tuple[str, npt.NDArray[Any]]] = {
        "parent": ("<i4", np.arange(len(parent)) - np.array(parent, np.int64)),
        "leaf": ("<i4", np.diff(np.array(leaf, np.int64), prepend=0)),
        "t_ms": ("<i8", np.diff(np.array([r.t_ms for r in rows], np.int64), prepend=0)),
        "n_in": ("<i4", np.array([r.num_input_tokens for r in rows])),
        "n_out": ("<i4", np.array([r.num_output_tokens for r in rows])),
        "session": ("<i4", np.array([r.session for r in rows])),
    }
    fields = {
        "v": VERSION,
        "block_tokens": source.block_tokens,
        "partial_tail": int(source.has_partial_tail),
        "meta": source.meta,
    }
    packed = {
        name: array.astype(kind).tobytes() for name, (kind, array) in columns.items()
    }
    raw = msgspec.msgpack.encode(fields | packed)
    data = zstandard.ZstdCompressor(level=_LEVEL).compress(raw)
    try:
        path.write_bytes(data)
    except OSError as error:
        raise TraceError(
            f"{path} cannot be written ({error.strerror}): give another OUT"
        ) from error
    return Written(
        num_requests=len(rows),
        num_blocks=len(parent),
        block_tokens=source.block_tokens,
        span_s=(rows[-1].t_ms - rows[0].t_ms) / 1000,
        num_bytes=len(data),
    )


def _tree(paths: Iterable[Sequence[Hashable]]) -> tuple[list[int], list[int]]:
    """Return the parent of each node, in order of first use, and each path's end."""
    node_of: dict[tuple[int, Hashable], int] = {}
    parent: list[int] = []
    leaf = []
    for path in paths:
        node = -1
        for name in path:
            place = (node, name)
            found = node_of.get(place)
            if found is None:
                found = node_of[place] = len(parent)
                parent.append(node)
            node = found
        leaf.append(node)
    return parent, leaf


def _check(row: TraceRow) -> None:
    if not (
        row.t_ms >= 0
        and 0 <= row.num_input_tokens <= _MAX
        and 0 <= row.num_output_tokens <= _MAX
        and -1 <= row.session <= _MAX
    ):
        raise TraceError(
            f"a request at {row.t_ms} ms with {row.num_input_tokens} input and "
            f"{row.num_output_tokens} output tokens is none: times and lengths have to "
            f"be 0 to {_MAX}"
        )
