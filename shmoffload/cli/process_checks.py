"""What ``doctor`` looks at in the processes of sessions: who is stopped or stuck.

Covers: finding them, their states, which session and tier they are of.
Does not cover: whether the live ones answer (``cli.checks``).
Who calls it: ``cli.doctor``; the main thread. Waits ``LOOKS`` turns, and only if there
is something to look at twice.

Nothing is read that takes a lock on the memory of the process looked at (``maps``,
``cmdline``): whoever asks for it would hang beside the one that hangs. A title says
that a process is ours, a descriptor of the session page whose.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from shmoffload.cli.checks import Check
from shmoffload.errors import NoSessionError
from shmoffload.wire.names import SHM_DIR, live_sessions, page_name
from shmoffload.wire.session import (
    PAGE_VERSION,
    SessionPage,
    TierState,
    TierWord,
    Word,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOKS: Final = 5
"""A disk at work is waited for in the same state as a hung one, but never for long:
who waits has run in between, which its count of context switches tells. (Three threads
that write with O_DIRECT were in it at every look.)"""
_TURN_S: Final = 0.1
_MEND = (
    "mend its storage (see dmesg, mount), or restart the machine; it cannot be ended"
)
_PROC: Final = Path("/proc")
_TITLE: Final = re.compile(r"\d+ \(shmoffload: .*\) \w")
_WAITING: Final = re.compile(r"^State:\s*D", re.MULTILINE)
_SWITCHES: Final = re.compile(r"^\w*ctxt_switches:\s*(\d+)", re.MULTILINE)
_PAGE: Final = re.compile(
    re.escape(f"{SHM_DIR}{page_name('@')}").replace("@", "([a-z0-9_-]+)")
    + r"( \(deleted\))?"
)


class _Known(NamedTuple):
    """A process that a live session's page names."""

    who: str
    session: str


def processes(session: str | None) -> Iterator[Check]:
    """Name what is stopped, hangs in the kernel, or was killed and is not gone.

    Args:
        session: this one's only; None: all of this user's.
    """
    known, found = _known(session)
    for pid, state in _states(known).items():
        owner = known.get(pid) or _whose(pid)
        if session in (None, owner.session):
            found.setdefault(pid, _check(pid, owner.who, state))
    yield from found.values()
    if not found:
        yield Check("processes", "no process of ours is stopped or hangs")


def _check(pid: int, who: str, state: str) -> Check:
    who = f"{who} (process {pid})"
    if state == "D":
        return Check("processes", f"{who} hangs in the kernel", _MEND)
    if state == "t":
        fix = f"end the debugger that /proc/{pid}/status names as TracerPid"
        return Check("processes", f"{who} is held by a debugger", fix)
    return Check("processes", f"{who} is stopped", f"kill -CONT {pid}")


def _known(session: str | None) -> tuple[dict[int, _Known], dict[int, Check]]:
    """Return whom pages name, and what the supervisors have found themselves."""
    known: dict[int, _Known] = {}
    stuck: dict[int, Check] = {}
    for name in live_sessions():
        if session not in (None, name):
            continue
        try:
            page = SessionPage.look(name)
        except (NoSessionError, OSError, ValueError):
            continue  # it ended, or is only now being made
        with contextlib.closing(page):
            if page.get(Word.VERSION) != PAGE_VERSION:
                continue
            of = f"of session {name}"
            known[page.get(Word.ENGINE_PID)] = _Known(f"The engine {of}", name)
            known[page.get(Word.SUPERVISOR_PID)] = _Known(f"The supervisor {of}", name)
            for idx in range(page.num_tiers):
                pid = page.get_tier(idx, TierWord.WORKER_PID)
                who = f"The worker of tier {page.tier_name(idx)[0]} {of}"
                known[pid] = _Known(who, name)
                if page.get_tier(idx, TierWord.STATE) == TierState.STUCK:
                    fact = f"{who} (process {pid}) was killed and is not gone"
                    stuck[pid] = Check("processes", fact, _MEND)
    return known, stuck


def _states(known: dict[int, _Known]) -> dict[int, str]:
    """Return the state of each process of ours that does not go on by itself."""
    stopped: dict[int, str] = {}
    waiting: dict[int, set[str]] = {}
    for entry in filter(str.isdecimal, os.listdir(_PROC)):
        pid = int(entry)
        state = _state(pid, is_known=pid in known)
        if state in ("T", "t"):
            stopped[pid] = state
        elif state and (waits := _waits(pid)):
            waiting[pid] = waits
    for _ in range(LOOKS - 1):
        if waiting:
            time.sleep(_TURN_S)
        waiting = {
            pid: still
            for pid, waits in waiting.items()
            if (still := waits & _waits(pid))
        }
    return {**stopped, **dict.fromkeys(waiting, "D")}


def _state(pid: int, *, is_known: bool) -> str:
    """Return the state letter of a process of ours, "" if it is none."""
    try:
        stat = (_PROC / f"{pid}/stat").read_text(errors="replace")
        is_ours = _TITLE.match(stat) or (is_known and _whose(pid).session)
        if not is_ours or (_PROC / f"{pid}").stat().st_uid != os.geteuid():
            return ""
    except OSError:
        return ""  # it ended meanwhile
    return stat.rpartition(") ")[2][:1]


def _waits(pid: int) -> set[str]:
    """Return the waits in the kernel of a process's threads, the same text for one.

    Of any of them: the main thread of a worker does no I/O.
    """
    waits = set()
    with contextlib.suppress(OSError):  # it ended meanwhile
        for thread in (_PROC / f"{pid}/task").iterdir():
            status = (thread / "status").read_text(errors="replace")
            if _WAITING.search(status):
                waits.add(f"{thread.name} {_SWITCHES.findall(status)}")
    return waits


def _whose(pid: int) -> _Known:
    """Return the session whose page a process has open, by its descriptors."""
    with contextlib.suppress(OSError):
        for entry in os.listdir(_PROC / f"{pid}/fd"):
            with contextlib.suppress(OSError):
                match = _PAGE.fullmatch(os.readlink(_PROC / f"{pid}/fd/{entry}"))
                if match:
                    return _Known(f"A process of session {match[1]}", match[1])
    return _Known("A process of a session that is gone", "")
