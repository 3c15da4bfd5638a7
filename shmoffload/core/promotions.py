"""Promotions: tier to primary.

Covers: lookups beyond the primary, the queue of promotions, their end.
Does not cover: room for them (``room``), reservations (``scans``), whether they are
worth while (``recompute``).
Who calls it: ``manager`` only, scheduler thread.

A lookup that a tier can serve takes a slot at once and is queued; the load jobs
leave at the end of the step, one per tier and request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmoffload.core.recompute import Recompute
from shmoffload.core.room import Room
from shmoffload.core.slots import PENDING, QUARANTINED
from shmoffload.core.types import LookupResult

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from shmoffload.core.cascades import Cascades
    from shmoffload.core.counters import Counters
    from shmoffload.core.jobs import Job, JobDesk
    from shmoffload.core.policies import CachePolicy
    from shmoffload.core.requests import Request
    from shmoffload.core.retention import Retention
    from shmoffload.core.scans import ScanBook
    from shmoffload.core.slots import Block
    from shmoffload.core.types import JobResult, OffloadKey

_MISS = LookupResult.MISS
_HIT = LookupResult.HIT
_HIT_PENDING = LookupResult.HIT_PENDING
_RETRY = LookupResult.RETRY


class Queued:
    """A promotion that leaves at the end of the step: owner of its block."""

    __slots__ = ("askers", "block", "request", "tier_idx")

    def __init__(self, request: Request, tier_idx: int) -> None:
        self.request = request
        self.tier_idx = tier_idx
        self.askers: dict[Request, None] = {}  # in the order they asked


class Promotions:
    """Queue and room of promotions.

    Attributes:
        queue: promotions that have not left yet, in lookup order.
        num_live_jobs: load jobs whose blocks somebody may still wait for.
        landing: keys on the way that nobody waits for: a lookup of them is a MISS,
            for whoever waited would wait longer than to compute them.
    """

    def __init__(
        self,
        policy: CachePolicy,
        scans: ScanBook,
        desk: JobDesk,
        cascades: Cascades,
        retention: Retention,
        counters: Counters,
    ) -> None:
        self.queue: dict[Block, Queued] = {}
        self.num_live_jobs = 0
        self.landing: set[OffloadKey] = set()
        self._num_queued = [0] * len(desk.tiers)
        self._table = scans.table
        self._policy = policy
        self.scans = scans
        self._desk = desk
        self._cascades = cascades
        self.retention = retention
        self._counters = counters
        self._room = Room(
            scans,
            policy,
            retention,
            evict=self.evict,
            take_queued=self._take_from_younger,
        )
        self._wanted: dict[Request, None] = {}
        self._recompute = Recompute(
            self._table,
            desk,
            counters,
            num_queued=self._num_queued,
            land=self._land,
        )

    def lookup(self, key: OffloadKey, request: Request) -> LookupResult:
        """Ask the tiers for a key that the primary does not have.

        In their order: the first HIT wins, also over an earlier RETRY.
        """
        ctx, must_wait = request.ctx, False
        if key not in request.failed:
            for tier_idx, ask in self._desk.lookups:
                if request.load_from is not None and tier_idx not in request.load_from:
                    continue
                try:
                    answer = ask(key, ctx)
                except Exception:  # noqa: BLE001  (a tier may raise anything)
                    self._counters.tier_errors += 1
                    continue
                if answer is _HIT:
                    recompute = self._recompute
                    if recompute.is_on and recompute.declines(key, request, tier_idx):
                        continue
                    return self._promote(key, request, tier_idx)
                if answer is _RETRY:
                    must_wait = True
        if must_wait:
            desk, since_s = self._desk, request.wait_since_s
            if since_s is None:
                since_s = request.wait_since_s = desk.now_s
            if desk.now_s - since_s <= desk.job_deadline_s:  # as ``_may_wait``
                self._counters.retries += 1
                if not request.is_deferred:
                    self.scans.defer(request)
                return _RETRY
        self._counters.misses += 1
        return _MISS

    def _promote(
        self, key: OffloadKey, request: Request, tier_idx: int
    ) -> LookupResult:
        """Queue a promotion, or say what becomes of it without room.

        Once there was none, the same answer holds for the rest of the scan: a
        prefix with a hole is of no use.
        """
        room = request.no_room
        if room is None:
            self._policy.observe(key, request.ctx)
            room = self._room.make(request)
            if room is None:
                block = self._enqueue(key, request, tier_idx)
                block.told_step = self.scans.step
                self._wait_for(key, request)
                self._counters.hits_pending += 1
                return _HIT_PENDING
            if room is _RETRY and not self._may_wait(request):
                room = _MISS
            request.no_room = room
            if room is _RETRY:
                self.scans.defer(request)
                self._wanted[request] = None
        if room is _RETRY:
            self._counters.retries += 1
            request.wanted.append((key, tier_idx))
            return room
        self._counters.allocation_failures += 1
        self._counters.misses += 1
        return _MISS

    def end_step(self) -> None:
        """Send what was queued, after a second try for what found no room.

        The step is over, so its HITs are no longer reserved: here an older scan
        can take what a younger one had been told first in this step. Without
        that, two scans could wait for each other.
        """
        for request in sorted(self._wanted, key=lambda r: r.seq):
            wanted, request.wanted = request.wanted, []
            if request.is_finished:
                continue
            for key, tier_idx in wanted[: self._table.num_slots]:
                if key in self._table.blocks:
                    continue
                if self._room.make(request) is not None:
                    break
                self._enqueue(key, request, tier_idx)
                self._wait_for(key, request)
        self._wanted.clear()
        self._room.end_step()
        self._recompute.end_step()
        jobs: dict[tuple[int, Request], list[Block]] = {}
        for block, queued in self.queue.items():
            jobs.setdefault((queued.tier_idx, queued.request), []).append(block)
        self._empty_queue()
        for (tier_idx, request), blocks in jobs.items():
            self._counters.promotion_jobs[tier_idx] += 1
            job = self._desk.submit(tier_idx, request, blocks, is_promotion=True)
            if job is None:
                self._counters.promotion_jobs_failed[tier_idx] += 1
                self._fail(request, blocks)
                continue
            self.num_live_jobs += 1
            for block in blocks:
                block.owner = job

    def apply(self, job: Job, result: JobResult) -> None:
        """Take the answer to a load job: its keys are READY or absent."""
        arrived: Collection[OffloadKey]
        if result.success:
            arrived = {block.key for block in job.blocks}
        else:
            self._counters.promotion_jobs_failed[job.tier_idx] += 1
            arrived = set(result.successful_keys or ())
            if not arrived <= {block.key for block in job.blocks}:
                # A tier that is wrong about names may be wrong about bytes.
                self._counters.foreign_keys += 1
                arrived = ()
        if not job.is_live:
            self._counters.late_replies += 1
            for block in job.blocks:
                self._table.abandon(block)
            return
        self.num_live_jobs -= 1
        landed = [block for block in job.blocks if block.key in arrived]
        self._are_here(landed)
        for block in landed:
            self.scans.landed(block)
        self._counters.promotions_landed += len(landed)
        released = self._cascades.publish(landed)
        self._fail(job.request, [b for b in job.blocks if b.key not in arrived])
        self._cascades.fire(released)

    def expire(self, job: Job) -> None:
        """Give up a load job that missed its deadline; its slots stay under it."""
        if not job.is_live:
            return
        job.is_live = False
        self.num_live_jobs -= 1
        self._counters.promotions_failed += len(job.blocks)
        self._are_here(job.blocks)
        for block in job.blocks:
            job.request.failed.add(block.key)
            self.scans.stopped(block)
            self._policy.remove(block.key, evicted=False)
            self._table.detach(block)
        for block in job.blocks:
            self._cascades.drop(block)

    def finish(self, request: Request) -> None:
        """Hand a finished request's queued promotions on, or drop them."""
        for block, queued in list(self.queue.items()):
            queued.askers.pop(request, None)
            if queued.request is not request:
                continue
            heir = next(
                (a for a in queued.askers if a.may_load_from(queued.tier_idx)), None
            )
            if heir is None:
                self._drop(block)
            else:
                del queued.askers[heir]
                queued.request = heir
                self.scans.started(block, heir)

    def clear(self) -> None:
        """Drop the queue unsent; the primary is emptied."""
        self._counters.promotions_dropped += len(self.queue)
        for block in self.queue:
            self.scans.stopped(block)
            self._policy.remove(block.key, evicted=False)
            self._table.abandon(block)
        self._empty_queue()
        for request in self._wanted:
            request.wanted = []
        self._wanted.clear()
        self.landing.clear()
        self._recompute.clear()
        self.num_live_jobs = 0

    def evict(self, block: Block) -> None:
        """Take the slot of an idle block."""
        if block.promoter is not None or block.is_loading:
            self.scans.used(block)
        if self.retention.marks:
            self.retention.forget(block)
        self._policy.remove(block.key, evicted=True)
        self._table.evict(block)
        self._counters.evictions += 1

    def _enqueue(self, key: OffloadKey, request: Request, tier_idx: int) -> Block:
        queued = Queued(request, tier_idx)
        block = self._table.reserve(key, queued)
        block.origin = tier_idx
        self.queue[block] = queued
        self._num_queued[tier_idx] += 1
        self.scans.started(block, request)
        self._policy.insert(key, request.ctx)
        self._counters.promotions_started += 1
        self._counters.hits_tier[tier_idx] += 1
        return block

    def _wait_for(self, key: OffloadKey, request: Request) -> None:
        request.scan.append(key)
        self.scans.defer(request)

    def _land(self, key: OffloadKey, request: Request, tier_idx: int) -> None:
        """Queue a promotion that nobody waits for; there is a free slot."""
        self._policy.observe(key, request.ctx)
        self._enqueue(key, request, tier_idx)
        self.landing.add(key)

    def _are_here(self, blocks: Iterable[Block]) -> None:
        """Note that blocks have come, or will not: lookups are as ever."""
        if self.landing:
            self.landing.difference_update([block.key for block in blocks])

    def _empty_queue(self) -> None:
        self.queue.clear()
        self._num_queued[:] = [0] * len(self._num_queued)

    def _drop(self, block: Block) -> None:
        self._num_queued[self.queue.pop(block).tier_idx] -= 1
        self._are_here((block,))
        self._counters.promotions_dropped += 1
        self.scans.stopped(block)
        self._policy.remove(block.key, evicted=False)
        self._table.abandon(block)
        self._cascades.drop(block)

    def _take_from_younger(self, request: Request) -> bool:
        """Drop a queued promotion that only younger requests asked for."""
        seq = request.seq
        for block, queued in reversed(self.queue.items()):
            if (
                queued.request.seq > seq
                and all(asker.seq > seq for asker in queued.askers)
                and not block.waiters
            ):
                self._drop(block)
                return True
        return False

    def _fail(self, request: Request, blocks: list[Block]) -> None:
        self._counters.promotions_failed += len(blocks)
        self._are_here(blocks)
        for block in blocks:
            request.failed.add(block.key)
            self.scans.stopped(block)
            self._policy.remove(block.key, evicted=False)
            self._table.abandon(block)
        for block in blocks:
            self._cascades.drop(block)

    def _may_wait(self, request: Request) -> bool:
        """Say whether RETRY is still allowed (INV-35)."""
        now_s = self._desk.now_s
        if request.wait_since_s is None:
            request.wait_since_s = now_s
        return now_s - request.wait_since_s <= self._desk.job_deadline_s

    def check_integrity(self) -> None:
        """Assert that every PENDING promotion has one owner (INV-5)."""
        self._desk.check_integrity()
        for block, queued in self.queue.items():
            assert block.owner is queued
            assert block.state == PENDING
            assert block.promoter is queued.request
            assert not queued.request.is_finished
        jobs = [job for job in self._desk.open.values() if job.is_promotion]
        under_way = {b.key for b in self.queue}
        under_way.update(b.key for job in jobs if job.is_live for b in job.blocks)
        assert self.landing <= under_way, "INV-19: a MISS for what may be waited for"
        assert sum(self._num_queued) == len(self.queue)
        assert sum(job.is_live for job in jobs) == self.num_live_jobs
        under_jobs = 0
        for job in jobs:
            for block in job.blocks:
                assert block.owner is job
                assert block.state == (PENDING if job.is_live else QUARANTINED)
                under_jobs += job.is_live
        assert under_jobs + len(self.queue) == self.scans.num_promoting
