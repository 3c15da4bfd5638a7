"""How fast a tier is, and how long to wait for it.

Covers: what answered jobs say of a tier's speed, deadlines from it, how long a load
would take.
Does not cover: jobs (``jobs``), what is done about a slow tier (``recompute``).
Who calls it: ``jobs`` and ``recompute`` only, scheduler thread. It has no clock.

A job's time is seen through the steps of a scheduler that looks now and then: the
answer came after ``at_least_s`` and before ``at_most_s``. A deadline is made of the
longest that it may have been, for nobody is killed by mistake; the choice between
load and recompute of the shortest, for no hit is given away by mistake.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

PATIENCE: Final = 16
"""A job may take so many times longer than expected: slow is not hung."""
MIN_SAMPLES: Final = 4
"""Answers before a tier's speed counts as known."""
HALVED_EVERY_S: Final = 10.0
"""What was measured counts half after so long without a load: a tier that is asked
no more would otherwise be slow for ever. The next load measures it again."""
MAX_UNSEEN_S: Final = 1.0
"""When nobody has looked for longer, ``at_most_s`` says nothing of the tier."""
_KEPT: Final = 0.95
"""Weight of an answer after the next one: some 20 count."""
_WORST_KEPT: Final = 0.99
"""Likewise of the worst: with PATIENCE it covers some 270 answers."""
_MIN_SPREAD: Final = 0.25
"""Jobs have to differ so much in size to tell time per block from latency."""
UNKNOWN_SIZE: Final = 1 << 30
"""Blocks of a load whose end is not known: only time per block counts."""


@dataclass(frozen=True, slots=True)
class SpeedRule:
    """What follows from a measured speed.

    Attributes:
        deadline_min_s: no job has less time; from the maximum on, every job has
            the maximum.
        piece_blocks: what a worker stores without looking for loads.
        prefill_s_per_block: seconds in which the GPU computes what one key stands
            for; 0 = not known, every load is worth while.
    """

    deadline_min_s: float = math.inf
    piece_blocks: int = 1
    prefill_s_per_block: float = 0.0


class Line:
    """Time of a job by its size: a straight line through decayed points.

    Attributes:
        largest: blocks of the largest job.
    """

    __slots__ = ("_mean_n", "_mean_t", "_spread", "_tilt", "_weight", "largest")

    def __init__(self) -> None:
        self._weight = self._mean_n = self._mean_t = 0.0
        self._spread = self._tilt = 0.0  # weighted sums of dn * dn and dn * dt
        self.largest = 0

    def note(self, num_blocks: int, seconds: float) -> None:
        """Take in one job."""
        self._weight = _KEPT * self._weight + 1
        dn, dt = num_blocks - self._mean_n, seconds - self._mean_t
        self._mean_n += dn / self._weight
        self._mean_t += dt / self._weight
        self._spread = _KEPT * self._spread + dn * (num_blocks - self._mean_n)
        self._tilt = _KEPT * self._tilt + dn * (seconds - self._mean_t)
        self.largest = max(self.largest, num_blocks)

    @property
    def is_tilt_known(self) -> bool:
        """Jobs of different sizes tell time per block from latency."""
        spread = _MIN_SPREAD * self._mean_n
        return self._spread > self._weight * spread * spread

    def at(self, num_blocks: float) -> float:
        """Return the time of a job; it never falls with the size.

        Neither latency nor time per block is below 0. With jobs of one size only
        all of it is time per block.
        """
        if not self._weight:
            return 0.0
        most = self._mean_t / self._mean_n
        tilt = most
        if self.is_tilt_known:
            tilt = min(max(0.0, self._tilt / self._spread), most)
        return max(0.0, self._mean_t + tilt * (num_blocks - self._mean_n))


