"""Other projects' request traces -> the compact form.

Covers: recognising a source, reading it.
Does not cover: the formats (``jsonl``, ``sessions``), writing (``compact``).
Who calls it: ``shmoffload convert`` and tests; reads files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from shmoffload.errors import TraceError
from shmoffload.replay.convert.jsonl import (
    LMCACHE_GLOB,
    data_of,
    read_lmcache,
    read_mooncake,
    read_qwen,
)
from shmoffload.replay.convert.sessions import Playback, read_sessions
from shmoffload.wire.config import closest

if TYPE_CHECKING:
    from pathlib import Path

    from shmoffload.replay.convert.compact import SourceTrace

FORMATS: Final = ("mooncake", "qwen", "kv-cache-tester", "lmcache")
AUTO: Final = "auto"


def read_source(
    path: Path, *, format_name: str = AUTO, playback: Playback | None = None
) -> SourceTrace:
    """Read a trace of another project.

    Args:
        path: a file, or a directory of sessions or lookup logs.
        format_name: one of ``FORMATS``; ``auto`` looks at the first object.
        playback: how sessions without a clock are played.

    Raises:
        TraceError: not such a trace.
    """
    if format_name not in (*FORMATS, AUTO):
        near = closest(format_name, FORMATS, "did you mean {}?", "known are {}")
        raise TraceError(f'--format "{format_name}" is none: {near}')
    if format_name == AUTO:
        format_name = _recognise(path)
    if format_name == "kv-cache-tester":
        return read_sessions(path, playback or Playback())
    readers = {"mooncake": read_mooncake, "qwen": read_qwen, "lmcache": read_lmcache}
    return readers[format_name](path)


def _recognise(path: Path) -> str:
    if path.is_dir():
        return "lmcache" if any(path.glob(LMCACHE_GLOB)) else "kv-cache-tester"
    first = next((line for line in data_of(path).splitlines() if line.strip()), b"")
    try:
        fields = msgspec.json.decode(first, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        fields = {}
    for field, format_name in (
        ("chunk_hashes", "lmcache"),
        ("chat_id", "qwen"),
        ("requests", "kv-cache-tester"),
        ("hash_ids", "mooncake"),
    ):
        if field in fields:
            return format_name
    raise TraceError(
        f"{path} is no trace that is known: give JSONL of Mooncake, Qwen-Bailian or "
        f"LMCache lookup logs, or a directory of kv-cache-tester sessions"
    )
