"""What to do with one tier's worker: start, end, kill, wait, give up.

Covers: restart back-off, hang, grace, unreapable workers; pure, time comes in.
Does not cover: processes, descriptors, page words (``keeper`` does what this says).
Who calls it: ``keeper.TierKeeper``, in the supervisor's only thread.

A life goes IDLE -> RUNNING -> (ENDING ->) (KILLED ->) IDLE. A process exists in every
phase but IDLE, and only ``exited`` leads back: so no replacement ever opens the
storage of a worker that is not proven dead, however long it takes.
"""

from __future__ import annotations

import enum
import signal
from typing import TYPE_CHECKING, Final

from shmoffload.wire.session import TierState

if TYPE_CHECKING:
    from shmoffload.wire.config import LimitsConfig

HEALTHY_AFTER_S: Final = 60.0
"""A worker that was up this long earns the shortest back-off again."""
STUCK_AFTER_S: Final = 5.0
"""SIGKILL needs longer only for a task that the kernel cannot interrupt."""
EXIT_REFUSED: Final = 2
"""A worker's exit code for "cannot work as configured"."""

_LIKELY_CAUSE: Final = {
    signal.SIGKILL: "out of memory, or by hand",
    signal.SIGTERM: "by hand",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "a crash in native code",
    signal.SIGBUS: "/dev/shm is full, or its file was cut",
}


class Act(enum.Enum):
    """What the edge has to do now."""

    START = enum.auto()
    TERMINATE = enum.auto()
    KILL = enum.auto()


class Phase(enum.Enum):
    """Where the process is; finer than ``TierState``, which is for people."""

    IDLE = enum.auto()
    RUNNING = enum.auto()
    ENDING = enum.auto()
    KILLED = enum.auto()


def describe_exit(returncode: int) -> str:
    """Phrase how a process ended (``subprocess`` convention: -N is signal N)."""
    if returncode >= 0:
        return f"left with exit code {returncode}; its last lines are on stderr"
    try:
        number = signal.Signals(-returncode)
    except ValueError:
        return f"killed by signal {-returncode}"
    cause = _LIKELY_CAUSE.get(number)
    return f"killed by {number.name}" + (f" ({cause})" if cause else "")


