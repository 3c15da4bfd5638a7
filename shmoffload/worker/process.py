"""What a worker does to its own process before it works.

Covers: dying with the parent, priority, title, inherited descriptors.
Does not cover: the work (``serve``).
Who calls it: ``__main__``, main thread, before any other thread exists.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

import setproctitle

_PR_SET_PDEATHSIG: Final = 1
_READ_BYTES: Final = 1 << 16
_MAX_CONFIG_BYTES: Final = 1 << 24


def die_with_parent(parent_pid: int | None = None) -> bool:
    """Ask the kernel for SIGKILL when the parent dies; False if it has died.

    The kernel does not look back: a parent that died before this call is seen by
    the changed parent only. Without ``parent_pid`` only a death during the call is
    seen; then the closed queue remains.
    """
    expected = os.getppid() if parent_pid is None else parent_pid
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    return os.getppid() == expected


def be_nice(nice: int) -> None:
    """Lower the priority to ``nice``, never raise it; all later threads inherit."""
    more = nice - os.getpriority(os.PRIO_PROCESS, 0)
    if more > 0:
        os.nice(more)


def set_title(session: str, tier: str) -> None:
    """Name the process for ``ps`` and for the sweep of leftovers."""
    setproctitle.setproctitle(f"shmoffload: {session} {tier}")


def read_all(fd: int) -> bytes:
    """Read a memfd or pipe to its end and close it.

    A memfd shares its position with its maker, so it is read by offset.

    Raises:
        OSError: the descriptor cannot be read.
    """
    parts: list[bytes] = []
    size = 0
    seekable = _is_seekable(fd)
    while size < _MAX_CONFIG_BYTES:
        part = os.pread(fd, _READ_BYTES, size) if seekable else os.read(fd, _READ_BYTES)
        if not part:
            break
        parts.append(part)
        size += len(part)
    os.close(fd)
    return b"".join(parts)


def _is_seekable(fd: int) -> bool:
    try:
        os.lseek(fd, 0, os.SEEK_CUR)
    except OSError:
        return False
    return True
