"""What is loaded and stored in each step: our model of vLLM's connector scheduler.

Covers: one KV group, full attention or a sliding window: match scan, load jobs,
store offers for both policies, GPU blocks that must not be overwritten early,
finish ordering, reset.
Does not cover: where blocks are (the manager), copies (the GPU side), which
request runs (the scheduler).
Who calls it: the scheduler process, one thread. Nothing here waits or raises for
what the world does. (vLLM ``offloading/scheduler.py``, 0.23 to 0.33; the finish
order is 0.33's.)

One step::

    get_num_new_matched_tokens*  update_state_after_alloc*    schedule
    build_connector_meta: offers, finish hooks, step end      hand to the GPU side
    update_connector_output, request_finished*                end of the step
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmoffload.core.planner_state import GpuBlockFence, RequestOffloadState
from shmoffload.core.planner_types import (
    NULL_GPU_BLOCK,
    ConnectorMetadata,
    PlannerConfig,
    PlannerCounters,
    PlannerRequest,
    SchedulerOutput,
    TransferJob,
)
from shmoffload.core.request_policy import RequestPolicy, Verdict
from shmoffload.core.types import (
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from shmoffload.core.window_scan import GroupKeys, match_groups

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shmoffload.core.interfaces import OffloadingManager


class OffloadingConnectorScheduler:
    """Plans transfers for the requests of one scheduler."""

    def __init__(self, manager: OffloadingManager, config: PlannerConfig) -> None:
        self.config = config
        self.counters = PlannerCounters()
        self._manager = manager
        self._states: dict[str, RequestOffloadState] = {}
        self._finishing: dict[str, RequestOffloadState] = {}
        self._owners: dict[int, RequestOffloadState] = {}  # of open jobs
        self._reports_due: dict[int, int] = {}
        self._next_job_id = 0
        self._fence = GpuBlockFence()
        self._loading: dict[OffloadKey, int] = {}
        # Of the step that is being scheduled.
        self._allocated: dict[int, RequestOffloadState | None] = {}
        self._stores: list[TransferJob] = []
        self._loads: list[TransferJob] = []
        self._flush: set[int] = set()

    # Requests -----------------------------------------------------------------

    def on_new_request(self, request: PlannerRequest) -> RequestOffloadingContext:
        """Announce a request before any other call for it."""
        ctx = self._create_req_context(request)
        offloading = self._manager.on_new_request(ctx)
        words, notes = RequestPolicy.parse(request.kv_transfer_params)
        self.counters.bad_params += sum(n.verdict is Verdict.REJECTED for n in notes)
        state = RequestOffloadState(
            request,
            ctx,
            offloading,
            max_offload_tokens=words.max_offload_tokens,
            max_load_tokens=words.max_load_tokens,
        )
        self._states[request.req_id] = state
        return offloading

    def _create_req_context(self, request: PlannerRequest) -> ReqContext:
        return ReqContext(request.req_id, request.kv_transfer_params)

    def request_finished(
        self, request: PlannerRequest, *, aborted: bool = False
    ) -> None:
        """Note that a request ended; its GPU blocks may be freed at once.

        Its last stores are offered, and the manager told, by the next
        ``build_connector_meta``. Unknown or repeated: a counter.
        """
        state = self._states.get(request.req_id)
        if state is None or state.finish_told or request.req_id in self._finishing:
            self.counters.unknown_requests += 1
            return
        state.aborted = aborted
        self._finishing[request.req_id] = state
        self._fence_stores(state)

    # Loads --------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: PlannerRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Say how many tokens beyond the local ones can be loaded.

        Called for a request that waits to be (re-)admitted.

        Args:
            request: announced before.
            num_computed_tokens: tokens that the GPU itself has.

        Returns:
            The count, or None: skip the request in this step and ask again; and
            whether the load runs beside the step (True for any load).
        """
        state = self._states.get(request.req_id)
        if state is None:
            self.counters.unknown_requests += 1
            return 0, False
        # A (re-)admission starts from an empty table: what was offered before may
        # have been evicted meanwhile, and the manager drops what it still has.
        state.gpu_block_ids.clear()
        state.next_store_idx = 0
        if state.jobs:
            return None, False
        state.local_tokens = num_computed_tokens
        if request.skip_reading_prefix_cache:
            return 0, False
        start = num_computed_tokens // self.config.tokens_per_block
        num_hits = self._count_hits(state, start)
        if num_hits is None:
            self.counters.deferred += 1
            return None, False
        self.counters.matches += 1
        end_tokens = (start + num_hits) * self.config.tokens_per_block
        num_tokens = max(0, end_tokens - num_computed_tokens)
        return num_tokens, num_tokens > 0

    def _count_hits(self, state: RequestOffloadState, start: int) -> int | None:
        """Scan the prefix from block ``start``; None if anything is undecided.

        RETRY does not end the scan, so that one step starts all probes and
        promotions that the request needs.
        """
        end = state.load_end(self.config)
        lookup = self._manager.lookup
        ctx = state.ctx
        group = GroupKeys(state.keys[start:end], self.config.window_blocks)
        match = match_groups(lambda key: lookup(key, ctx), [group])
        if not match.is_decided:
            return None
        hits = group.keys[: match.num_blocks]
        if self.config.gpu_prefix_cache and any(key in self._loading for key in hits):
            return None
        return match.num_blocks

    def update_state_after_alloc(
        self,
        request: PlannerRequest,
        block_ids: Sequence[int],
        num_external_tokens: int,
    ) -> None:
        """Take the GPU blocks of an admitted request and plan its load.

        Args:
            request: answered with a count in this step.
            block_ids: its whole GPU block table so far.
            num_external_tokens: tokens to load, as answered.
        """
        state = self._states.get(request.req_id)
        if state is None:
            self.counters.unknown_requests += 1
            return
        state.gpu_block_ids = list(block_ids)
        self._allocated.update(dict.fromkeys(block_ids, state))
        if num_external_tokens == 0:
            return
        assert not state.jobs, "a load and another transfer of one request"
        config = self.config
        end_tokens = state.local_tokens + num_external_tokens
        assert end_tokens % config.tokens_per_block == 0, "a load of part of a block"
        start = state.local_tokens // config.tokens_per_block
        end = end_tokens // config.tokens_per_block
        first = state.local_tokens // config.tokens_per_gpu_block
        if config.window_blocks is not None and end - config.window_blocks > start:
            start = end - config.window_blocks  # before it: nothing that is read
            first = start * config.gpu_blocks_per_block
        keys = state.keys[start:end]
        job = TransferJob(
            job_id=self._new_job_id(),
            req_id=request.req_id,
            is_load=True,
            keys=keys,
            slots=self._manager.prepare_load(keys, state.ctx),
            gpu_block_ids=state.gpu_block_ids[
                first : end * config.gpu_blocks_per_block
            ],
            gpu_blocks_skipped=first - start * config.gpu_blocks_per_block,
        )
        if state.offloading.policy is OffloadPolicy.BLOCK_LEVEL:
            state.next_store_idx = end
        self._open(state, job)
        self._loads.append(job)
        for key in keys:
            self._loading[key] = self._loading.get(key, 0) + 1

    # The step -----------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput) -> ConnectorMetadata:
        """Offer what the step computes, end it, and say what to copy.

        The last manager call of a step is ``on_schedule_end``, after the finish
        hooks, which come after the last offers of their requests.
        """
        self._take_tables(output)
        if self.config.window_blocks is not None:
            for req_id, windowed in self._states.items():
                if req_id not in self._finishing:  # those are flushed in time
                    windowed.blank_reused(self._allocated)
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            state = self._states.get(req_id)
            if state is not None and not state.finish_told:
                known = state.request.num_computed_tokens + num_tokens
                self._offer(state, known)
        for state in self._finishing.values():
            self._finish(state)
        self._finishing.clear()
        for req_id in output.preempted_req_ids:
            state = self._states.get(req_id)
            if state is not None:
                self._flush.update(
                    i for i, job in state.jobs.items() if not job.is_load
                )
        self._flush |= self._fence.jobs_on(self._allocated)
        meta = ConnectorMetadata(self._stores, self._loads, frozenset(self._flush))
        self._stores, self._loads = [], []
        self._allocated.clear()
        self._flush.clear()
        self._manager.on_schedule_end(
            ScheduleEndContext(output.new_req_ids, output.preempted_req_ids)
        )
        return meta

    def _take_tables(self, output: SchedulerOutput) -> None:
        states = self._states
        for req_id, block_ids in output.block_tables.items():
            self._allocated.update(dict.fromkeys(block_ids, states.get(req_id)))
            if req_id in states:
                states[req_id].gpu_block_ids = list(block_ids)
        for req_id, block_ids in output.new_block_ids.items():
            self._allocated.update(dict.fromkeys(block_ids, states.get(req_id)))
            if req_id in states:
                states[req_id].gpu_block_ids.extend(block_ids)

    def _offer(self, state: RequestOffloadState, known_tokens: int) -> int:
        """Offer the blocks that are complete and were not offered before.

        Returns:
            Blocks that the manager refused; they are offered again with more.
        """
        start, end = state.next_store_idx, state.store_end(self.config, known_tokens)
        if start >= end:
            return 0
        per_block = self.config.gpu_blocks_per_block
        table = state.gpu_block_ids
        offer = {
            state.keys[i]: i
            for i in range(start, end)
            if NULL_GPU_BLOCK not in table[i * per_block : (i + 1) * per_block]
        }
        if not offer:
            state.next_store_idx = end
            return 0
        granted = self._manager.prepare_store(list(offer), state.ctx)
        if granted is None:
            self.counters.stores_refused += 1
            return len(offer)
        # Past all of them, what the manager has or does not want included; but what
        # had no room is offered again.
        left_out = granted.left_out
        state.next_store_idx = offer[left_out[0]] if left_out else end
        if not granted.keys_to_store:
            return len(left_out)
        job = TransferJob(
            job_id=self._new_job_id(),
            req_id=state.ctx.req_id,
            is_load=False,
            keys=granted.keys_to_store,
            slots=granted.slots,
            gpu_block_ids=[
                table[offer[key] * per_block + i]
                for key in granted.keys_to_store
                for i in range(per_block)
            ],
        )
        self._open(state, job)
        self._stores.append(job)
        return len(left_out)

    def _finish(self, state: RequestOffloadState) -> None:
        if not state.is_loading:
            self.counters.blocks_never_stored += self._offer(
                state, state.final_tokens()
            )
            self._fence_stores(state)
        self._manager.on_request_finished(state.ctx)
        state.finish_told = True
        self._drop_if_done(state)

    def update_connector_output(self, completed: Iterable[int]) -> None:
        """Take reports of the GPU workers: one per worker and finished job."""
        for job_id in completed:
            due = self._reports_due.get(job_id)
            if due is None:
                self.counters.unknown_completions += 1
            elif due > 1:
                self._reports_due[job_id] = due - 1
            else:
                self._complete(job_id)

    def _complete(self, job_id: int) -> None:
        del self._reports_due[job_id]
        state = self._owners.pop(job_id)
        job = state.jobs.pop(job_id)
        if job.is_load:
            for key in job.keys:
                self._loading[key] -= 1
                if not self._loading[key]:
                    del self._loading[key]
            self._manager.complete_load(job.keys, state.ctx)
        else:
            self._fence.remove(job)
            self._manager.complete_store(job.keys, state.ctx)
        self._drop_if_done(state)

    def has_pending_push_work(self) -> bool:
        """Say whether the engine has to step although nothing is scheduled."""
        return bool(self._owners or self._finishing or self._manager.has_pending_work())

    def reset_cache(self) -> None:
        """Forget every offloaded block; call it between steps. Does not wait.

        Open copies go on the next flush list. The manager keeps their slots
        quarantined until their completions, which still go to it.
        """
        for state in self._finishing.values():
            self._manager.on_request_finished(state.ctx)
            state.finish_told = True
        self._finishing.clear()
        self._manager.reset_cache()
        self._flush.update(self._owners)
        for state in list(self._states.values()):
            state.next_store_idx = 0
            self._drop_if_done(state)

    # Bookkeeping --------------------------------------------------------------

    def _new_job_id(self) -> int:
        self._next_job_id += 1
        return self._next_job_id - 1

    def _open(self, state: RequestOffloadState, job: TransferJob) -> None:
        state.jobs[job.job_id] = job
        self._owners[job.job_id] = state
        self._reports_due[job.job_id] = self.config.num_gpu_workers
        if self.config.window_blocks is not None and not job.is_load:
            self._fence.add(job)  # its request lets go of blocks while it runs

    def _fence_stores(self, state: RequestOffloadState) -> None:
        for job in state.jobs.values():
            if not job.is_load:
                self._fence.add(job)

    def _drop_if_done(self, state: RequestOffloadState) -> None:
        req_id = state.ctx.req_id
        if state.finish_told and not state.jobs and self._states.get(req_id) is state:
            del self._states[req_id]