class WorkerLife:
    """Decides for one tier; every method is quick and pure.

    Attributes:
        state: for the page.
        phase: where the process is.
        epoch: of the present or last worker.
        reason: why the last worker ended, or is to be ended.
        words: what it said of that itself, "" if nothing.
        restarts: starts other than the first after a ``want``.
    """

    def __init__(self, limits: LimitsConfig, *, epoch: int = 0) -> None:
        """Start without a worker; ``epoch`` is the last one that was used."""
        self.state = TierState.STOPPED
        self.phase = Phase.IDLE
        self.epoch = epoch
        self.reason = ""
        self.words = ""
        self.restarts = 0
        self._limits = limits
        self._wanted = False
        self._is_first = True
        self._backoff_s = limits.restart_backoff_s
        self._grace_s = 0.0
        self._due_s = 0.0  # IDLE: start; ENDING: kill; KILLED: call it stuck
        self._base_s = 0.0  # no hang is counted from before this
        self._up_s: float | None = None
        self._kill_reason = ""

    @property
    def is_settled(self) -> bool:
        """No process is left, or none that can be ended by anybody."""
        return self.phase is Phase.IDLE or self.state is TierState.STUCK

    def want(self, *, now_s: float) -> None:
        """An engine is there: run a worker, the first one at once."""
        self._wanted = True
        self._backoff_s = self._limits.restart_backoff_s
        self._is_first = True
        if self.phase is Phase.IDLE:
            self.state = TierState.STARTING
            self._due_s = now_s

    def stop(self, *, now_s: float, grace_s: float) -> None:
        """No engine is there any more: end the worker, within ``grace_s``."""
        self._wanted = False
        self._grace_s = grace_s
        if self.phase is Phase.IDLE:
            self.state = TierState.STOPPED
        elif self.phase is Phase.ENDING:
            self._due_s = min(self._due_s, now_s + grace_s)

    def kill(self, epoch: int, reason: str) -> bool:
        """End this incarnation at the next turn; False if it is not this one."""
        if self.phase is not Phase.RUNNING or epoch != self.epoch:
            return False
        self._kill_reason = reason
        return True

    def excuse(self, *, now_s: float) -> None:
        """Forget silence until now: the supervisor itself did not run."""
        self._base_s = now_s

    def turn(
        self, *, now_s: float, beat_s: float, is_ready: bool, may_start: bool
    ) -> Act | None:
        """Return what to do now; call it again until it returns None.

        Args:
            now_s: CLOCK_MONOTONIC.
            beat_s: the worker's last heartbeat, same clock; 0.0 if unknown.
            is_ready: this incarnation says that its tier is open.
            may_start: the engine has taken over the worker before.
        """
        if self.phase is Phase.IDLE:
            return Act.START if self._may_start(now_s, may_start) else None
        if self.phase is Phase.RUNNING:
            if is_ready and self._up_s is None:
                self._up_s = now_s
                self.state = TierState.UP
            return self._end_if_due(now_s, beat_s)
        if self.phase is Phase.ENDING and now_s >= self._due_s:
            self._kill_reason = f"did not end within {self._grace_s:g} s of SIGTERM"
            return self._kill_now(now_s)
        if self.phase is Phase.KILLED and now_s >= self._due_s and self._due_s:
            self._due_s = 0.0
            self.state = TierState.STUCK
            self.reason = (
                f"{self._kill_reason}; not gone {STUCK_AFTER_S:.0f} s after SIGKILL: "
                f"its storage hangs in the kernel, no replacement before it is gone"
            )
        return None

    def due_s(self, *, may_start: bool) -> float | None:
        """Return when ``turn`` will have something to do, None if only events."""
        if self.phase is Phase.RUNNING:
            return None  # hangs are found by the regular turn
        if self.phase is Phase.IDLE:
            return self._due_s if self._may_start(self._due_s, may_start) else None
        return self._due_s or None

    def started(self, *, now_s: float) -> None:
        """The edge has done START; it has set ``epoch`` to the new incarnation."""
        assert self.phase is Phase.IDLE
        self.phase = Phase.RUNNING
        self.state = TierState.STARTING
        self.restarts += not self._is_first
        self._is_first = False
        self._base_s = now_s
        self._up_s = None
        self._kill_reason = self.words = ""

    def start_failed(self, reason: str, *, now_s: float) -> None:
        """The edge could not do START: try again later."""
        assert self.phase is Phase.IDLE
        self.reason, self.words = f"could not be started: {reason}", ""
        self._back_off(now_s)

    def exited(self, returncode: int, *, now_s: float, words: str = "") -> None:
        """The worker is dead and reaped: the only way back to IDLE.

        Args:
            returncode: as ``subprocess`` has it.
            now_s: CLOCK_MONOTONIC.
            words: the worker's own, of why it leaves.
        """
        assert self.phase is not Phase.IDLE
        self.phase = Phase.IDLE
        self.words = words if returncode > 0 and not self._kill_reason else ""
        self.reason = self._kill_reason or describe_exit(returncode)
        if not self._wanted:
            self.state = TierState.STOPPED
        elif returncode == EXIT_REFUSED and not self._kill_reason:
            self.state = TierState.REFUSED
            self.reason = "refused its configuration (exit code 2)" + (
                ""
                if words
                else ": its sentence is on stderr; change the configuration and start "
                "again"
            )
        else:
            if self._up_s is not None and now_s - self._up_s >= HEALTHY_AFTER_S:
                self._backoff_s = self._limits.restart_backoff_s
            self._back_off(now_s)

    def _may_start(self, now_s: float, may_start: bool) -> bool:
        refused = self.state is TierState.REFUSED
        return self._wanted and not refused and may_start and now_s >= self._due_s

    def _end_if_due(self, now_s: float, beat_s: float) -> Act | None:
        """RUNNING: say whether the worker has to go, and how."""
        if self._kill_reason:
            return self._kill_now(now_s)
        if not self._wanted:
            self.phase = Phase.ENDING
            self.state = TierState.DOWN
            self._kill_reason = "stopped"
            self._due_s = now_s + self._grace_s
            return Act.TERMINATE
        if self._up_s is None:
            # Opening may populate a region of 100 GiB: a limit of its own, and from
            # the start, since beats say nothing of a tier that does not open.
            opening_s = now_s - self._base_s
            if opening_s <= self._limits.start_timeout_s:
                return None
            self._kill_reason = f"did not open its tier within {opening_s:.1f} s"
        elif (
            silent_s := now_s - max(beat_s, self._base_s)
        ) > self._limits.hung_after_s:
            self._kill_reason = f"hung: no heartbeat for {silent_s:.1f} s"
        else:
            return None
        return self._kill_now(now_s)

    def _kill_now(self, now_s: float) -> Act:
        self.phase = Phase.KILLED
        self.state = TierState.DOWN
        self.reason = self._kill_reason
        self._due_s = now_s + STUCK_AFTER_S
        return Act.KILL

    def _back_off(self, now_s: float) -> None:
        self.state = TierState.DOWN
        self._due_s = now_s + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, self._limits.restart_backoff_max_s)
