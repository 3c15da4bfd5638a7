"""How the supervisor's process sits in the system: title, session, priority.

Covers: process title, its own session, the autogroup's nice value.
Does not cover: a worker's own priority (``worker``).
Who calls it: ``service`` and ``daemon``, main thread, once each; never waits.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import setproctitle

if TYPE_CHECKING:
    from shmoffload.wire.config import Config


def own_session() -> None:
    """Leave the shell's session, so that the autogroup below is only ours."""
    with contextlib.suppress(PermissionError):  # leads its group: a session already
        os.setsid()


def set_title(session: str) -> None:
    """Say in ``ps`` who we are."""
    setproctitle.setproctitle(f"shmoffload: {session} supervisor")


def be_polite(config: Config) -> None:
    """Give our autogroup the workers' niceness, if the group is ours alone.

    A session of its own is a scheduling group of its own: there a worker's nice
    value counts only among us and nothing against the inference server (measured:
    a worker at nice 10 kept 2.3 of 2.4 CPU s, and 0.7 with this).
    """
    autogroup = Path("/proc/self/autogroup")
    if os.getsid(0) != os.getpid() or not config.tier or not autogroup.exists():
        return
    with contextlib.suppress(OSError):
        autogroup.write_text(str(min(tier.nice for tier in config.tier)))
