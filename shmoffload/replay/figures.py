"""What a replay measures while it runs.

Covers: per-step and per-request times, hits, the difference of a session page's
words between start and end.
Does not cover: how it is shown (``report``).
Who calls it: ``live`` adds, ``report`` reads; one thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from shmoffload.wire.session import TierWord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shmoffload.core.manager import TieringOffloadingManager
    from shmoffload.wire.session import SessionPage

T = TypeVar("T")
PRIMARY = "primary"


class Stopwatch:
    """Adds up the time inside the calls that are made through it."""

    def __init__(self) -> None:
        self._spent_s = 0.0

    def __call__(self, call: Callable[..., T], *args: object) -> T:
        """Make a call and count its time."""
        start_s = time.perf_counter()
        try:
            return call(*args)
        finally:
            self._spent_s += time.perf_counter() - start_s

    def take_s(self) -> float:
        """Return the seconds since the last take."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s


@dataclass(slots=True)
class Figures:
    """Raw numbers of one replay.

    Attributes:
        num_requests: ended.
        max_running: most requests that ran in one step.
        prefix_hits: leading blocks that were loaded and verified.
        hits_by_tier: the same, by where the block came from.
        step_s: time inside planner and engine, per step.
        resolved_s: from arrival to a definite prefix, per request.
    """

    hits_by_tier: dict[str, int]
    num_requests: int = 0
    max_running: int = 0
    prefix_hits: int = 0
    step_s: list[float] = field(default_factory=list)
    resolved_s: list[float] = field(default_factory=list)

    def add_hits(self, num_right: int, by_tier: Sequence[int]) -> None:
        """Count a verified load.

        Args:
            num_right: blocks whose bytes were right.
            by_tier: blocks of the load that a promotion had brought for it, per
                tier; the rest had been in the primary.
        """
        self.prefix_hits += num_right
        left = num_right
        names = list(self.hits_by_tier)
        for name, count in zip(names[1:], by_tier, strict=True):
            counted = min(left, count)
            self.hits_by_tier[name] += counted
            left -= counted
        self.hits_by_tier[names[0]] += left


class LookupCount:
    """Lookups that the manager has answered since this was made."""

    def __init__(self, manager: TieringOffloadingManager) -> None:
        self._counters = manager.counters
        self._start = self._total()

    def _total(self) -> int:
        c = self._counters
        return c.hits_primary + c.hits_pending + c.retries + c.misses

    def take(self) -> int:
        """Return the number."""
        return self._total() - self._start


class TierWords:
    """What the words of all tiers have grown by since this was made."""

    def __init__(self, page: SessionPage) -> None:
        self._page = page
        self._start = {
            (i, word): page.get_tier(i, word)
            for i in range(page.num_tiers)
            for word in TierWord
        }

    def grown(self, tier_idx: int, word: TierWord) -> int:
        """Return the growth of one tier's word."""
        return self._page.get_tier(tier_idx, word) - self._start[tier_idx, word]

    def total(self, word: TierWord) -> int:
        """Return the growth of a word over all tiers."""
        return sum(self.grown(i, word) for i in range(self._page.num_tiers))
