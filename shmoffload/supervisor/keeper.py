"""One tier: does what its life decides, and says so in the session page.

Covers: starting and ending the tier's worker, its hand-over to the engine, the
supervisor's words of the tier in the page.
Does not cover: when (``life``); polling (``loop``).
Who calls it: ``loop.Supervisor``; one thread; never waits.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final, NamedTuple

from shmoffload.supervisor.life import Act, WorkerLife
from shmoffload.supervisor.process import WorkerProcess
from shmoffload.wire.messages import MAX_EPOCH, WorkerGone, WorkerStarted
from shmoffload.wire.session import TierState, TierWord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmoffload.supervisor.connection import Connection
    from shmoffload.wire.config import Config
    from shmoffload.wire.session import SessionPage

_log = logging.getLogger("shmoffload.supervisor")

_CLOCK_SLACK_S: Final = 1.0
"""``now_s`` is of the turn's begin; a worker may have beaten since."""


class Served(NamedTuple):
    """The engine whose workers run: its channel, epoch, region, configuration."""

    connection: Connection
    engine_epoch: int
    region_fd: int
    config: Config


class TierKeeper:
    """Keeps one worker running while an engine is served.

    Attributes:
        life: decides.
        page: None once the page may belong to somebody else.
    """

    def __init__(
        self,
        tier_idx: int,
        config: Config,
        page: SessionPage,
        worker_command: Sequence[str],
    ) -> None:
        """Go on from the words in ``page``: no epoch is used twice in a session."""
        self.page: SessionPage | None = page
        # Bounded, for others can write the page: beyond it no next one would exist.
        last = min(page.get_tier(tier_idx, TierWord.WORKER_EPOCH), MAX_EPOCH)
        self.life = WorkerLife(config.limits, epoch=last)
        self.life.restarts = min(page.get_tier(tier_idx, TierWord.RESTARTS), MAX_EPOCH)
        self._tier_idx = tier_idx
        self._name = config.tier[tier_idx].name
        self._command = worker_command
        self._process: WorkerProcess | None = None
        self._served: Served | None = None
        self._unacknowledged = 0  # worker epoch of the hand-over on its way, or 0
        self._text_seq = 0  # of the tier's last error when the worker was started

    @property
    def pidfd(self) -> int:
        """Of the worker; -1 without one."""
        return -1 if self._process is None else self._process.pidfd

    def due_s(self) -> float | None:
        """Return when ``turn`` will have something to do, None if only events."""
        return self.life.due_s(may_start=not self._unacknowledged)

    def serve(self, served: Served, *, now_s: float) -> None:
        """Run a worker for this engine from now on."""
        self._served = served
        self._unacknowledged = 0
        self.life.want(now_s=now_s)

    def stop(self, *, now_s: float, grace_s: float) -> None:
        """Run no worker any more; the present one gets ``grace_s``."""
        self.life.stop(now_s=now_s, grace_s=grace_s)

    def forget_engine(self) -> None:
        """The engine's channel is about to be closed."""
        self._served = None

    def acknowledge(self, worker_epoch: int) -> None:
        """The engine holds the descriptors of this incarnation."""
        if worker_epoch == self._unacknowledged:
            self._unacknowledged = 0

    def turn(self, *, now_s: float) -> None:
        """Look at the worker's words and do what is due."""
        while act := self.life.turn(
            now_s=now_s,
            beat_s=self._beat_s(now_s),
            is_ready=self._word(TierWord.WORKER_READY) == self.life.epoch,
            may_start=not self._unacknowledged,
        ):
            if act is Act.START:
                self._start(now_s)
            elif self._process is not None:
                if act is Act.KILL:
                    _log.warning("tier %s: killing: %s", self._name, self.life.reason)
                    self._process.kill()
                else:
                    self._process.terminate()
        is_stuck = self.life.state is TierState.STUCK
        if is_stuck and self._word(TierWord.STATE) != TierState.STUCK:
            self._say_error()  # once: the state is published next
        self._publish()

    def reap(self, *, now_s: float) -> None:
        """Collect the worker if it is dead, and tell the engine."""
        if self._process is None:
            return
        code = self._process.reap()
        if code is None:
            return
        self._process = None
        self.life.exited(code, now_s=now_s, words=self._last_words())
        if self.life.state is not TierState.STOPPED:
            self._say_error(is_told=self._served is not None)
        if self._served is not None:
            self._served.connection.post(
                WorkerGone(self._tier_idx, self.life.epoch, self.life.reason)
            )
        self._publish()

    def _start(self, now_s: float) -> None:
        assert self._served is not None
        assert self.page is not None
        self.life.epoch += 1
        # Before the worker exists: a successor of this process must not use it again.
        self.page.set_tier(self._tier_idx, TierWord.WORKER_EPOCH, self.life.epoch)
        self._text_seq = self._word(TierWord.TEXT_SEQ)
        try:
            process, engine_end = WorkerProcess.start(
                self._command,
                self._served.config,
                tier_idx=self._tier_idx,
                worker_epoch=self.life.epoch,
                engine_epoch=self._served.engine_epoch,
                region_fd=self._served.region_fd,
                page_fd=self.page.fd,
            )
            # Copies, for the connection to close; the socket itself goes at once.
            fds = [os.dup(engine_end.fileno()), os.dup(process.pidfd)]
            engine_end.close()
        except OSError as error:
            self.life.start_failed(error.strerror or str(error), now_s=now_s)
            self._say_error()
            return
        self._process = process
        self._unacknowledged = self.life.epoch
        self.life.started(now_s=now_s)
        self.page.set_tier(self._tier_idx, TierWord.STARTED_NS, int(now_s * 1e9))
        self._publish()
        self._served.connection.post(
            WorkerStarted(self._tier_idx, self.life.epoch, process.pid), fds
        )

    def _beat_s(self, now_s: float) -> float:
        """Return the last heartbeat; 0.0 for one of the future, which is garbage.

        Taken at its word it would hide a hang for as long as it lies ahead.
        """
        beat_s = self._word(TierWord.HEARTBEAT_NS) / 1e9
        return beat_s if beat_s <= now_s + _CLOCK_SLACK_S else 0.0

    def _last_words(self) -> str:
        """Return what the dead worker has left in the page; "" if nothing whole."""
        if self.page is None or self._word(TierWord.TEXT_SEQ) == self._text_seq:
            return ""
        return " ".join(self.page.tier_error(self._tier_idx).split())

    def _say_error(self, *, is_told: bool = False) -> None:
        # The engine, once told, raises or logs a sentence of its own: one is enough.
        level = logging.INFO if is_told else logging.WARNING
        _log.log(level, "tier %s: worker %s", self._name, self.life.reason)
        if self.page is not None:
            text = self.life.words or self.life.reason
            self.page.set_tier_error(self._tier_idx, text)

    def _word(self, word: TierWord) -> int:
        return 0 if self.page is None else self.page.get_tier(self._tier_idx, word)

    def _publish(self) -> None:
        """Write the words of this tier that are the supervisor's."""
        if self.page is None:
            return
        pid = 0 if self._process is None else self._process.pid
        self.page.set_tier(self._tier_idx, TierWord.STATE, self.life.state)
        self.page.set_tier(self._tier_idx, TierWord.WORKER_PID, pid)
        self.page.set_tier(self._tier_idx, TierWord.RESTARTS, self.life.restarts)
