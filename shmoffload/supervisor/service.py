"""Serving one engine: its page, its workers, its end.

Covers: taking an ``Attach``, running the tiers' workers, the four ways an engine
ends, removing a dead engine's names.
Does not cover: sockets and polling, who comes next (``loop``).
Who calls it: ``loop.Supervisor``; one thread; never waits.

One engine is served at a time. Each end leads through the same stop of all workers,
and only when they are gone the next engine may come:

==============  =======  ================================================
cause           grace    beside stopping the workers
==============  =======  ================================================
Detach          3 s      Detached is sent when all are reaped
death (pidfd)   1 s      the engine's names are removed, at once
end of file     1 s      after 2 s in which no death was seen
signal to us    1 or 3 s the supervisor leaves
==============  =======  ================================================
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Final

from shmoffload.supervisor.attach import map_page, same_object
from shmoffload.supervisor.keeper import Served, TierKeeper
from shmoffload.supervisor.life import Phase
from shmoffload.supervisor.names import remove_engine_names, remove_page
from shmoffload.supervisor.setting import be_polite
from shmoffload.wire import config as config_
from shmoffload.wire.messages import (
    MAX_TEXT_CHARS,
    Attached,
    Detach,
    Detached,
    HandoverAck,
    KillWorker,
)
from shmoffload.wire.session import Word

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmoffload.supervisor.connection import Connection, Pending
    from shmoffload.wire.config import Config
    from shmoffload.wire.session import SessionPage

_log = logging.getLogger("shmoffload.supervisor")

GRACE_DETACH_S: Final = 3.0
GRACE_DEATH_S: Final = 1.0


class Service:
    """The session's tiers, and the engine for which they run, if there is one.

    Attributes:
        keepers: one per tier; empty before the first engine of an embedded one.
        is_ending: the engine's workers are being stopped.
        has_failed: a worker could not be ended.
    """

    def __init__(
        self,
        session: str,
        worker_command: Sequence[str],
        own: tuple[Config, SessionPage] | None,
    ) -> None:
        """Prepare; ``own`` is a daemon's configuration and page."""
        self.keepers: list[TierKeeper] = []
        self.is_ending = False
        self.has_failed = False
        self._session = session
        self._worker_command = worker_command
        self._is_daemon = own is not None
        self._page: SessionPage | None = None
        self._page_lost = False
        self._served: Served | None = None
        if own is not None:
            self._take_page(*own)

    @property
    def connection(self) -> Connection | None:
        """The served engine's channel."""
        return None if self._served is None else self._served.connection

    def begin(self, connection: Connection, attach: Pending, *, now_s: float) -> str:
        """Serve an engine whose ``Attach`` is in order; takes its descriptors over.

        Returns:
            Why not, in one sentence; "" when it is served.
        """
        assert self._served is None
        message, region_fd, page_fd = attach
        config = config_.decode(message.config)
        if not self._has_page(config, page_fd):
            os.close(region_fd)
            return (
                f'the engine\'s page is not that of session "{self._session}": end '
                f"the engine, then the daemon, and start the daemon first"
            )
        self._served = Served(connection, message.engine_epoch, region_fd, config)
        self.is_ending = False
        connection.post(Attached(os.getpid()))
        for keeper in self.keepers:
            keeper.serve(self._served, now_s=now_s)
        return ""

    def request(
        self, message: HandoverAck | KillWorker | Detach, *, now_s: float
    ) -> None:
        """Act on a message of the served engine, after its ``Attach``."""
        if isinstance(message, Detach):
            self.end(GRACE_DETACH_S, now_s=now_s)
        elif 0 <= message.tier_idx < len(self.keepers):
            keeper = self.keepers[message.tier_idx]
            if isinstance(message, HandoverAck):
                keeper.acknowledge(message.worker_epoch)
            else:
                reason = message.reason[:MAX_TEXT_CHARS]
                keeper.life.kill(message.worker_epoch, reason)

    def engine_died(self, *, now_s: float) -> None:
        """Proven. Names go first: whatever happens to us now, they are gone."""
        assert self._served is not None
        _log.warning("engine %d is dead", self._served.connection.pid)
        remove_engine_names(self._session, self._served.region_fd)
        if not self._is_daemon and self._page is not None:
            # From now on the page may be a successor's: not one more word into it.
            for keeper in self.keepers:
                keeper.page = None
            self._page_lost = True
            remove_page(self._session, self._page.fd)
        self.end(GRACE_DEATH_S, now_s=now_s)

    def end(self, grace_s: float, *, now_s: float) -> None:
        """Stop the engine's workers; ``turn`` says when they are gone. Repeatable."""
        self.is_ending = True
        for keeper in self.keepers:
            keeper.stop(now_s=now_s, grace_s=grace_s)

    def beat(self, *, now_s: float) -> None:
        """Write the supervisor's heartbeat."""
        if self._page is not None and not self._page_lost:
            self._page.set(Word.SUPERVISOR_HEARTBEAT_NS, int(now_s * 1e9))

    def turn(self, events: dict[int, int], *, now_s: float) -> Connection | None:
        """Give every tier its turn.

        Returns:
            The channel of the engine whose service ended in this turn, to be closed.
        """
        for keeper in self.keepers:
            if keeper.pidfd >= 0 and events.get(keeper.pidfd):
                keeper.reap(now_s=now_s)
            keeper.turn(now_s=now_s)
        if not self.is_ending or not all(k.life.is_settled for k in self.keepers):
            return None
        return self._finish()

    def _finish(self) -> Connection | None:
        """All workers are gone, or cannot be ended by anybody."""
        self.is_ending = False
        if self._served is None:
            return None
        connection, _, region_fd, _ = self._served
        if all(keeper.life.phase is Phase.IDLE for keeper in self.keepers):
            connection.post(Detached())
        else:
            self.has_failed = True  # end of file without Detached: death not proven
        for keeper in self.keepers:
            keeper.forget_engine()
        os.close(region_fd)
        self._served = None
        return connection

    def _has_page(self, config: Config, page_fd: int) -> bool:
        """Take over the engine's page, or see that it is the daemon's."""
        if self._is_daemon:
            assert self._page is not None
            is_ours = same_object(page_fd, self._page.fd)
            os.close(page_fd)
            return is_ours
        page = map_page(page_fd, config)
        if page is not None:
            self._take_page(config, page)
        return page is not None

    def _take_page(self, config: Config, page: SessionPage) -> None:
        self._page = page
        page.set(Word.SUPERVISOR_PID, os.getpid())
        self.beat(now_s=time.monotonic())
        self.keepers = [
            TierKeeper(idx, config, page, self._worker_command)
            for idx in range(len(config.tier))
        ]
        be_polite(config)

    def close(self) -> None:
        """Let go of the page; what is left of workers dies with us (PDEATHSIG)."""
        self._finish()
        if self._page is None:
            return
        if self._page_lost:
            # Once more: somebody may have only looked when the engine died.
            remove_page(self._session, self._page.fd)
        else:
            self._page.set(Word.SUPERVISOR_PID, 0)
        if not self._is_daemon:
            self._page.close()
        self._page = None
