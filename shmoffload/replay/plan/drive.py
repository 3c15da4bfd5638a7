"""Drives the product's manager through a workload, without bytes.

Covers: one policy at one capacity: look up, load, offer, finish, step after step.
Does not cover: several of them (``grid``), the optimum (``optimum``).
Who calls it: ``grid``; pure but for the work itself; one thread.

The model: requests come one at a time. Each looks up its leading blocks and loads
them, then offers all its full blocks, whose stores are complete at once, and ends;
so does the step. What comes from a tier takes the manager's own way: a promotion
that lands in the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shmoffload.core.manager import TieringOffloadingManager
from shmoffload.core.types import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    TierTraits,
)
from shmoffload.replay.plan.virtual_tier import VirtualTier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmoffload.core.policies import CachePolicy
    from shmoffload.core.types import OffloadKey
    from shmoffload.replay.plan.traffic import Traffic
    from shmoffload.replay.plan.virtual_tier import TierPlan

STEP_S: Final = 0.005
MAX_ROUNDS: Final = 1000
"""Steps in which one scan has to become definite; two are the rule."""
_NO_BYTES: Final = 1
_STEP: Final = ScheduleEndContext()


@dataclass(frozen=True, slots=True)
class Driven:
    """What came of one policy at one capacity.

    Attributes:
        prefix_hits: leading blocks that were loaded.
        block_hits: blocks that were in the primary or in a tier when their request
            arrived.
        stores: blocks stored by the GPU.
        stores_refused: offers that found no room.
        hits_by_source: the prefix hits by where they were: ``primary``, or the
            tier that brought them.
        tiers: the virtual tiers with their counts.
    """

    prefix_hits: int
    block_hits: int
    stores: int
    stores_refused: int
    hits_by_source: dict[str, int]
    tiers: Sequence[VirtualTier]


def drive(
    traffic: Traffic,
    *,
    policy: CachePolicy,
    num_slots: int,
    tiers: Sequence[TierPlan] = (),
) -> Driven:
    """Run every request of a workload.

    Args:
        traffic: requests in order of arrival.
        policy: new; it is used up.
        num_slots: of the primary.
        tiers: behind it, in the order in which they are asked.
    """
    return _Drive(traffic, policy, num_slots, tiers).run()


class _Drive:
    """One run: the manager, its virtual tiers and the virtual clock."""

    def __init__(
        self,
        traffic: Traffic,
        policy: CachePolicy,
        num_slots: int,
        tiers: Sequence[TierPlan],
    ) -> None:
        self._traffic = traffic
        self._tiers = [VirtualTier(tier) for tier in tiers]
        self._num_slots = num_slots
        self._manager = TieringOffloadingManager(
            num_slots,
            self._tiers,
            block_bytes=_NO_BYTES,
            policy=policy,
            traits=[TierTraits(withheld=tier.withheld) for tier in tiers],
        )
        self._now_s = 0.0
        self._prefix_hits = 0
        self._block_hits = 0

    def run(self) -> Driven:
        """Run all requests; see ``drive``."""
        positions = self._traffic.positions
        for number, keys in enumerate(self._traffic.keys):
            where = dict(zip(keys, positions, strict=False))
            self._serve(keys, ReqContext(f"r{number}", None, where))
        counters = self._manager.counters
        names = [tier.name for tier in self._tiers]
        return Driven(
            prefix_hits=self._prefix_hits,
            block_hits=self._block_hits,
            stores=counters.stores_prepared,
            stores_refused=counters.stores_refused,
            hits_by_source={
                "primary": counters.loads_primary,
                **dict(zip(names, counters.loads_tier, strict=True)),
            },
            tiers=self._tiers,
        )

    def _serve(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> None:
        manager = self._manager
        self._block_hits += self._count_held(keys)
        manager.on_new_request(ctx)
        hits = keys[: self._count_hits(keys, ctx)]
        if hits:
            manager.prepare_load(hits, ctx)
            manager.complete_load(hits, ctx)
            self._prefix_hits += len(hits)
        # A live engine offers a prompt in parts; of one larger than the primary
        # only the head can stay.
        granted = manager.prepare_store(keys[: self._num_slots], ctx)
        if granted is not None and granted.keys_to_store:
            manager.complete_store(granted.keys_to_store, ctx)
        manager.on_request_finished(ctx)
        self._end_step()

    def _count_held(self, keys: Sequence[OffloadKey]) -> int:
        blocks = self._manager.table.blocks
        absent = [key for key in keys if key not in blocks]
        for tier in self._tiers:
            absent = [key for key in absent if key not in tier]
        return len(keys) - len(absent)

    def _count_hits(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> int:
        """Scan the leading run as the planner does, until it is definite."""
        lookup = self._manager.lookup
        for _ in range(MAX_ROUNDS):
            num, is_definite = 0, True
            for key in keys:
                result = lookup(key, ctx)
                if result is LookupResult.MISS:
                    break
                num += 1
                is_definite = is_definite and result is LookupResult.HIT
            if is_definite:
                return num
            self._end_step()
        raise AssertionError(f"{ctx.req_id}: its promotions never end")

    def _end_step(self) -> None:
        self._manager.on_schedule_end(_STEP)
        if self._tiers:
            self._now_s += STEP_S
            self._manager.advance(self._now_s)
