"""Jobs of vLLM's tiering manager, done by an engine of ours.

Covers: stores and loads between rows of vLLM's primary and a tier's worker, by way
of the slots of a small region of ours (the *staging*); each job answered once.
Does not cover: vLLM's types (``tier``), the copies (``row_copier``).
Who calls it: ``tier``, scheduler thread. Only ``drain`` and ``close`` wait. Does not
import vllm.

To the engine, vLLM's primary is the GPU:

    store: prepare_store -- rows to slots --> complete_store, cascade; answered
    load:  lookup until HIT, prepare_load -- slots to rows --> complete_load; answered

A store is answered when its bytes are in the staging: vLLM's pins go, and the
cascade needs no further step of the scheduler. Only the copier touches rows, so a
job without copies can be ended at any time.
"""

from __future__ import annotations

import logging
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

from shmoffload.core.slots import READY
from shmoffload.core.types import (
    MAX_KEY_BYTES,
    LookupResult,
    OffloadPolicy,
    ReqContext,
    ScheduleEndContext,
)
from shmoffload.vllm.staging.job_types import Job, LoadJob, Outcome, StoreJob
from shmoffload.vllm.staging.row_copier import RowCopier, RowCopies

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from shmoffload.core.types import OffloadKey, SlotArray
    from shmoffload.engine.handle import Engine

log = logging.getLogger(__name__)

_HIT = LookupResult.HIT
_MISS = LookupResult.MISS
_HIT_PENDING = LookupResult.HIT_PENDING
_END = ScheduleEndContext()
_NOBODY = ReqContext("")


