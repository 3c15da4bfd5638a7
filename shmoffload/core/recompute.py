"""Load or recompute: is a tier quicker than the GPU?

Covers: the choice, once per scan and tier; what is loaded all the same.
Does not cover: speed (``tier_speed``), how promotions move (``promotions``).
Who calls it: ``promotions`` only, scheduler thread.

A load is worth while if computing takes longer. One key cannot tell: latency alone
would make the first of 200 keys a MISS, and MISS ends the scan. So the first key
that a tier could serve speaks for all that it may still bring to this request, and
only if all of them together are slower than computing them is the answer MISS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shmoffload.core.tier_speed import UNKNOWN_SIZE
from shmoffload.core.types import LookupResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmoffload.core.counters import Counters
    from shmoffload.core.jobs import JobDesk
    from shmoffload.core.requests import Request
    from shmoffload.core.slots import SlotTable
    from shmoffload.core.types import OffloadKey

_HIT = LookupResult.HIT
MAX_LANDING_S: Final = 1.0
"""A load that nobody waits for is cheap if the tier does it in this time."""
MAX_LANDING_SHARE: Final = 0.5
"""And if it takes no more of the free slots: the others are for those who wait."""


class Recompute:
    """Says which loads are not worth while.

    Attributes:
        is_on: it is known how fast the GPU is; without, every load is worth while.

    Args:
        num_queued: promotions that have not left yet, by tier.
        land: queues a promotion that nobody waits for.
    """

    def __init__(
        self,
        table: SlotTable,
        desk: JobDesk,
        counters: Counters,
        *,
        num_queued: list[int],
        land: Callable[[OffloadKey, Request, int], None],
    ) -> None:
        self._prefill_s_per_block = desk.rule.prefill_s_per_block
        self.is_on = self._prefill_s_per_block > 0
        self._table = table
        self._desk = desk
        self._counters = counters
        self._num_queued = num_queued
        self._land = land
        # Of this step:
        self._verdicts: dict[tuple[Request, int], bool] = {}
        self._declined: list[tuple[Request, int, list[OffloadKey]]] = []

    def declines(self, key: OffloadKey, request: Request, tier_idx: int) -> bool:
        """Say whether computing is quicker than what this tier would bring.

        The answer stands until the step ends; a request scans once in a step.
        """
        verdict = self._verdicts.get((request, tier_idx))
        if verdict is None:
            verdict = self._decide(key, request, tier_idx)
            self._verdicts[request, tier_idx] = verdict
        return verdict

    def end_step(self) -> None:
        """Load what is cheap of what was declined, then forget the verdicts.

        Only now, when it is known what the others want of the tier, and whether
        another tier serves the request; the next step may find the tier idle.
        """
        for request, tier_idx, rest in self._declined:
            if not request.is_finished and not request.is_deferred:
                self._land_some(rest, request, tier_idx)
        self._declined.clear()
        self._verdicts.clear()

    def clear(self) -> None:
        """Load nothing of what was declined in this step; the primary is emptied."""
        self._declined.clear()

    def _decide(self, key: OffloadKey, request: Request, tier_idx: int) -> bool:
        desk = self._desk
        loads = desk.speed(tier_idx).loads
        if not loads.is_known:
            return False
        ahead = loads.open_blocks + self._num_queued[tier_idx]
        ahead -= request.num_promoting  # those it waits for in any case
        rest = self._rest(key, request, tier_idx)
        s_per_block = loads.quickest_s_per(
            len(rest) or UNKNOWN_SIZE, ahead=max(0, ahead), now_s=desk.now_s
        )
        if s_per_block <= self._prefill_s_per_block:
            return False
        rest = rest or [key]
        if tier_idx not in request.declined:  # it may ask again in every step
            request.declined.add(tier_idx)
            self._counters.promotions_declined[tier_idx] += len(rest)
        self._declined.append((request, tier_idx, rest))
        return True

    def _rest(
        self, key: OffloadKey, request: Request, tier_idx: int
    ) -> list[OffloadKey]:
        """Return what the tier could bring, in order; empty if that is not known.

        It is a bound from above: a hole may end the scan before.
        """
        positions = request.ctx.key_positions
        if key not in positions:
            return []
        blocks, ask = self._table.blocks, self._desk.tiers[tier_idx].lookup
        try:
            rest = [
                other
                for other in positions
                if other not in blocks and ask(other, request.ctx) is _HIT
            ]
        except Exception:  # noqa: BLE001  (a tier may raise anything)
            self._counters.tier_errors += 1
            return []
        return sorted(rest, key=positions.__getitem__)

    def _land_some(
        self, rest: list[OffloadKey], request: Request, tier_idx: int
    ) -> None:
        """Load for the next request what costs nobody anything: the first blocks."""
        loads, now_s = self._desk.speed(tier_idx).loads, self._desk.now_s
        if loads.open_blocks or self._num_queued[tier_idx]:
            return
        blocks = self._table.blocks
        absent = [key for key in rest if key not in blocks]
        num = min(len(absent), int(self._table.num_free * MAX_LANDING_SHARE))
        if num:
            seconds = num * loads.quickest_s_per(num, ahead=0, now_s=now_s)
            if seconds > MAX_LANDING_S:
                num = max(1, int(num * MAX_LANDING_S / seconds))
        for key in absent[:num]:
            self._land(key, request, tier_idx)
