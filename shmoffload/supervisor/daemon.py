"""``shmoffload serve``: a supervisor that is there before engines and after them.

Covers: lock, socket, page and sweep around the loop; a supervisor of our own kind
that is in the way.
Does not cover: the loop itself, the command line (``cli.serve``).
Who calls it: ``cli.serve``, in the main thread of its process.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Final

from shmoffload.errors import SessionInUseError
from shmoffload.supervisor.loop import Supervisor
from shmoffload.supervisor.names import remove_page
from shmoffload.supervisor.runtime_dir import listening, socket_path
from shmoffload.supervisor.setting import set_title
from shmoffload.supervisor.signals import StopSignals
from shmoffload.wire.names import is_held, owner_name, sweep
from shmoffload.wire.session import SessionPage, Word

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmoffload.wire.config import Config

_log = logging.getLogger("shmoffload.supervisor")
_WATCH_S: Final = 2.5


def serve(config: Config, *, worker_command: Sequence[str] | None = None) -> int:
    """Serve one engine after the other until SIGTERM, SIGINT or SIGHUP.

    Returns the exit code. Blocks until then. Names and socket of its making are
    removed at the end, and the region that it kept; what an engine uses stays.

    Raises:
        SessionInUseError: another daemon, or an engine with a supervisor of its own,
            has the session.
        StartError: runtime directory or /dev/shm cannot be used.
    """
    name = config.session.name
    with StopSignals() as signals, listening(name) as listener:
        if swept := sweep():
            _log.warning("removed names of the dead: %s", " ".join(sorted(swept)))
        page = SessionPage.open_or_create(config)
        try:
            _refuse_embedded(page, name)
            set_title(name)
            supervisor = Supervisor(
                name,
                worker_command=worker_command,
                own=(config, page),
                listener=listener,
            )
            tiers = ", ".join(f"{tier.name} ({tier.type})" for tier in config.tier)
            sys.stderr.write(
                f"ready: session {name}, socket {socket_path(name)}, "
                f"tiers {tiers or 'none'}\n"
            )
            sys.stderr.flush()
            return supervisor.run(signals)
        finally:
            remove_page(name, page.fd)
            page.close()
            sweep(name)  # a region that was kept for the next engine under us


def _refuse_embedded(page: SessionPage, session: str) -> None:
    """See whether another supervisor writes its heartbeat into our page.

    An engine without one is welcome: it waits for a daemon that was restarted.
    """
    before = page.get(Word.SUPERVISOR_HEARTBEAT_NS)
    deadline_s = time.monotonic() + _WATCH_S
    while is_held(owner_name(session), exclusively=True):
        if page.get(Word.SUPERVISOR_HEARTBEAT_NS) != before:
            raise SessionInUseError(
                f'session "{session}" is in use by an engine with a supervisor of its '
                f"own: end that engine, start the daemon, then the engine again"
            )
        if time.monotonic() > deadline_s:
            return
        time.sleep(0.05)
