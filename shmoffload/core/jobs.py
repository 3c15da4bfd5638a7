"""Jobs, and calls of tiers that cannot hurt us.

Covers: job ids, who is under which job, deadlines, the calls of tiers.
Does not cover: what a job's end means for blocks (``promotions``, ``cascades``),
how long a job may take (``tier_speed``).
Who calls it: ``core`` only, scheduler thread.

A tier's call may raise anything: it is counted, and reads as MISS, "not accepted"
or "nothing".
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shmoffload.core.slots import READY
from shmoffload.core.tier_speed import SpeedRule, TierSpeed
from shmoffload.core.types import JobMetadata, OffloadPolicy, TierTraits

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shmoffload.core.counters import Counters
    from shmoffload.core.events import OffloadingEvent
    from shmoffload.core.interfaces import SecondaryTierManager
    from shmoffload.core.request_policy import RequestPolicy
    from shmoffload.core.requests import Request
    from shmoffload.core.slots import Block
    from shmoffload.core.types import (
        JobResult,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
    )


class Job:
    """One open job.

    Attributes:
        is_live: its meaning stands; False after a reset or a missed deadline of a
            promotion. Its blocks are then quarantined.
    """

    __slots__ = (
        "blocks",
        "deadline_s",
        "is_live",
        "is_overdue",
        "is_promotion",
        "job_id",
        "request",
        "submitted_s",
        "tier_idx",
    )

    def __init__(
        self, job_id: int, tier_idx: int, request: Request, blocks: Sequence[Block]
    ) -> None:
        self.job_id = job_id
        self.tier_idx = tier_idx
        self.request = request
        self.blocks = blocks
        self.is_promotion = False
        self.is_live = True
        self.is_overdue = False
        self.submitted_s = 0.0
        self.deadline_s = 0.0


class JobDesk:
    """The job table and the caller of tiers.

    Attributes:
        lookups: (tier index, its ``lookup``) in order, without tiers that have
            missed a deadline and not answered since: those say MISS.
        open: job id -> job.
        now_s: the time, see ``tick``.
        rule: what follows from the speed of tiers.
    """

    def __init__(
        self,
        tiers: Sequence[SecondaryTierManager],
        counters: Counters,
        traits: Sequence[TierTraits] | None,
        *,
        job_deadline_s: float,
        speed: SpeedRule | None,
    ) -> None:
        self.tiers = list(tiers)
        self.traits = traits or [TierTraits()] * len(self.tiers)
        self._is_shut = False
        self.now_s = 0.0
        self.job_deadline_s = job_deadline_s
        self.open: dict[int, Job] = {}
        self.lookups = [(idx, tier.lookup) for idx, tier in enumerate(self.tiers)]
        self._num_overdue = [0] * len(self.tiers)
        self._overdue_tiers: dict[int, None] = {}
        self._due: list[tuple[float, int]] = []  # a heap; answered ones are passed by
        self._seen_s = 0.0  # the look before this one
        self.rule = speed or SpeedRule()
        self._speeds = [
            TierSpeed(self.rule, deadline_max_s=job_deadline_s) for _ in self.tiers
        ]
        self._measured = [0] * len(self.tiers)  # worker epochs
        self._next_id = 0
        self._counters = counters

    def tick(self, now_s: float) -> None:
        """Set the clock; answers are looked for at once."""
        self._seen_s = self.now_s
        self.now_s = max(self.now_s, now_s)

    def speed(self, tier_idx: int) -> TierSpeed:
        """Return what is known of a tier's speed; of a new worker nothing is."""
        speed, epoch = self._speeds[tier_idx], self.tiers[tier_idx].worker_epoch
        if epoch != self._measured[tier_idx]:
            self._measured[tier_idx] = epoch
            speed.forget()
        return speed

    def submit(
        self,
        tier_idx: int,
        request: Request,
        blocks: Sequence[Block],
        *,
        is_promotion: bool,
    ) -> Job | None:
        """Give a tier a job; None: not accepted, nothing is open.

        The job is in the table before the tier is called, so that even an answer
        given inside the call finds it.
        """
        job = Job(self._next_id, tier_idx, request, blocks)
        self._next_id += 1
        job.is_promotion = is_promotion
        job.submitted_s = self.now_s
        speed, num = self.speed(tier_idx), len(blocks)
        patience_s = speed.patience_s(num, is_promotion=is_promotion)
        job.deadline_s = self.now_s + patience_s
        message = JobMetadata(
            job_id=job.job_id,
            keys=[block.key for block in blocks],
            slots=np.array([block.slot for block in blocks], dtype=np.int32),
            is_promotion=is_promotion,
            req_context=request.ctx,
            submitted_s=self.now_s,
            deadline_s=job.deadline_s,
        )
        self.open[job.job_id] = job
        tier = self.tiers[tier_idx]
        try:
            if is_promotion:
                tier.submit_load(message)
            else:
                tier.submit_store(message)
        except Exception:  # noqa: BLE001  (F18: a tier may raise anything)
            self._counters.tier_errors += 1
            del self.open[job.job_id]
            return None
        speed.pace(is_promotion=is_promotion).open_blocks += num
        heapq.heappush(self._due, (job.deadline_s, job.job_id))
        return job

    def collect(self, tier_idx: int) -> list[tuple[Job, JobResult]]:
        """Take a tier's answers to open jobs of its own; count the rest."""
        try:
            results = self.tiers[tier_idx].get_finished_jobs()
        except Exception:  # noqa: BLE001
            self._counters.tier_errors += 1
            return []
        if not results:
            return []
        answered: list[tuple[Job, JobResult]] = []
        for result in results:
            job = self.open.get(result.job_id)
            if job is None or job.tier_idx != tier_idx:
                self._counters.late_replies += 1
                continue
            del self.open[job.job_id]
            if job.is_overdue:
                self._count_overdue(tier_idx, -1)
            answered.append((job, result))
        loads = [pair for pair in answered if pair[0].is_promotion]
        if loads:
            self._measure(tier_idx, loads, is_promotion=True)
        if len(loads) < len(answered):
            stores = [pair for pair in answered if not pair[0].is_promotion]
            self._measure(tier_idx, stores, is_promotion=False)
        return answered

    def _measure(
        self,
        tier_idx: int,
        answered: Sequence[tuple[Job, JobResult]],
        *,
        is_promotion: bool,
    ) -> None:
        """Learn from what one look has found; it cannot tell the jobs apart."""
        pace = self.speed(tier_idx).pace(is_promotion=is_promotion)
        num = sum(len(job.blocks) for job, _ in answered)
        pace.open_blocks -= num
        pace.answered(
            num,
            min(job.submitted_s for job, _ in answered),
            seen_s=self._seen_s,
            now_s=self.now_s,
            ok=all(result.success for _, result in answered),
        )

    def take_expired(self) -> list[Job]:
        """Return jobs whose deadline has just passed; their tiers say MISS now."""
        expired: list[Job] = []
        due = self._due
        while due and due[0][0] <= self.now_s:
            job = self.open.get(heapq.heappop(due)[1])
            if job is not None:
                expired.append(job)
        if len(due) > 2 * len(self.open) + 64:  # most of them are answered
            due[:] = [entry for entry in due if entry[1] in self.open]
            heapq.heapify(due)
        for job in expired:
            job.is_overdue = True
            self._count_overdue(job.tier_idx, 1)
            self._overdue_tiers[job.tier_idx] = None
            self._counters.overdue_jobs += 1
        return expired

    def take_overdue_tiers(self) -> list[int]:
        """Return tiers with newly missed deadlines since the last call."""
        overdue = list(self._overdue_tiers)
        self._overdue_tiers.clear()
        return overdue

    def announce(self, ctx: ReqContext, words: RequestPolicy | None) -> tuple[int, ...]:
        """Tell every tier of a request; return those that get all its blocks.

        The request's word for a tier counts most, then the configuration's, then
        what the tier itself answers.
        """
        asking = []
        for idx, tier in enumerate(self.tiers):
            try:
                level = tier.on_new_request(ctx).policy
            except Exception:  # noqa: BLE001
                self._counters.tier_errors += 1
                continue
            level = self.traits[idx].level or level
            if words is not None:
                level = words.level_for(tier.name) or level
            if level is OffloadPolicy.REQUEST_LEVEL:
                asking.append(idx)
        return tuple(asking)

    def incomplete(
        self, tier_idx: int, ctx: ReqContext, keys: Sequence[OffloadKey]
    ) -> None:
        """Tell an asking tier what it will not get of a request."""
        self._counters.incomplete_keys[tier_idx] += len(keys)
        try:
            self.tiers[tier_idx].on_request_incomplete(ctx, keys)
        except Exception:  # noqa: BLE001
            self._counters.tier_errors += 1

    def finish(self, ctx: ReqContext) -> None:
        """Tell every tier that nothing of the request follows."""
        for tier in self.tiers:
            try:
                tier.on_request_finished(ctx)
            except Exception:  # noqa: BLE001
                self._counters.tier_errors += 1

    def end_step(self, ctx: ScheduleEndContext) -> None:
        """Tell every tier that the step is over."""
        for tier in self.tiers:
            try:
                tier.on_schedule_end(ctx)
            except Exception:  # noqa: BLE001
                self._counters.tier_errors += 1

    def room_for(self, tier_idx: int, num_blocks: int) -> int:
        """Return how many blocks of a cascade a tier takes now."""
        if self._num_overdue[tier_idx]:
            return 0
        try:
            return max(0, min(self.tiers[tier_idx].room_for(num_blocks), num_blocks))
        except Exception:  # noqa: BLE001
            self._counters.tier_errors += 1
            return 0

    def withdraw(
        self, tier_idx: int, num_blocks: int, ctx: ReqContext
    ) -> list[tuple[Job, list[Block]]]:
        """Take unsent ends off the cascades of requests longer than ``ctx``.

        Returns:
            Jobs with the blocks that they have lost.
        """
        if self._num_overdue[tier_idx]:
            return []
        try:
            taken = self.tiers[tier_idx].withdraw(num_blocks, ctx)
        except Exception:  # noqa: BLE001
            self._counters.tier_errors += 1
            return []
        lost = []
        for job_id, keys in taken:
            job = self.open.get(job_id)
            if job is None:
                self._counters.tier_errors += 1
                continue
            gone = [block for block in job.blocks if block.key in keys]
            job.blocks = [block for block in job.blocks if block.key not in keys]
            self._speeds[tier_idx].stores.open_blocks -= len(gone)
            if not job.blocks:
                del self.open[job_id]
            lost.append((job, gone))
        return lost

    def _count_overdue(self, tier_idx: int, change: int) -> None:
        self._num_overdue[tier_idx] += change
        self.lookups = [
            (idx, tier.lookup)
            for idx, tier in enumerate(self.tiers)
            if not self._num_overdue[idx]
        ]

    def take_events(self) -> list[OffloadingEvent]:
        """Return what the tiers hold and let go of, in their order."""
        events: list[OffloadingEvent] = []
        for idx, tier in enumerate(self.tiers):
            try:
                events += [replace(event, tier=idx) for event in tier.take_events()]
            except Exception:  # noqa: BLE001
                self._counters.tier_errors += 1
        return events

    def mirrors_cleared(self) -> None:
        """Tell every tier that who followed its events knows nothing any more."""
        for tier in self.tiers:
            try:
                tier.on_mirrors_cleared()
            except Exception:  # noqa: BLE001
                self._counters.tier_errors += 1

    def has_pending_work(self) -> bool:
        """Say whether a tier itself needs the engine to step."""
        try:
            return any(tier.has_pending_work() for tier in self.tiers)
        except Exception:  # noqa: BLE001
            self._counters.tier_errors += 1
            return False

    def shutdown(self) -> None:
        """Shut every tier down, whatever the others do, then raise the first error.

        A second call does nothing.
        """
        if self._is_shut:
            return
        self._is_shut = True
        errors: list[Exception] = []
        for tier in self.tiers:
            try:
                tier.shutdown()
            except Exception as error:  # noqa: BLE001  (raised after the others)
                self._counters.tier_errors += 1
                errors.append(error)
        if errors:
            raise errors[0]

    def check_integrity(self) -> None:
        """Assert that what counts as open work is under open jobs."""
        for idx, speed in enumerate(self._speeds):
            jobs = [job for job in self.open.values() if job.tier_idx == idx]
            for way in (False, True):
                num = sum(len(job.blocks) for job in jobs if job.is_promotion is way)
                assert speed.pace(is_promotion=way).open_blocks == num


def check_pins(
    blocks: Iterable[Block], loads: Iterable[Block], jobs: Iterable[Job]
) -> None:
    """Assert that pins are open GPU loads and cascades, and no more (INV-4)."""
    pins = dict.fromkeys(blocks, 0)
    readers = [block for block in loads if block.state == READY]
    for job in jobs:
        if not job.is_promotion and job.is_live:
            readers += job.blocks
    for block in readers:
        pins[block] += 1
    assert all(block.pins == num for block, num in pins.items()), "INV-4"
