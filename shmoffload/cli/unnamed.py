"""Memory of ours that processes still use and that nobody can open any more.

Covers: descriptors of session pages and regions whose name was removed; whoever maps
one holds its descriptor, for the lock.
Does not cover: names that nobody uses (``cli.leftovers``).
Who calls it: ``cli.doctor``; blocks on nothing (``maps`` would, see
``process_checks``).

Whoever removes a name under a live session breaks nothing at once: its processes go
on, but no worker of the inference server can join, and no tool sees the session.
systemd does it at a user's logout (``RemoveIPC``, on by default), a careless ``rm``
at any time. After a killed engine it is as it should be, until its GPU workers end.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shmoffload.cli.checks import Check
from shmoffload.wire.names import NAME_PREFIX, SHM_DIR

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOST: Final = re.compile(
    rf"{re.escape(f'{SHM_DIR}/{NAME_PREFIX}')}(.+)\.(?:page|region) \(deleted\)"
)


def unnamed_memory(session: str | None) -> Iterator[Check]:
    """Name the processes of all sessions, or of one, whose memory lost its name."""
    users = defaultdict[str, list[int]](list)
    for pid, lost in _lost_names():
        for name in sorted(lost):
            if session in (None, name):
                users[name].append(pid)
    for name, pids in sorted(users.items()):
        listed = ", ".join(map(str, sorted(pids)))
        fact = f"Memory of session {name} has lost its name, processes {listed} use it"
        fix = (
            f"end them and start the session again (kill {listed.replace(',', '')}); "
            f"after a logout: RemoveIPC=no in /etc/systemd/logind.conf"
        )
        yield Check("names", fact, fix)
    if not users:
        yield Check("names", "all memory in use has its name")


def _lost_names() -> Iterator[tuple[int, set[str]]]:
    """Yield (pid, sessions) for each process of this user that holds such memory."""
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        lost = set()
        with contextlib.suppress(OSError):  # it ended, or is not ours to look at
            place = Path("/proc", entry)
            if place.stat().st_uid != os.geteuid():
                continue
            for fd in os.listdir(place / "fd"):
                with contextlib.suppress(OSError):  # it was just closed
                    match = _LOST.fullmatch(os.readlink(place / "fd" / fd))
                    if match:
                        lost.add(match[1])
        if lost:
            yield int(entry), lost
