"""What a test run has left behind: names in /dev/shm and processes.

Covers: session names that carry the run's mark, finding and removing leftovers.
Does not cover: descriptors and threads; when to look (``tests/conftest.py``).
Who calls it: tests. Nothing here waits.

Several test runs may share a machine, so a leftover counts only if it is of this
run: its session name carries ``run_mark()``, it inherited the run's environment
variable, or it descends from this process. A title set later overwrites the
environment in /proc, hence the first way; a supervisor is nobody's descendant,
hence the second.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SHM_DIR: Final = Path("/dev/shm")
RUN_VARIABLE: Final = "SHMOFFLOAD_TEST_RUN"
_PREFIX: Final = "shmoffload."
_OURS: Final = ("shmoffload:", "-m shmoffload")
_count = itertools.count(1)


def run_mark() -> str:
    """Return the text that begins every session name of this test process."""
    return f"t{os.getpid()}-"


def new_session_name() -> str:
    """Return a session name that no other test has or had."""
    return f"{run_mark()}{next(_count)}"


def mark_environment() -> None:
    """Let every process that this one starts from now on carry the run's mark."""
    os.environ[RUN_VARIABLE] = run_mark()


@dataclass(frozen=True)
class Leftovers:
    """Names of ours in /dev/shm and processes of ours, pid -> command line."""

    names: frozenset[str]
    processes: dict[int, str]

    def __bool__(self) -> bool:
        return bool(self.names or self.processes)

    def since(self, before: Leftovers) -> Leftovers:
        """Return what came after ``before``; sessions known then are left out."""
        sessions = {_session_of(name) for name in before.names}
        return Leftovers(
            frozenset(
                name
                for name in self.names - before.names
                if _session_of(name) not in sessions
            ),
            {
                pid: line
                for pid, line in self.processes.items()
                if pid not in before.processes and not sessions & set(line.split())
            },
        )

    def remove(self) -> None:
        """Kill the processes and unlink the names, so that later tests are clean."""
        for pid in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in self.names:
            (SHM_DIR / name).unlink(missing_ok=True)


def find_leftovers(*, unmarked_too: bool = False) -> Leftovers:
    """Look at /dev/shm and /proc.

    Args:
        unmarked_too: count names without any run's mark as well; only where
            nobody else uses the machine.
    """
    mark = run_mark()
    names = frozenset(
        name
        for name in os.listdir(SHM_DIR)
        if name.startswith(_PREFIX + mark)
        or (unmarked_too and name.startswith(_PREFIX))
    )
    return Leftovers(names, dict(_processes(mark)))


def _processes(mark: str) -> list[tuple[int, str]]:
    parents: dict[int, int] = {}
    lines: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ended while we looked
            stat = Path(f"/proc/{entry}/stat").read_text()
            line = Path(f"/proc/{entry}/cmdline").read_bytes()
            parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
            lines[int(entry)] = line.replace(b"\0", b" ").decode(errors="replace")
    return [
        (pid, line.strip())
        for pid, line in lines.items()
        if pid != os.getpid()
        and any(word in line for word in _OURS)
        and (mark in line or _descends(pid, parents) or _inherited(pid, mark))
    ]


def _descends(pid: int, parents: dict[int, int]) -> bool:
    for _ in range(64):  # a chain of parents is short; a torn picture may loop
        pid = parents.get(pid, 0)
        if pid == os.getpid():
            return True
    return False


def _inherited(pid: int, mark: str) -> bool:
    with contextlib.suppress(OSError):
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        return f"{RUN_VARIABLE}={mark}\0".encode() in environment
    return False


def _session_of(name: str) -> str:
    return name.removeprefix(_PREFIX).rpartition(".")[0]
