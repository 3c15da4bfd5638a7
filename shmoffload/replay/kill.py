"""Kills one tier's worker in the middle of a replay and watches it come back.

Covers: choosing the moment, the kill, what happened meanwhile.
Does not cover: restarting (the supervisor does), failing its jobs (the core does).
Who calls it: the demo and tests, from the replay's thread; ``await_return`` waits.

The worker is stopped first and killed once it owes an answer, so that the kill does
hit open jobs: an idle moment would show nothing.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import time
from typing import TYPE_CHECKING, Final

from shmoffload.wire.session import TierState, TierWord

if TYPE_CHECKING:
    from shmoffload.engine import Engine
    from shmoffload.replay.live import SchedulerLoop

STOPPED_AT_MOST_S: Final = 2.0
"""Far below the time after which a worker counts as hung."""
RETURN_TIMEOUT_S: Final = 15.0
_SLICE_S: Final = 0.05


class _Phase(enum.Enum):
    BEFORE = 0
    STOPPED = 1
    KILLED = 2
    BACK = 3


class WorkerKiller:
    """Kills a worker once, after some requests have ended.

    Args:
        engine: of the replay.
        tier_idx: whose worker.
        after: requests that have to end first.
    """

    def __init__(self, engine: Engine, tier_idx: int, *, after: int) -> None:
        self._engine = engine
        self._tier_idx = tier_idx
        self._after = after
        self._phase = _Phase.BEFORE
        self._pid = 0
        self._pidfd = -1
        self._old_epoch = 0
        self._failed_before = 0
        self._phase_s = 0.0
        self._gone_s = 0.0
        self._slowest_s = 0.0
        self._num_steps = 0

    def on_step(self, loop: SchedulerLoop) -> None:
        """Look once; to be called after each step."""
        ended = loop.figures.num_requests
        if self._phase is _Phase.BEFORE and ended >= self._after:
            self._stop()
        elif self._phase is _Phase.STOPPED:
            owes = self._word(TierWord.IN_FLIGHT_BYTES) > 0
            if owes or time.monotonic() - self._phase_s > STOPPED_AT_MOST_S:
                self._kill()
        elif self._phase is _Phase.KILLED:
            self._num_steps += 1
            self._slowest_s = max(self._slowest_s, *loop.figures.step_s[-1:])
            self._look()

    def await_return(self) -> bool:
        """Wait, bounded, until the worker is back; False if it is not."""
        if self._phase is _Phase.STOPPED:
            self._kill()
        deadline_s = time.monotonic() + RETURN_TIMEOUT_S
        while self._phase is _Phase.KILLED and time.monotonic() < deadline_s:
            self._engine.wait_idle(_SLICE_S)
            self._look()
            time.sleep(_SLICE_S)
        return self._phase is _Phase.BACK

    def story(self) -> str:
        """Return what happened, in a sentence or two; while the engine is open."""
        name = self._engine.config.tier[self._tier_idx].name
        if self._phase is _Phase.BEFORE:
            return f"The worker of {name} was not killed: the replay was too short."
        failed = self._failed() - self._failed_before
        said = (
            f"SIGKILL hit the worker of {name} (pid {self._pid}): {failed} of its "
            f"jobs failed; meanwhile {self._num_steps} steps went on, the slowest "
            f"with {self._slowest_s * 1000:.1f} ms in the engine"
        )
        if self._phase is not _Phase.BACK:
            return f"{said}. It did NOT come back in {RETURN_TIMEOUT_S:g} s."
        new_pid = self._engine.page.get_tier(self._tier_idx, TierWord.WORKER_PID)
        return f"{said}. It was back after {self._gone_s:.2f} s (pid {new_pid})."

    def _word(self, word: TierWord) -> int:
        return self._engine.page.get_tier(self._tier_idx, word)

    def _failed(self) -> int:
        return self._word(TierWord.JOBS_FAILED)

    def _stop(self) -> None:
        if self._word(TierWord.STATE) != TierState.UP:
            return  # not up just now: look again after the next step
        self._pid = self._word(TierWord.WORKER_PID)
        self._old_epoch = self._word(TierWord.WORKER_EPOCH)
        self._failed_before = self._failed()
        with contextlib.suppress(ProcessLookupError):
            # A pidfd, so that nobody else can be hit should the pid be reused.
            self._pidfd = os.pidfd_open(self._pid)
            signal.pidfd_send_signal(self._pidfd, signal.SIGSTOP)
            self._enter(_Phase.STOPPED)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.close(self._pidfd)
        self._enter(_Phase.KILLED)

    def _look(self) -> None:
        is_new = self._word(TierWord.WORKER_EPOCH) > self._old_epoch
        if is_new and self._word(TierWord.ENGINE_TIER_UP):
            self._gone_s = time.monotonic() - self._phase_s
            self._phase = _Phase.BACK

    def _enter(self, phase: _Phase) -> None:
        self._phase = phase
        self._phase_s = time.monotonic()
