"""The planner under any schedule: admission, preemption, refusals, reset, abort.

Covers: INV-41 to INV-45, and GPU blocks that must not be overwritten before a
store has read them.
Does not cover: where blocks are (the manager here accepts, refuses, or lies).
"""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shmoffload.core.interfaces import OffloadingManager
from shmoffload.core.planner import OffloadingConnectorScheduler
from shmoffload.core.planner_types import PlannerConfig, SchedulerOutput
from shmoffload.core.types import (
    LookupResult,
    OffloadPolicy,
    PrepareStoreOutput,
    RequestOffloadingContext,
)

GPU_TOKENS, PER_BLOCK = 2, 2
BLOCK_TOKENS = GPU_TOKENS * PER_BLOCK
HIT, MISS = LookupResult.HIT, LookupResult.MISS
caps = st.sampled_from([None] * 6 + [0, 3, 8, 12, True, -1, "12"])
rarely = st.sampled_from([False] * 3 + [True])
pick = st.integers(0, 9)


@dataclass
class Req:
    """A request as its scheduler has it, and what it may expect."""

    req_id: str
    num_prompt_tokens: int
    kv_transfer_params: dict
    skip_reading_prefix_cache: bool
    num_tokens: int = 0
    num_computed_tokens: int = 0
    block_hashes: list = field(default_factory=list)
    table: list = field(default_factory=list)
    status: str = "waiting"
    has: set = field(
        default_factory=set
    )  # block indices loaded or offered with success
    last_idx: int = 0

    def cap(self, name):
        value = self.kv_transfer_params.get(name)
        return value if type(value) is int and value >= 0 else 10**9

    def extend(self, num_tokens):
        self.num_tokens += num_tokens
        for i in range(len(self.block_hashes), self.num_tokens // GPU_TOKENS):
            self.block_hashes.append(b"%s/%d" % (self.req_id.encode(), i))


class Manager(OffloadingManager):
    """Grants everything offered or nothing; asserts what it is asked."""

    def __init__(self, policy):
        self.policy, self.verdicts, self.has_room = policy, {}, True
        self.hits, self.offered, self.finished = set(), [], []
        self.prompt_only = True

    def on_new_request(self, ctx):
        return RequestOffloadingContext(self.policy)

    def lookup(self, key, ctx):
        answer = self.verdicts.get(ctx.key_positions[key] // BLOCK_TOKENS - 1, MISS)
        if answer is HIT:
            self.hits.add((ctx.req_id, key))
        return answer

    def prepare_load(self, keys, ctx):
        for key in keys:
            assert (ctx.req_id, key) in self.hits, "INV-43: not answered HIT just now"
        return np.arange(len(keys), dtype=np.int32)

    def complete_load(self, keys, ctx):
        pass

    def prepare_store(self, keys, ctx):
        assert ctx.req_id not in self.finished, "INV-45: an offer after the finish"
        assert len(set(keys)) == len(keys) > 0, "INV-42: an offer without meaning"
        if not self.has_room:
            return None
        self.offered.append((ctx.req_id, [ctx.key_positions[key] for key in keys]))
        return PrepareStoreOutput(list(keys), np.arange(len(keys), dtype=np.int32), ())

    def complete_store(self, keys, ctx, success=True):
        pass

    def on_request_finished(self, ctx):
        assert ctx.req_id not in self.finished, "INV-45: finished twice"
        self.finished.append(ctx.req_id)

    def on_schedule_end(self, ctx):
        self.hits.clear()


class PlannerMachine(RuleBasedStateMachine):
    """Up to four requests, a pool of GPU blocks that are used again at once."""

    planner = None

    @initialize(
        policy=st.sampled_from(OffloadPolicy),
        prompt_only=st.booleans(),
        num_hits=st.integers(0, 7),
    )
    def start(self, policy, prompt_only, num_hits):
        self.policy, self.prompt_only = policy, prompt_only
        self.manager = Manager(policy)
        self.manager.verdicts.update(dict.fromkeys(range(num_hits), HIT))
        self.planner = OffloadingConnectorScheduler(
            self.manager,
            PlannerConfig(
                tokens_per_gpu_block=GPU_TOKENS,
                gpu_blocks_per_block=PER_BLOCK,
                offload_prompt_only=prompt_only,
            ),
        )
        self.requests, self.num_requests = {}, 0
        self.jobs, self.flushed = {}, set()  # job id -> (job, request)
        self.pool, self.next_block = [], 1
        self.allocated, self.tables, self.new_ids = set(), {}, {}
        self.preempted = []

    def _allocate(self, req, num_tokens):
        new = []
        while len(req.table) * GPU_TOKENS < num_tokens:
            block = self.pool.pop() if self.pool else self.next_block
            self.next_block = max(self.next_block, block + 1)
            req.table.append(block)
            new.append(block)
        self.allocated.update(new)
        return new

    def _of(self, *statuses):
        return [r for r in self.requests.values() if r.status in statuses]

    def _jobs_of(self, req, *, is_load):
        return [j for j, r in self.jobs.values() if r is req and j.is_load is is_load]

    @precondition(lambda self: len(self.requests) < 4)
    @rule(
        prompt=st.integers(1, 30),
        offload=caps,
        load=caps,
        skip=st.sampled_from([False] * 3 + [True]),
    )
    def arrive(self, prompt, offload, load, skip):
        self.num_requests += 1
        words = {"max_offload_tokens": offload, "max_load_tokens": load}
        req = Req(
            f"r{self.num_requests}", prompt, words, skip_reading_prefix_cache=skip
        )
        req.extend(prompt)
        self.requests[req.req_id] = req
        self.planner.on_new_request(req)

    @rule(i=st.integers(0, 7), verdict=st.sampled_from([HIT, HIT, *LookupResult]))
    def verdict(self, i, verdict):
        self.manager.verdicts[i] = verdict

    @precondition(lambda self: self._of("waiting"))
    @rule(i=pick, local_blocks=st.integers(0, 3))
    def admit(self, i, local_blocks):
        req = self._of("waiting")[i % len(self._of("waiting"))]
        local = min(local_blocks * GPU_TOKENS, (req.num_tokens - 1) // 2 * 2)
        is_busy = any(r is req for _, r in self.jobs.values())
        num, _ = self.planner.get_num_new_matched_tokens(req, local)
        req.has, req.last_idx = set(), 0
        if num is None:
            return
        assert not is_busy, "INV-43: answered with a copy in flight"
        end = local + num
        if num:
            assert not req.skip_reading_prefix_cache, "INV-44: it loads nothing"
            assert end <= req.cap("max_load_tokens"), "INV-44: max_load_tokens"
            answers = [self.manager.verdicts.get(b, MISS) for b in range(end // 4)]
            asked = answers[local // BLOCK_TOKENS :]
            assert set(asked) <= {HIT}, "INV-43: a load of what is not there"
        req.table = []
        self._allocate(req, req.num_tokens)
        self.planner.update_state_after_alloc(req, list(req.table), num)
        self.tables[req.req_id] = list(req.table)
        req.status = "loading" if num else "running"
        req.num_computed_tokens = end
        if num and self.policy is OffloadPolicy.BLOCK_LEVEL:
            req.has.update(range(end // BLOCK_TOKENS))
            req.last_idx = end // BLOCK_TOKENS

    @rule(
        steps=st.lists(
            st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=3
        )
    )
    def step(self, steps):
        for tokens, has_room in steps:
            self.manager.has_room = has_room
            self._step(tokens)

    def _step(self, tokens):
        scheduled = {}
        for req in self._of("running"):
            if req.num_computed_tokens == req.num_tokens:
                req.extend(1)  # decode: one more token each step
                new = self._allocate(req, req.num_tokens)
                self.new_ids.setdefault(req.req_id, []).extend(new)
            left = req.num_tokens - req.num_computed_tokens
            scheduled[req.req_id] = min(left, tokens)
        self._build(scheduled)

    def _build(self, scheduled):
        finishing = set(self.planner._finishing)
        open_before = dict(self.jobs)
        self.manager.offered.clear()
        meta = self.planner.build_connector_meta(
            SchedulerOutput(
                num_scheduled_tokens=scheduled,
                block_tables=self.tables,
                new_block_ids=self.new_ids,
                preempted_req_ids=self.preempted,
            )
        )
        for job in (*meta.stores, *meta.loads):
            self.jobs[job.job_id] = (job, self.requests[job.req_id])
        for job_id, (job, _) in {**open_before, **self.jobs}.items():
            reads = set(job.gpu_block_ids)
            if job.is_load or job_id not in open_before or job_id in self.flushed:
                continue
            if reads & self.allocated:
                assert job_id in meta.jobs_to_flush, "INV-43: overwritten unread"
        self.flushed |= meta.jobs_to_flush  # copied before this step's forward
        for req_id, ends in self.manager.offered:
            self._check_offer(self.requests[req_id], scheduled, ends, finishing)
        assert finishing <= set(self.manager.finished), "INV-45: not told of the end"
        for job in meta.loads:
            assert not self._jobs_of(self.requests[job.req_id], is_load=False), "INV-43"
        self.allocated, self.tables, self.new_ids, self.preempted = set(), {}, {}, []
        for req_id, num in scheduled.items():
            self.requests[req_id].num_computed_tokens += num

    def _check_offer(self, req, scheduled, ends, finishing):
        known = req.num_computed_tokens + scheduled.get(req.req_id, 0)
        if req.req_id in finishing:
            known = req.num_tokens
        assert max(ends) <= known, "INV-41: offered before it was computed"
        assert max(ends) <= req.cap("max_offload_tokens"), "INV-44: max_offload_tokens"
        if self.prompt_only:
            assert max(ends) <= req.num_prompt_tokens, "INV-44: prompt only"
        blocks = [end // BLOCK_TOKENS - 1 for end in ends]
        assert not req.has & set(blocks), "INV-42: a block twice in one admission"
        req.has.update(blocks)
        assert req.has == set(range(len(req.has))), "INV-42: a hole"

    @precondition(lambda self: self.jobs)
    @rule(i=pick)
    def ack(self, i):
        self._ack(sorted(self.jobs)[i % len(self.jobs)])

    def _ack(self, job_id):
        job, req = self.jobs.pop(job_id)
        self.planner.update_connector_output([job_id])
        if job.is_load:
            if req.status == "loading":
                req.status = "running"
            elif req.status == "ended":
                self.pool += req.table  # freed late

    @precondition(lambda self: self._of("running"))
    @rule(i=pick)
    def preempt(self, i):
        req = self._of("running")[i % len(self._of("running"))]
        req.status, req.num_computed_tokens = "waiting", 0
        self.preempted.append(req.req_id)
        self.tables.pop(req.req_id, None)
        self.new_ids.pop(req.req_id, None)
        self.pool += req.table
        req.table = []

    @precondition(lambda self: self._of("waiting", "loading", "running"))
    @rule(i=pick, aborted=st.booleans())
    def finish(self, i, aborted):
        alive = self._of("waiting", "loading", "running")
        req = alive[i % len(alive)]
        is_done = req.num_computed_tokens == req.num_tokens
        self.planner.request_finished(req, aborted=aborted or not is_done)
        if req.status == "running":
            self.pool += req.table
        req.status = "ended"
        if req.req_id in self.tables and self._jobs_of(req, is_load=True) == []:
            self.tables.pop(req.req_id)
        self._finish_again(req)

    @precondition(lambda self: self._of("ended"))
    @rule(i=pick)
    def finish_again(self, i):
        self._finish_again(self._of("ended")[i % len(self._of("ended"))])

    def _finish_again(self, req):
        counted = self.planner.counters.unknown_requests
        self.planner.request_finished(req)
        again = self.planner.counters.unknown_requests
        assert again == counted + 1, "INV-30, INV-45: finished once more"

    @rule()
    def reset(self):
        self.planner.reset_cache()
        for req in self.requests.values():
            req.has, req.last_idx = set(), 0

    @invariant()
    def indices_only_grow(self):
        if self.planner is None:
            return
        for req_id, state in self.planner._states.items():
            req, idx = self.requests[req_id], state.next_store_idx
            assert idx >= req.last_idx, "INV-41: the store index went back"
            assert idx <= len(state.keys), "INV-41: beyond the keys"
            req.last_idx = idx

    def teardown(self):
        if self.planner is None:
            return
        while alive := self._of("waiting", "loading", "running"):
            self.planner.request_finished(alive[0], aborted=True)
            alive[0].status = "ended"
        self._build({})
        for job_id in list(self.jobs):
            self._ack(job_id)
        assert sorted(self.manager.finished) == sorted(self.requests), "INV-45"
        assert not self.planner._states, "INV-29: states left"
        assert not self.planner.has_pending_push_work(), "INV-29: work left"


def test_planner_machine():
    run_state_machine_as_test(PlannerMachine)