class Pace:
    """Speed of a tier in one direction, with its open work.

    Attributes:
        open_blocks: in jobs that are not answered.
    """

    def __init__(self) -> None:
        self.open_blocks = 0
        self.forget()

    def forget(self) -> None:
        """Know nothing of the speed; what is open stays open."""
        self._high, self._low = Line(), Line()
        self._num_samples = 0
        self._worst_s = 0.0
        self._measured_s = 0.0
        self._answered_s = -math.inf

    @property
    def is_known(self) -> bool:
        """Enough was measured to expect something."""
        return self._num_samples >= MIN_SAMPLES

    def answered(
        self, num_blocks: int, since_s: float, *, seen_s: float, now_s: float, ok: bool
    ) -> None:
        """Take in the jobs that one look has found answered.

        Work stands in line: it began when it was sent, or when what was in front
        was answered. A failure says nothing: it may have been quick.

        Args:
            num_blocks: of all of them.
            since_s: when the first of them was sent.
            seen_s: the look before, which did not find them.
            now_s: this look.
            ok: every block has arrived.
        """
        start_s = max(since_s, self._answered_s)
        self._answered_s = now_s
        if ok:
            at_least_s = max(0.0, min(seen_s, now_s) - start_s)
            self.note(num_blocks, at_least_s, now_s - start_s, now_s=now_s)

    def note(
        self, num_blocks: int, at_least_s: float, at_most_s: float, *, now_s: float
    ) -> None:
        """Take in the time of work that has succeeded."""
        if num_blocks < 1 or not 0 <= at_least_s <= at_most_s < math.inf:
            return
        self._low.note(num_blocks, at_least_s)
        self._measured_s = now_s
        if at_most_s - at_least_s > MAX_UNSEEN_S:
            at_most_s = at_least_s
        self._high.note(num_blocks, at_most_s)
        self._worst_s = max(at_most_s, _WORST_KEPT * self._worst_s)
        self._num_samples += 1

    def slowest_s(self, num_blocks: float) -> float:
        """Return how long so many blocks may well take, for a deadline."""
        if num_blocks <= 0:
            return 0.0
        return max(self._worst_s, self._high.at(num_blocks))

    def quickest_s_per(self, num_blocks: int, *, ahead: int, now_s: float) -> float:
        """Return the least seconds per block that a load of so many will take.

        Args:
            num_blocks: of the load.
            ahead: blocks that are loaded before.
            now_s: the time; see ``HALVED_EVERY_S``.
        """
        line, total = self._low, num_blocks + ahead
        if not line.is_tilt_known:
            # A larger job than any so far takes no less than the largest one.
            total = min(total, line.largest)
        age = max(0.0, now_s - self._measured_s) / HALVED_EVERY_S
        return line.at(total) * math.exp2(-age) / num_blocks


class TierSpeed:
    """Speed of a tier both ways, and the deadlines of its jobs.

    Args:
        rule: what follows from it.
        deadline_max_s: no job has more time; also as long as nothing is known.
    """

    def __init__(self, rule: SpeedRule, *, deadline_max_s: float) -> None:
        self.loads = Pace()
        self.stores = Pace()
        self._max_s = deadline_max_s
        self._min_s = rule.deadline_min_s
        self._piece_blocks = rule.piece_blocks

    def pace(self, *, is_promotion: bool) -> Pace:
        """Return one direction."""
        return self.loads if is_promotion else self.stores

    def forget(self) -> None:
        """Know nothing: the worker is another one.

        It starts cold. And were the old one killed for a deadline that was too
        short, the next would be killed again and again; so it gets the maximum.
        """
        self.loads.forget()
        self.stores.forget()

    def patience_s(self, num_blocks: int, *, is_promotion: bool) -> float:
        """Return how long a new job may take, from now on.

        In front of it is what is open of its direction; of a load also one piece of
        a store, of a store every load (they go first).
        """
        if self._min_s >= self._max_s:
            return self._max_s
        pace = self.pace(is_promotion=is_promotion)
        other = self.pace(is_promotion=not is_promotion)
        in_front = other.open_blocks
        if is_promotion:
            in_front = min(in_front, self._piece_blocks)
        if not pace.is_known or (in_front and not other.is_known):
            return self._max_s
        expected_s = pace.slowest_s(pace.open_blocks + num_blocks)
        expected_s += other.slowest_s(in_front)
        return min(max(PATIENCE * expected_s, self._min_s), self._max_s)
