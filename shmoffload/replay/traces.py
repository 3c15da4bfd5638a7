"""Reads recorded request traces into a workload.

Covers: compact traces (one zstd frame of one msgpack map, format in the README of
the trace data) and Mooncake JSONL; time windows; coarser blocks.
Does not cover: replaying (``live``), generated requests (``generate``).
Who calls it: the command line and tests. Reads one file; a garbage file is a
``TraceError`` of one sentence.

A block's hash is a digest of the file's content and of the block's place in the
file's prefix tree. So it is the same in every run and every window, it implies the
whole prefix, and two traces share none.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import xxhash
import zstandard

from shmoffload.errors import TraceError
from shmoffload.replay.requests import ReplayRequest, Workload

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_MAX_TRACE_BYTES: Final = 1 << 30
_COLUMNS: Final = {
    "parent": "<i4",
    "leaf": "<i4",
    "t_ms": "<i8",
    "n_in": "<i4",
    "n_out": "<i4",
}
_JSONL_BLOCK_TOKENS: Final = 512
_JSONL_FIELDS: Final = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(frozen=True, slots=True)
class Window:
    """A span of a trace in seconds, both ends included."""

    first_s: float = 0.0
    last_s: float = math.inf

    @classmethod
    def parse(cls, text: str) -> Window:
        """Read ``A:B``; an empty text is the whole trace, an empty end is open.

        Raises:
            TraceError: no window.
        """
        if not text:
            return cls()
        first, colon, last = text.partition(":")
        try:
            window = cls(float(first or 0), float(last or math.inf))
        except ValueError:
            window = cls(1, 0)
        if not colon or not 0 <= window.first_s <= window.last_s:
            raise TraceError(
                f'--window "{text}" is no window: write seconds as A:B, for example '
                f"0:300"
            )
        return window

    def contains(self, time_s: float) -> bool:
        """Say whether an arrival lies in the window."""
        return self.first_s <= time_s <= self.last_s


@dataclass(frozen=True, slots=True)
class _Trace:
    """A trace as a prefix tree: a request's blocks are the path to its leaf.

    Attributes:
        fingerprint: digest of the file's content.
        block_tokens: tokens of a node.
        parent: node -> parent, -1 at a root; parents come first.
        leaf: request -> deepest node, -1 without blocks.
        t_ms: request -> arrival.
        n_in: request -> prompt tokens.
        n_out: request -> output tokens.
    """

    fingerprint: bytes
    block_tokens: int
    parent: Ints
    leaf: Ints
    t_ms: Ints
    n_in: Ints
    n_out: Ints


def read_trace(
    path: Path,
    *,
    block_tokens: int = 512,
    window: Window | None = None,
    limit: int | None = None,
) -> Workload:
    """Read the first ``limit`` requests of a window, with full blocks only.

    Raises:
        TraceError: unreadable, no trace, finer blocks than recorded, or no request
            in the window.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(
            f"{path} cannot be read ({error.strerror}): give a .ptrace.zst or "
            f"Mooncake .jsonl file"
        ) from error
    try:
        trace = _decode(data)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise TraceError(
            f"{path} is no request trace ({_one_line(error)}): give a .ptrace.zst or "
            f"Mooncake .jsonl file"
        ) from error
    factor, rest = divmod(block_tokens, trace.block_tokens)
    if factor < 1 or rest:
        raise TraceError(
            f"{path} has blocks of {trace.block_tokens} tokens: give --block-tokens "
            f"as a multiple of that, not {block_tokens}"
        )
    window = window or Window()
    requests = _requests(trace, factor, window, limit)
    if not requests:
        raise TraceError(
            f"no request of {path} arrives in the window: its "
            f"{len(trace.t_ms)} requests span "
            f"{trace.t_ms.min(initial=0) / 1000:g}:{trace.t_ms.max(initial=0) / 1000:g}"
            f" s; widen --window"
        )
    return Workload(path.name, block_tokens, requests)


def _decode(data: bytes) -> _Trace:
    if data.startswith(_ZSTD_MAGIC):
        return _decode_compact(data)
    return _decode_jsonl(data)


def _decode_compact(data: bytes) -> _Trace:
    try:
        size = zstandard.get_frame_parameters(data).content_size
        if not 0 < size <= _MAX_TRACE_BYTES:
            raise ValueError("its size is missing or above 1 GiB")
        raw = zstandard.ZstdDecompressor().decompress(data)
        fields = msgspec.msgpack.decode(raw, type=dict[str, Any])
    except (zstandard.ZstdError, msgspec.DecodeError) as error:
        raise ValueError(_one_line(error)) from error
    if fields.get("v") != 1:
        raise ValueError("not version 1 of the compact form")
    column = {
        name: np.frombuffer(fields[name], dtype).astype(np.int64)
        for name, dtype in _COLUMNS.items()
    }
    trace = _Trace(
        fingerprint=xxhash.xxh3_128_digest(raw),
        block_tokens=int(fields["block_tokens"]),
        parent=np.arange(len(column["parent"])) - column["parent"],
        leaf=np.cumsum(column["leaf"]),
        t_ms=np.cumsum(column["t_ms"]),
        n_in=column["n_in"],
        n_out=column["n_out"],
    )
    _check(trace)
    return trace


