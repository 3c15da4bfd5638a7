"""What a session costs the machine besides time, and what is left of it.

Covers: descriptors and memory of its processes, names and bytes in /dev/shm, which
processes are a session's; how they have grown since the first look.
Does not cover: when to look (``driver``).
Who calls it: ``driver`` and ``second``; any process and thread. Nothing waits.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shmoffload.wire.names import SHM_DIR

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_MORE_FDS: Final = 3
"""A leak of one per fault, or per restart, is more after a minute."""
MAX_MORE_RSS: Final = 32 << 20
"""Python's heap moves by some MiB; what leaks goes on."""


@dataclass(frozen=True, slots=True)
class Resources:
    """One look while nothing is under way.

    Attributes:
        engine_fds: open descriptors of the engine's process.
        engine_rss_bytes: its own memory, without shared pages.
        supervisor_fds: the same of the supervisor.
        supervisor_rss_bytes: the same of the supervisor.
        worker_fds: of all workers together.
        shm_bytes: of the session's names in /dev/shm.
        num_names: of those names.
        num_processes: that belong to the session.
    """

    engine_fds: int
    engine_rss_bytes: int
    supervisor_fds: int
    supervisor_rss_bytes: int
    worker_fds: int
    shm_bytes: int
    num_names: int
    num_processes: int

    def to_json(self) -> dict[str, int]:
        """Return the fields by name."""
        return asdict(self)


def look(session: str, *, supervisor_pid: int, worker_pids: Sequence[int]) -> Resources:
    """Look at a session whose engine is this process."""
    names = names_of(session)
    return Resources(
        engine_fds=_num_fds(os.getpid()),
        engine_rss_bytes=_rss_bytes(os.getpid()),
        supervisor_fds=_num_fds(supervisor_pid),
        supervisor_rss_bytes=_rss_bytes(supervisor_pid),
        worker_fds=sum(_num_fds(pid) for pid in worker_pids),
        shm_bytes=sum(_size(name) for name in names),
        num_names=len(names),
        num_processes=len(pids_of(session)),
    )


def excess(first: Resources, now: Resources) -> list[str]:
    """Return a sentence for everything but memory that is more than at first.

    Nothing is under way when both are taken, so that even one look says it all.
    """
    found = []
    for name, before in first.to_json().items():
        after = now.to_json()[name]
        allowed = before + (MAX_MORE_FDS if name.endswith("_fds") else 0)
        if after > allowed and not name.endswith("_rss_bytes"):
            found.append(f"{name} rose from {before} to {after}: {allowed} is allowed")
    return found


def growth(looks: Sequence[Resources]) -> list[str]:
    """Return a sentence for memory that has grown over a run.

    By the smallest value of the later half: a heap breathes, but what leaks is high
    ever after.
    """
    first, late = looks[0], looks[len(looks) // 2 :]
    found = []
    for name, before in first.to_json().items():
        after = min(look.to_json()[name] for look in late)
        if name.endswith("_rss_bytes") and after > before + MAX_MORE_RSS:
            found.append(
                f"{name} rose from {before} to {after} and did not fall again: "
                f"{MAX_MORE_RSS} more is allowed"
            )
    return found


def names_of(session: str) -> list[str]:
    """Return a session's names in /dev/shm."""
    return [name for name in os.listdir(SHM_DIR) if f".{session}." in name]


def pids_of(session: str) -> list[int]:
    """Return the processes, but this one, that name the session in their command."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                line = Path(f"/proc/{entry}/cmdline").read_bytes()
            except OSError:  # it has ended while we looked
                continue
            if session.encode() in line.replace(b"\0", b" ").split(b" "):
                found.append(int(entry))
    return found


def _num_fds(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def _rss_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def _size(name: str) -> int:
    """Return the bytes that a name takes: whole pages, as a pid has 4 digits or 7."""
    try:
        size = os.stat(Path(SHM_DIR) / name).st_size
    except OSError:
        return 0
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