class RowJobs:
    """Stores and loads of one tier.

    Args:
        engine: with one tier; owned by this object from now on.
        view: vLLM's primary, one row a block.
        clock: for tests.

    Attributes:
        is_off: our own code has failed: everything is a miss from here.
    """

    def __init__(
        self,
        engine: Engine,
        view: memoryview,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_off = False
        self._engine = engine
        (self._tier,) = engine.tiers
        self._row_bytes = engine.config.block_bytes
        self._deadline_s = engine.config.limits.job_deadline_s
        # Of one load job at a time, so that several find room side by side.
        self._max_window = max(1, engine.config.num_slots // 2)
        self._clock = clock
        self._copier: RowCopier[Job] = RowCopier(view, engine.slot_view)
        self._requests: dict[str, ReqContext] = {}
        self._stores: dict[int, StoreJob] = {}
        self._loads: dict[int, LoadJob] = {}
        self._num_storing = 0  # blocks of stores whose copy runs
        self._outcomes: list[Outcome] = []

    # Requests -----------------------------------------------------------------

    def announce(
        self,
        req_id: str,
        params: Mapping[str, Any] | None,
        positions: dict[OffloadKey, int],
    ) -> OffloadPolicy:
        """Take in a request; says what the tier wants of it.

        ``positions`` is shared: what is put in later is seen.
        """
        ctx = ReqContext(req_id, params, positions)
        self._requests[req_id] = ctx
        return self._engine.on_new_request(ctx).policy

    def finish(self, req_id: str) -> None:
        """Forget a request; its jobs go on."""
        ctx = self._requests.pop(req_id, None)
        if ctx is not None:
            self._engine.on_request_finished(ctx)

    # Lookups and jobs -----------------------------------------------------------

    def holds(self, key: OffloadKey) -> bool:
        """Say whether a load of the key would work now. Starts nothing."""
        if self.is_off or self._engine.is_broken:
            return False
        block = self._engine.manager.table.blocks.get(key)
        if block is not None and block.state == READY:
            return True
        return self._is_in_tier(key)

    def store(
        self, job_id: int, req_id: str, keys: Collection[OffloadKey], rows: SlotArray
    ) -> None:
        """Copy what is not known yet into the staging, as far as there is room.

        Without room for all, the head of it is stored and the job fails; it never
        waits for room.
        """
        ctx = self._requests.get(req_id)
        job = StoreJob(job_id, ctx or ReqContext(f"store-{job_id}"), self._clock())
        self._stores[job_id] = job
        if self.is_off:
            return
        if ctx is None:  # of somebody who never announced it
            job.is_own_ctx = True
            self._engine.on_new_request(job.ctx)
        known = self._engine.manager.table.blocks
        wanted = {
            key: row
            for key, row in zip(keys, rows.tolist(), strict=True)
            if key not in known and not self._is_in_tier(key)
        }
        granted = self._reserve(job, wanted)
        if granted is not None:
            self._num_storing += len(granted.keys)
            self._start(granted)
        else:
            self._settle_store(job)

    def _reserve(
        self, job: StoreJob, wanted: dict[OffloadKey, int]
    ) -> RowCopies[Job] | None:
        """Take slots for the head of what is wanted; None: there is none to copy."""
        if not wanted:
            return None
        positions = job.ctx.key_positions
        in_order = sorted(wanted, key=lambda key: positions.get(key, 0))
        # Beyond the credit the bytes would be copied and then not sent.
        room = self._tier.room_for(self._num_storing + len(in_order))
        head = in_order[: max(0, room - self._num_storing)]
        if max(map(len, wanted)) > MAX_KEY_BYTES:
            head = []  # such a key has no place in a slot table
        output = self._engine.prepare_store(head, job.ctx) if head else None
        num_granted = 0 if output is None else len(output.keys_to_store)
        job.is_whole = num_granted == len(wanted)
        if output is None or not num_granted:
            return None
        granted = list(output.keys_to_store)
        rows = [wanted[key] for key in granted]
        return RowCopies(job, granted, rows, output.slots.tolist(), to_rows=False)

    def load(self, job_id: int, keys: Collection[OffloadKey], rows: SlotArray) -> None:
        """Take in a load; the next ``end_step`` begins it."""
        now_s = self._clock()
        ctx = ReqContext(f"load-{job_id}")
        job = LoadJob(job_id, ctx, now_s, deadline_s=now_s + self._deadline_s)
        self._loads[job_id] = job
        if self.is_off:
            return
        job.todo = dict(zip(keys, rows.tolist(), strict=True))
        # The same key in two rows: one of them would stay empty.
        job.has_failed = len(job.todo) != len(keys)
        # One request a job: vLLM submits loads of requests that it has finished, and
        # a key that failed once may be tried again by the next job.
        self._engine.on_new_request(ctx)

    @property
    def num_open(self) -> int:
        """Jobs that are not answered."""
        return len(self._stores) + len(self._loads)

    @property
    def has_loads(self) -> bool:
        """Some load needs further steps."""
        return bool(self._loads)

    def take_outcomes(self) -> list[Outcome]:
        """Return the answers since the last call, each once."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    # Steps ----------------------------------------------------------------------

    def begin_step(self) -> None:
        """Take in what has ended; start the copies that can start."""
        if self.is_off:
            self.collect_off()
            return
        self._engine.step_begin()
        self._collect()
        self._start_copies()

    def end_step(self) -> None:
        """Ask for what loads need; what they ask for leaves now."""
        if self.is_off:
            return
        self._collect()
        self._start_copies()
        for job in list(self._loads.values()):
            if job.todo:
                self._look_up(job)
            self._settle_load(job)
        self._engine.on_schedule_end(_END)

    def _collect(self) -> None:
        """Take in finished copies."""
        has_stored = False
        while (copies := self._copier.next_done()) is not None:
            job = copies.job
            job.num_copying -= 1
            if isinstance(job, LoadJob):
                self._engine.complete_load(copies.keys, job.ctx)
                if copies.is_copied:
                    job.done += copies.keys
                else:
                    job.has_failed = True
                self._settle_load(job)
            else:
                assert isinstance(job, StoreJob)
                self._num_storing -= len(copies.keys)
                self._end_store(job, copies)
                has_stored = True
        if has_stored:
            self._engine.flush()

    def _end_store(self, job: StoreJob, copies: RowCopies[Job]) -> None:
        dropped = self._engine.manager.counters.cascade_blocks_dropped
        before = dropped[0]
        self._engine.complete_store(copies.keys, job.ctx, copies.is_copied)
        if not copies.is_copied or self._engine.is_broken or dropped[0] != before:
            job.has_failed = True
        job.done += copies.keys
        self._settle_store(job)

    def _settle_store(self, job: StoreJob) -> None:
        del self._stores[job.job_id]
        if job.is_own_ctx:
            self._engine.on_request_finished(job.ctx)
        self._answer(job, success=job.is_whole and not job.has_failed)

    def _start_copies(self) -> None:
        """Copy out what has arrived for any load, before anybody can evict it."""
        for job in list(self._loads.values()):
            self._take_ready(job)

    def _take_ready(self, job: LoadJob) -> None:
        """Start the copies of one load that can start."""
        blocks = self._engine.manager.table.blocks
        ready = [
            key
            for key in islice(job.todo, self._max_window)
            if (block := blocks.get(key)) is not None and block.state == READY
        ]
        if not ready:
            return
        try:
            slots = self._engine.prepare_load(ready, job.ctx).tolist()
        except KeyError:  # the engine is off
            self._give_up(job)
            return
        rows = [job.todo.pop(key) for key in ready]
        self._start(RowCopies(job, ready, rows, slots, to_rows=True))

    def _look_up(self, job: LoadJob) -> None:
        """Have the next keys promoted; drop those that will not come."""
        if self._clock() >= job.deadline_s:
            self._give_up(job)
            return
        for key in list(islice(job.todo, self._max_window)):
            answer = self._engine.lookup(key, job.ctx)
            if answer is _HIT_PENDING:
                job.promised.add(key)
            elif answer is _MISS and (key in job.promised or not self.holds(key)):
                # Held and never promised: only room was missing, and stores and
                # loads that are under way give it back. The deadline bounds that.
                del job.todo[key]
                job.has_failed = True

    def _settle_load(self, job: LoadJob) -> None:
        if job.todo or job.num_copying:
            return
        del self._loads[job.job_id]
        self._engine.on_request_finished(job.ctx)
        self._answer(job, success=not job.has_failed)

    def _give_up(self, job: LoadJob) -> None:
        """Fail what is not being copied."""
        job.has_failed = job.has_failed or bool(job.todo)
        job.todo.clear()

    def _start(self, copies: RowCopies[Job]) -> None:
        copies.job.num_copying += 1
        self._copier.submit(copies)

    def _answer(self, job: Job, *, success: bool) -> None:
        self._outcomes.append(
            Outcome(
                job.job_id,
                success,
                loaded=job.done,
                num_bytes=len(job.done) * self._row_bytes,
                time_s=self._clock() - job.since_s,
            )
        )

    def _is_in_tier(self, key: OffloadKey) -> bool:
        return self._tier.lookup(key, _NOBODY) is _HIT

    # Ends -----------------------------------------------------------------------

    def drain(self) -> None:
        """End every job: running copies end, what is not copied yet fails.

        Waits for copies alone: milliseconds, and never for a worker.
        """
        if not self._copier.wait_idle(self._deadline_s):
            log.error("a copy of rows did not end in %g s", self._deadline_s)
        if self.is_off:
            self.collect_off()
            return
        self._collect()
        for job in list(self._loads.values()):
            self._give_up(job)
            self._settle_load(job)

    def switch_off(self) -> None:
        """Use the engine no more after our own code failed; every job fails.

        Jobs under a running copy are answered by ``collect_off``, when it has ended.
        """
        self.is_off = True
        for job in self._loads.values():
            job.todo.clear()
        self.collect_off()

    def collect_off(self) -> None:
        """Answer the jobs whose copies have ended, without the engine."""
        while (copies := self._copier.next_done()) is not None:
            copies.job.num_copying -= 1
        for jobs in (self._stores, self._loads):
            for job in [job for job in jobs.values() if not job.num_copying]:
                del jobs[job.job_id]
                job.done.clear()
                self._answer(job, success=False)

    def close(self) -> None:
        """End every job and the engine; vLLM's memory is not touched afterwards.

        Waits as the engine's ``close`` does. Twice is fine.
        """
        try:
            if not self._copier.close(self._deadline_s):
                log.error("a copy of rows did not end in %g s", self._deadline_s)
            self.switch_off()
        finally:
            self._engine.close()