def _decode_jsonl(data: bytes) -> _Trace:
    rows: list[tuple[int, int, int, int]] = []
    node_of: dict[tuple[int, int], int] = {}
    parent: list[int] = []
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            t_ms, n_in, n_out, ids = _jsonl_row(line)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"line {number}: {_one_line(error)}") from error
        leaf = -1
        for block_id in ids:
            place = (leaf, block_id)
            if place not in node_of:
                node_of[place] = len(parent)
                parent.append(leaf)
            leaf = node_of[place]
        rows.append((t_ms, n_in, n_out, leaf))
    columns = np.array(rows, np.int64).reshape(-1, 4).T
    trace = _Trace(
        fingerprint=xxhash.xxh3_128_digest(data),
        block_tokens=_JSONL_BLOCK_TOKENS,
        parent=np.array(parent, np.int64),
        leaf=columns[3],
        t_ms=columns[0],
        n_in=columns[1],
        n_out=columns[2],
    )
    _check(trace)
    return trace


def _jsonl_row(line: bytes) -> tuple[int, int, int, list[int]]:
    row = json.loads(line)
    t_ms, n_in, n_out, ids = (row[name] for name in _JSONL_FIELDS)
    if len(ids) < n_in // _JSONL_BLOCK_TOKENS:
        raise ValueError(f"{len(ids)} hash_ids for {n_in} tokens")
    return int(t_ms), int(n_in), int(n_out), [int(i) for i in ids]


def _check(trace: _Trace) -> None:
    """Refuse numbers that no trace can have, so that nothing below can fail."""
    num_nodes, num_requests = len(trace.parent), len(trace.leaf)
    if trace.block_tokens < 1:
        raise ValueError("its blocks have no tokens")
    if {len(trace.t_ms), len(trace.n_in), len(trace.n_out)} != {num_requests}:
        raise ValueError("its columns differ in length")
    if num_requests == 0:
        raise ValueError("it has no requests")
    if num_nodes and (
        trace.parent.min() < -1 or (trace.parent >= np.arange(num_nodes)).any()
    ):
        raise ValueError("its prefix tree is broken")
    if trace.leaf.min() < -1 or trace.leaf.max() >= num_nodes:
        raise ValueError("a request ends outside of the prefix tree")
    if min(trace.t_ms.min(), trace.n_in.min(), trace.n_out.min()) < 0:
        raise ValueError("it has negative times or lengths")


def _requests(
    trace: _Trace, factor: int, window: Window, limit: int | None
) -> list[ReplayRequest]:
    """Cut the window out; blocks are every ``factor``-th node of a path."""
    depth = _depths(trace.parent)
    if factor > depth.max(initial=0):
        raise TraceError(
            f"no request has a full block of {factor * trace.block_tokens} tokens: "
            f"give a smaller --block-tokens"
        )
    is_kept = depth % factor == 0
    coarse_parent = _ancestors(trace.parent, factor)
    hash_of: dict[int, bytes] = {}
    order = np.argsort(trace.t_ms, kind="stable").tolist()
    inside = [i for i in order if window.contains(trace.t_ms[i] / 1000)][:limit]
    origin_ms = int(trace.t_ms[inside[0]]) if inside else 0
    requests = []
    for i in inside:
        num_blocks = int(trace.n_in[i]) // (trace.block_tokens * factor)
        node = int(trace.leaf[i])
        while node >= 0 and not (is_kept[node] and depth[node] <= num_blocks * factor):
            node = int(trace.parent[node])
        path = []
        while node >= 0:
            if node not in hash_of:
                place = b"%s:%d:%d" % (trace.fingerprint, factor, node)
                hash_of[node] = xxhash.xxh3_128_digest(place)
            path.append(hash_of[node])
            node = int(coarse_parent[node])
        requests.append(
            ReplayRequest(
                req_id=f"r{i}",
                arrival_s=(int(trace.t_ms[i]) - origin_ms) / 1000,
                num_input_tokens=int(trace.n_in[i]),
                num_output_tokens=int(trace.n_out[i]),
                hashes=path[::-1],
            )
        )
    return requests


def _depths(parent: Ints) -> Ints:
    """Return nodes from the root, the root's being 1, by doubling jumps."""
    depth = np.ones(len(parent), np.int64)
    jump = parent.copy()
    while (alive := jump >= 0).any():
        depth[alive] += depth[jump[alive]]
        jump[alive] = jump[jump[alive]]
    return depth


def _ancestors(parent: Ints, distance: int) -> Ints:
    """Return each node's ancestor ``distance`` up, -1 where there is none."""
    padded = np.append(parent, -1)  # so that -1 has itself as a parent
    node = padded
    for _ in range(distance - 1):
        node = padded[node]
    return node[:-1]


def _one_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:100]
