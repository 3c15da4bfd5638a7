"""The manager: which block is where, and what moves next.

Covers: the public calls of a step, reset.
Does not cover: requests' lives (``request_book``), promotions and their room
(``promotions``, ``scans``), GPU copies (``stores``, ``loads``), store jobs
(``cascades``), tiers (``jobs``, ``mailbox``). It is pure: time and replies come in
by ``advance``, jobs go out through the tiers.
Who calls it: the engine, in the scheduler process, one thread. Nothing blocks.

A block's life::

    prepare_store -> PENDING -> complete_store -> READY -> store job per tier
    lookup (tier) -> PENDING -> step end: load job -> advance -> READY -> prepare_load
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from shmoffload.core.cascades import Cascades
from shmoffload.core.counters import Counters
from shmoffload.core.events import EventLog
from shmoffload.core.interfaces import NullSink, OffloadingManager
from shmoffload.core.jobs import JobDesk, check_pins
from shmoffload.core.loads import GpuLoads
from shmoffload.core.offers import OfferRule
from shmoffload.core.policies.lru import LruPolicy
from shmoffload.core.promotions import Promotions, Queued
from shmoffload.core.request_book import RequestBook
from shmoffload.core.retention import Retention
from shmoffload.core.scans import ScanBook
from shmoffload.core.slots import FROM_STORE, READY, SlotTable
from shmoffload.core.stores import GpuStores
from shmoffload.core.types import (
    LookupResult,
    NotReadableError,
    OffloadPolicy,
    RequestOffloadingContext,
)
from shmoffload.core.uses import Uses

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from shmoffload.core.events import OffloadingEvent
    from shmoffload.core.interfaces import SecondaryTierManager, SlotSink
    from shmoffload.core.policies import CachePolicy
    from shmoffload.core.request_policy import RequestAnswer
    from shmoffload.core.requests import Request
    from shmoffload.core.slots import Block
    from shmoffload.core.tier_speed import SpeedRule
    from shmoffload.core.types import (
        OffloadKey,
        PrepareStoreOutput,
        ReqContext,
        ScheduleEndContext,
        SlotArray,
        TierTraits,
    )

_EVERY_OFFER: Final = OfferRule()
_HIT = LookupResult.HIT
_HIT_PENDING = LookupResult.HIT_PENDING
_MISS = LookupResult.MISS


class TieringOffloadingManager(OffloadingManager):
    """A primary of ``num_slots`` slots in front of ordered tiers.

    Args:
        num_slots: slots of the primary.
        tiers: asked in this order; a tier is named by its index here.
        block_bytes: payload of a block.
        policy: eviction order; LRU by request if None.
        sink: where slot states are published.
        promotion_share: part of the slots for promotions while others wait.
        scan_hold_s: how long a scan that does not come back keeps its blocks.
        job_deadline_s: at most; after it a job is given up; also bounds RETRY.
        speed: what follows from the measured speed of tiers; nothing if None.
        traits: what is configured of each tier; nothing if None.
        max_cascade_share: part of the slots that one tier's cascades may pin.
        accept_prefix: grant the longest prefix of an offer that finds room.
        offer_rule: how often a block is offered before it is stored.
        events: keep what ``take_events`` returns.

    Attributes:
        counters: what happened; see ``counters``.
        table: the slots; read only.
    """

    def __init__(
        self,
        num_slots: int,
        tiers: Sequence[SecondaryTierManager],
        *,
        block_bytes: int,
        policy: CachePolicy | None = None,
        sink: SlotSink | None = None,
        promotion_share: float = 0.5,
        scan_hold_s: float = 5.0,
        job_deadline_s: float = 30.0,
        speed: SpeedRule | None = None,
        traits: Sequence[TierTraits] | None = None,
        max_cascade_share: float = 1.0,
        accept_prefix: bool = False,
        offer_rule: OfferRule = _EVERY_OFFER,
        events: bool = False,
    ) -> None:
        self.counters = Counters(len(tiers))
        sink = sink or NullSink()
        self._events = EventLog(sink) if events else None
        self.table = SlotTable(num_slots, block_bytes, self._events or sink)
        self._blocks = self.table.blocks
        self._policy = policy or LruPolicy()
        self._scans = ScanBook(
            self.table, promotion_share=promotion_share, scan_hold_s=scan_hold_s
        )
        self._desk = JobDesk(
            tiers, self.counters, traits, job_deadline_s=job_deadline_s, speed=speed
        )
        self._book = RequestBook(self._desk, self.counters)
        self._requests = self._book.live
        self._closing = self._book.closing
        self._request_level_tiers = self._book.request_level_tiers
        self._retention = Retention(self.table, self._desk)
        self._cascades = Cascades(
            self.table,
            self._desk,
            self._retention,
            self.counters,
            max_share=max_cascade_share,
            on_work_done=self._book.maybe_close,
        )
        self._uses = Uses(self._retention, self._cascades)
        self._promotions = Promotions(
            self._policy,
            self._scans,
            self._desk,
            self._cascades,
            self._retention,
            self.counters,
        )
        self._landing = self._promotions.landing
        self._stores = GpuStores(
            self.table,
            self._policy,
            self._promotions,
            self._cascades,
            self.counters,
            accepts_prefix=accept_prefix,
            offer_rule=offer_rule,
        )
        self._loads = GpuLoads(self.table, self._policy, self._scans, self.counters)

    # Time ---------------------------------------------------------------------

    def advance(self, now_s: float) -> None:
        """Set the clock, take what tiers have answered, give up what is overdue."""
        desk = self._desk
        desk.tick(now_s)
        for tier_idx in range(len(desk.tiers)):
            for job, result in desk.collect(tier_idx):
                if job.is_promotion:
                    self._promotions.apply(job, result)
                else:
                    self._cascades.apply(job, result)
        for job in desk.take_expired():
            # A cascade's blocks stay readable, pinned until the answer or the death.
            if job.is_promotion:
                self._promotions.expire(job)

    def take_overdue_tiers(self) -> list[int]:
        """Return tiers with newly missed deadlines; their workers have to die.

        They answer MISS until every overdue job is answered, which the death does.
        """
        return self._desk.take_overdue_tiers()

    # Requests -----------------------------------------------------------------

    def on_new_request(self, ctx: ReqContext) -> RequestOffloadingContext:
        """Announce a request; REQUEST_LEVEL if some tier gets all its blocks."""
        if self._book.announce(ctx).asking:
            return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)
        return RequestOffloadingContext(OffloadPolicy.BLOCK_LEVEL)

    def request_answer(self, req_id: str) -> RequestAnswer | None:
        """Return what became of a request's own words; None: unknown or over."""
        return self._book.answer(req_id)

    def on_request_finished(self, ctx: ReqContext) -> None:
        """Take the last word; tiers hear it when nothing can follow for them."""
        request = self._requests.pop(ctx.req_id, None)
        if request is None:
            self.counters.late_calls += 1
            return
        # Its own queued promotions may have parked keys: they are dropped first.
        self._promotions.finish(request)
        self._scans.forget(request)
        self._policy.finish(request.ctx)
        self._retention.finish(request)
        self._book.finish(request)

    # Lookups and loads --------------------------------------------------------

    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        """Say where a block is; the hot path (limits.md D: 0.1 to 0.3 us floor)."""
        try:
            request = self._requests[ctx.req_id]
        except KeyError:
            self.counters.late_calls += 1
            return _MISS
        scans = self._scans
        step = scans.step
        if request.scan_step != step:
            scans.begin(request, self._desk.now_s)
        block = self._blocks.get(key)
        if block is None:
            return self._promotions.lookup(key, request)
        request.scan.append(key)
        block.told_step = step
        owner = block.owner
        if owner is None:  # READY: who writes a block owns it (INV-5)
            self.counters.hits_primary += 1
            return _HIT
        if self._landing and key in self._landing:
            request.scan.pop()
            self.counters.misses += 1
            return _MISS
        self.counters.hits_pending += 1
        if not request.is_deferred:
            scans.defer(request)
        if owner.__class__ is Queued and owner.request is not request:
            owner.askers[request] = None
        return _HIT_PENDING

    def load_source(self, key: OffloadKey) -> int:
        """Return the tier whose bytes a load would take, or -1 for the primary.

        A block counts for its tier until the first ``prepare_load`` of it.
        """
        block = self._blocks.get(key)
        return FROM_STORE if block is None else block.origin

    def prepare_load(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> SlotArray:
        """Pin readable blocks for the GPU; decides the request's scan.

        Raises:
            NotReadableError: unknown request or unreadable key; nothing was pinned.
        """
        request = self._requests.get(ctx.req_id)
        if request is None:
            self.counters.late_calls += 1
            raise NotReadableError(ctx.req_id)
        blocks = self._loads.prepare(keys, request)
        self._uses.note(request, blocks)
        return np.array([block.slot for block in blocks], dtype=np.int32)

    def complete_load(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        """Unpin what a load has read; the request may have finished since."""
        self._loads.complete(keys, ctx)

    # Stores -------------------------------------------------------------------

    def prepare_store(
        self, keys: Collection[OffloadKey], ctx: ReqContext
    ) -> PrepareStoreOutput | None:
        """Grant slots for the absent keys of an offer: all or none.

        With ``accept_prefix``: the longest prefix of it that finds room.
        """
        request = self._requests.get(ctx.req_id)
        if request is None:
            self.counters.late_offers += 1
            return None
        if request.asking:
            request.offered.update(dict.fromkeys(keys))
        granted = self._stores.prepare(keys, request)
        if granted is None:
            return None
        if granted.present:
            self._uses.note(request, granted.present)
        if request.asking:
            self._cascade_existing_blocks_to_request_level_tiers(
                request, granted.present
            )
        return granted.output

    def complete_store(
        self, keys: Collection[OffloadKey], ctx: ReqContext, success: bool = True
    ) -> None:
        """End a GPU store: its blocks go to every tier, or vanish."""
        for request in self._stores.complete(keys, ctx, success=success):
            self._book.maybe_close(request)

    def touch(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        """Mark blocks as used by a request."""
        if ctx.req_id not in self._requests:
            self.counters.late_calls += 1
            return
        for key in keys:
            block = self._blocks.get(key)
            if block is not None:
                self._policy.access(key, ctx, is_ready=block.state == READY)

    # Steps --------------------------------------------------------------------

    def on_schedule_end(self, ctx: ScheduleEndContext) -> None:
        """End the step: reservations of HITs end, load jobs leave."""
        self._retention.end_step()
        self._scans.end_step(self._desk.now_s)
        self._promotions.end_step()
        self._desk.end_step(ctx)

    def has_pending_work(self) -> bool:
        """Say whether stepping brings something to an end (INV-38).

        Cascades and quarantined slots do not count: their answers are taken at
        the next call anyway, and a server must not spin for them.
        """
        return bool(
            self._promotions.num_live_jobs
            or self._promotions.queue
            or self._cascades.num_parked
            or self._closing
            or self._desk.has_pending_work()
        )

    def reset_cache(self, *, forgets_copies: bool = False) -> None:
        """Make every block absent, at once.

        Slots that somebody still reads or writes are quarantined: jobs' until they
        are answered, GPU copies' until ``complete_*`` comes late or
        ``on_reset_flushed``. Finished requests end, active ones go on.

        Args:
            forgets_copies: the caller will not complete copies of before (vLLM).
        """
        self.counters.resets += 1
        self._promotions.clear()
        for job in self._desk.open.values():
            job.is_live = False
        for block in list(self._blocks.values()):
            self._cascades.take_waiters(block)
            if block.state == READY:
                self._scans.used(block)
            elif block.promoter is not None:
                self._scans.stopped(block)
            self.table.detach(block)
        self._cascades.clear()
        self._policy.clear()
        self._retention.clear()
        self._scans.clear()
        self._book.reset()
        if forgets_copies:
            self._stores.copies.set_aside()
            self._loads.copies.set_aside()
        if self._events is not None:
            self._events.clear()
            self._desk.mirrors_cleared()

    def on_reset_flushed(self) -> None:
        """Free what GPU copies from before the last reset held: none runs now."""
        self._stores.copies.release_quarantined(self.table)
        self._loads.copies.release_quarantined(self.table)

    def shutdown(self) -> None:
        """Shut the tiers down, in order, each of them; again: nothing.

        Raises:
            Exception: the first that a tier has raised, after all were told.
        """
        self._desk.shutdown()

    def take_events(self) -> list[OffloadingEvent]:
        """Return what became readable or went since the last call, each once."""
        if self._events is None:
            return []
        return self._events.take() + self._desk.take_events()

    def _cascade_existing_blocks_to_request_level_tiers(
        self, request: Request, present: Sequence[Block]
    ) -> None:
        self._cascades.offer_present(request, present)

    def check_integrity(self) -> None:
        """Assert the equations of semantics.md 14; for tests, and when idle."""
        assert sorted(self._policy.victims(lambda _: True)) == sorted(self._blocks)
        self.table.check_integrity()
        self._scans.check_integrity()
        self._promotions.check_integrity()
        self._stores.check_integrity()
        self._retention.check_integrity()
        check_pins(self._blocks.values(), self._loads.copies, self._desk.open.values())
        parked = sum(len(block.waiters or ()) for block in self._blocks.values())
        assert parked == self._cascades.num_parked
        assert all(request.open_work > 0 for request in self._closing.values())
        assert not self._closing.keys() & self._requests.keys()
