"""How often a block has been offered, so that what comes once is not stored.

Covers: counting offers of a bounded number of keys.
Does not cover: whether there is room (``stores``), eviction order (``policies``).
Who calls it: ``stores`` only, scheduler thread.

An offer is one call of ``prepare_store``, also one that is refused in the end.
(vLLM ``kv_offload/cpu/manager.py``, 0.30 to 0.33.)
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from shmoffload.core.types import OffloadKey


class OfferRule(NamedTuple):
    """What is stored of an offer; below 2 a threshold means everything.

    Attributes:
        store_threshold: offers of a key before it is stored.
        max_tracker_size: keys whose offers are counted.
    """

    store_threshold: int = 0
    max_tracker_size: int = 64_000

    def make_counts(self) -> OfferCounts | None:
        """Return what counts by this rule; None: there is nothing to count."""
        if self.store_threshold < 2:
            return None
        return OfferCounts(self.store_threshold, self.max_tracker_size)


class OfferCounts:
    """Offers per key, of the keys that were offered last."""

    def __init__(self, threshold: int, max_tracked: int) -> None:
        self._threshold = threshold
        self._max_tracked = max_tracked
        self._counts: OrderedDict[OffloadKey, int] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        """Return the number of keys that are counted."""
        return len(self._counts)

    def count(self, offered: Collection[OffloadKey]) -> None:
        """Count one offer of distinct keys.

        A key that is new displaces the oldest one that is not in this offer; if
        all are in it, what is left over is not counted.
        """
        counts = self._counts
        new = []
        for key in offered:
            if key in counts:
                counts[key] += 1
                counts.move_to_end(key)
            else:
                new.append(key)
        num_room = self._max_tracked - (len(offered) - len(new))
        new = new[:num_room]
        for _ in range(len(counts) + len(new) - self._max_tracked):
            counts.popitem(last=False)
        counts.update(dict.fromkeys(new, 1))

    def often_enough(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those that have been offered often enough, in order."""
        counts, threshold = self._counts, self._threshold
        return [key for key in keys if counts.get(key, 0) >= threshold]
