"""Traces with one JSON object a line, as their projects publish them.

Covers: Mooncake, Qwen-Bailian, LMCache lookup logs; their fields and units.
Does not cover: session files (``sessions``), writing (``compact``).
Who calls it: ``convert.read_source``; reads files; a wrong line is a ``TraceError``.

Fields, from the projects' public documents; unknown ones are ignored:

- Mooncake (kvcache-ai/Mooncake, FAST25-release/traces and its README): ``timestamp``
  in milliseconds, ``input_length``, ``output_length``, ``hash_ids`` of blocks of 512
  tokens, the last of which may be partial.
- Qwen-Bailian (alibaba-edu/qwen-bailian-usagetraces-anon, README): ``chat_id``,
  ``parent_chat_id`` (-1 = a root), ``timestamp`` in seconds, ``input_length``,
  ``output_length``, ``type``, ``turn``, ``hash_ids`` of blocks of 16 tokens. Its ids
  name a block's content; together with those before it they name a prefix.
- LMCache (LMCache/LMCache, lmcache/tools/cache_simulator/README.md, the files of
  ``--lookup-hash-log-dir``): ``timestamp`` in Unix seconds, ``request_id``,
  ``model_name``, ``chunk_size``, ``seq_len``, ``chunk_hashes`` of full chunks; the
  output length is not logged. A lookup that is repeated for one request is one
  request here; models share no blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from shmoffload.errors import TraceError
from shmoffload.replay.convert.compact import SourceTrace, TraceRow

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

MOONCAKE_BLOCK_TOKENS: Final = 512
QWEN_BLOCK_TOKENS: Final = 16
LMCACHE_GLOB: Final = "lookup_hashes_*.jsonl"
_MS_PER_S: Final = 1000


class MooncakeLine(msgspec.Struct):
    """A request of a Mooncake trace; see the module."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class QwenLine(msgspec.Struct):
    """A request of a Qwen-Bailian trace; see the module."""

    chat_id: int
    parent_chat_id: int
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    type: str = ""
    turn: int = 0


class LmcacheLine(msgspec.Struct):
    """A lookup that an LMCache server has logged; see the module."""

    timestamp: float
    chunk_size: int
    seq_len: int
    chunk_hashes: list[str]
    request_id: str = ""
    model_name: str = ""


Line = TypeVar("Line", bound=msgspec.Struct)


def read_mooncake(path: Path) -> SourceTrace:
    """Read a Mooncake trace; see the module."""
    rows = [
        TraceRow(
            round(line.timestamp), line.input_length, line.output_length, line.hash_ids
        )
        for line in lines_of(path, MooncakeLine)
    ]
    _check_lengths(path, rows, MOONCAKE_BLOCK_TOKENS)
    return SourceTrace(
        rows, MOONCAKE_BLOCK_TOKENS, has_partial_tail=True, meta=_meta(path, "mooncake")
    )


def read_qwen(path: Path) -> SourceTrace:
    """Read a Qwen-Bailian trace; a session is a chat with all that continue it."""
    root_of: dict[int, int] = {}
    rows = []
    for line in lines_of(path, QwenLine):
        root = root_of.get(line.parent_chat_id, line.chat_id)
        root_of[line.chat_id] = root
        rows.append(
            TraceRow(
                round(line.timestamp * _MS_PER_S),
                line.input_length,
                line.output_length,
                line.hash_ids,
                session=root,
            )
        )
    _check_lengths(path, rows, QWEN_BLOCK_TOKENS)
    return SourceTrace(
        rows, QWEN_BLOCK_TOKENS, has_partial_tail=True, meta=_meta(path, "qwen")
    )


def read_lmcache(path: Path) -> SourceTrace:
    """Read one lookup log, or a directory of them.

    Raises:
        TraceError: a wrong line, no line, or chunks of several sizes.
    """
    paths = sorted(path.glob(LMCACHE_GLOB)) if path.is_dir() else [path]
    lines = [line for part in paths for line in lines_of(part, LmcacheLine)]
    sizes = sorted({line.chunk_size for line in lines})
    if len(sizes) != 1 or sizes[0] < 1:
        raise TraceError(
            f"{path} has chunks of {sizes} tokens, one size is needed: give the "
            f"logs of one server"
        )
    lines.sort(key=lambda line: line.timestamp)
    seen: set[tuple[str, str, int]] = set()
    rows = []
    for line in lines:
        request = (line.model_name, line.request_id, line.seq_len)
        if line.request_id and request in seen:
            continue
        seen.add(request)
        rows.append(
            TraceRow(
                round((line.timestamp - lines[0].timestamp) * _MS_PER_S),
                line.seq_len,
                0,
                [(line.model_name, chunk) for chunk in line.chunk_hashes],
            )
        )
    return SourceTrace(
        rows, sizes[0], has_partial_tail=False, meta=_meta(path, "lmcache")
    )


def lines_of(path: Path, line_type: type[Line]) -> Iterator[Line]:
    """Yield the objects of a file, checked.

    Raises:
        TraceError: unreadable, or a line is not what it should be.
    """
    decoder = msgspec.json.Decoder(line_type)
    for number, text in enumerate(data_of(path).splitlines(), start=1):
        if text.strip():
            try:
                yield decoder.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise TraceError(
                    f"{path} line {number} is no request ({error}): give the right "
                    f"--format"
                ) from error


def data_of(path: Path) -> bytes:
    """Return a file's bytes.

    Raises:
        TraceError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise TraceError(
            f"{path} cannot be read ({error.strerror}): give a trace"
        ) from error


def _check_lengths(path: Path, rows: Sequence[TraceRow], block_tokens: int) -> None:
    for number, row in enumerate(rows, start=1):
        if len(row.blocks) < row.num_input_tokens // block_tokens:
            raise TraceError(
                f"{path} request {number} has {len(row.blocks)} blocks for "
                f"{row.num_input_tokens} tokens: give a trace with blocks of "
                f"{block_tokens} tokens, or the right --format"
            )


def _meta(path: Path, kind: str) -> dict[str, Any]:
    return {"source": path.name, "format": kind}
