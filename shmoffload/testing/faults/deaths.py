"""Ways for a process to die or to hang, and whom to strike.

Covers: signals by pidfd, waiting for an end, the pids that a session page names.
Does not cover: what must be true afterwards (the tests say).
Who calls it: tests and tools, any process and thread; only ``wait_gone`` waits.

A process is struck only where the caller names its pid: nothing is searched by name.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from enum import StrEnum
from typing import Final

from shmoffload.errors import NoSessionError
from shmoffload.wire.session import SessionPage, TierWord, Word


class Death(StrEnum):
    """How a process ends, or stops without ending."""

    SIGKILL = "SIGKILL"
    SIGSEGV = "SIGSEGV"
    SIGBUS = "SIGBUS"
    HANG = "hang"
    """SIGSTOP; ``resume`` ends it, if nobody has killed the process meanwhile."""
    EXIT = "exit code"
    """SIGTERM: all that makes a process leave by itself from outside. A worker with
    a ``faulty`` tier leaves with any code by ``Control.exit``."""


_SIGNALS: Final = {
    Death.SIGKILL: signal.SIGKILL,
    Death.SIGSEGV: signal.SIGSEGV,
    Death.SIGBUS: signal.SIGBUS,
    Death.HANG: signal.SIGSTOP,
    Death.EXIT: signal.SIGTERM,
}


def strike(pid: int, death: Death) -> bool:
    """Let a process die so; False if it was gone already. Does not wait."""
    return _send(pid, _SIGNALS[death])


def resume(pid: int) -> bool:
    """End a hang; False if the process was gone."""
    return _send(pid, signal.SIGCONT)


def wait_gone(pid: int, *, timeout_s: float = 60.0) -> None:
    """Wait until a process has ended; its parent need not have reaped it.

    Raises:
        AssertionError: it still runs.
    """
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            if not poller.poll(timeout_s * 1000):
                raise AssertionError(f"process {pid} still runs after {timeout_s:g} s")
        finally:
            os.close(fd)


def worker_pid(session: str, tier_idx: int = 0) -> int:
    """Return the pid of a tier's worker, 0 while there is none."""
    page = _look(session)
    if page is None:
        return 0
    try:
        return page.get_tier(tier_idx, TierWord.WORKER_PID)
    finally:
        page.close()


def supervisor_pid(session: str) -> int:
    """Return the pid of a session's supervisor, 0 while there is none."""
    page = _look(session)
    if page is None:
        return 0
    try:
        return page.get(Word.SUPERVISOR_PID)
    finally:
        page.close()


def _look(session: str) -> SessionPage | None:
    try:
        return SessionPage.look(session)
    except NoSessionError:
        return None


def _send(pid: int, number: signal.Signals) -> bool:
    assert pid > 1, f"{pid} is no process to strike"
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True
