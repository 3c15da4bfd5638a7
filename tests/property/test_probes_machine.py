"""Lookups of tiers that do not know yet: who is asked, what is said, for how long.

Covers: the order of tiers and the weight of their verdicts (INV-19, 24, 35, 36).
Does not cover: want of room: the primary is large (``test_manager_machine``).
"""

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shmoffload.core.interfaces import SecondaryTierManager
from shmoffload.core.manager import TieringOffloadingManager
from shmoffload.core.types import (
    JobResult,
    LookupResult,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    make_offload_key,
)

KEYS = [make_offload_key(b"key-%d" % i) for i in range(6)]
HIT, MISS = LookupResult.HIT, LookupResult.MISS
PENDING, RETRY = LookupResult.HIT_PENDING, LookupResult.RETRY
DEADLINE_S = 10.0


class Prober(SecondaryTierManager):
    """Says of each key what it was told to say, or raises."""

    def __init__(self, name):
        super().__init__(name)
        self.verdicts, self.asked, self.jobs, self.done = {}, [], [], []
        self.is_broken = False

    def on_new_request(self, ctx):
        return RequestOffloadingContext()

    def lookup(self, key, ctx):
        self.asked.append(key)
        if self.is_broken:
            raise OSError(self.name)
        return self.verdicts.get(key, MISS)

    def submit_store(self, job):
        self.jobs.append(job)  # nothing is stored here: the step's check sees it

    def submit_load(self, job):
        self.jobs.append(job)

    def get_finished_jobs(self):
        done, self.done = self.done, []
        return done


class ProbesMachine(RuleBasedStateMachine):
    """Three tiers, two requests."""

    def __init__(self):
        super().__init__()
        self.tiers = [Prober(f"t{i}") for i in range(3)]
        self.manager = TieringOffloadingManager(
            64, self.tiers, block_bytes=64, job_deadline_s=DEADLINE_S
        )
        self.now_s = 0.0
        self.requests = [ReqContext("a"), ReqContext("b")]
        for ctx in self.requests:
            self.manager.on_new_request(ctx)
        self.retry_since, self.failed = {}, set()
        self.order = {}  # (tier, request) -> keys in order of their promotion

    @initialize(known=st.lists(st.sampled_from(KEYS), max_size=6))
    def some_are_held(self, known):
        for i, key in enumerate(known):
            self.tiers[i % 3].verdicts[key] = HIT

    @rule(
        t=st.integers(0, 2),
        key=st.sampled_from(KEYS),
        verdict=st.sampled_from([HIT, MISS, RETRY, RETRY, PENDING]),
    )
    def verdict(self, t, key, verdict):
        self.tiers[t].verdicts[key] = verdict

    @rule(t=st.integers(0, 2))
    def break_or_mend(self, t):
        self.tiers[t].is_broken = not self.tiers[t].is_broken

    def _expected(self, key, r):
        """The rule of semantics.md 4.2 in its own words."""
        overdue = {
            t
            for t, tier in enumerate(self.tiers)
            if any(self.now_s - job.submitted_s >= DEADLINE_S for job in tier.jobs)
        }
        block = self.manager.table.blocks.get(key)
        if block is not None:
            return (HIT if block.state == 2 else PENDING), None, []
        if (r, key) in self.failed:
            return MISS, None, []
        asked, said = [], []
        for t, tier in enumerate(self.tiers):
            if t in overdue:
                continue
            asked.append(t)
            answer = MISS if tier.is_broken else tier.verdicts.get(key, MISS)
            if answer is HIT:
                return PENDING, t, asked
            said.append(answer)
        since = self.retry_since.get(r, self.now_s)
        waits = RETRY in said and self.now_s - since <= DEADLINE_S
        return (RETRY if waits else MISS), None, asked

    @rule(r=st.integers(0, 1), keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def look(self, r, keys):
        for key in keys:
            self._look(r, key)

    def _look(self, r, key):
        expected, by, asked = self._expected(key, r)
        before = [len(tier.asked) for tier in self.tiers]
        loads = sum(len(tier.jobs) for tier in self.tiers)
        answer = self.manager.lookup(key, self.requests[r])
        assert answer is expected, f"INV-19, INV-35: {answer}, but {expected}"
        news = [t for t, n in enumerate(before) if len(self.tiers[t].asked) > n]
        assert news == asked, "INV-19: who was asked"
        assert loads == sum(len(tier.jobs) for tier in self.tiers), "INV-24"
        if RETRY in (answer, *self._said(key, asked)) and by is None:
            self.retry_since.setdefault(r, self.now_s)
        if by is not None:
            self.order.setdefault((by, r), []).append(key)

    def _said(self, key, asked):
        tiers = [self.tiers[t] for t in asked]
        return [t.verdicts.get(key, MISS) for t in tiers if not t.is_broken]

    @rule()
    def step(self):
        before = [len(tier.jobs) for tier in self.tiers]
        self.manager.on_schedule_end(ScheduleEndContext())
        sent = {}
        for t, tier in enumerate(self.tiers):
            for job in tier.jobs[before[t] :]:
                r = self.requests.index(job.req_context)
                assert (t, r) not in sent, "INV-24: one job per tier and request"
                sent[t, r] = list(job.keys)
        assert sent == self.order, "INV-24: in the order of their lookups"
        self.order = {}

    @rule(seconds=st.sampled_from([0.5, DEADLINE_S / 2, DEADLINE_S]))
    def wait(self, seconds):
        self.now_s += seconds
        self.manager.advance(self.now_s)
        for tier in self.tiers:
            for job in tier.jobs:
                if self.now_s - job.submitted_s >= DEADLINE_S:
                    r = self.requests.index(job.req_context)
                    self.failed.update((r, key) for key in job.keys)

    @precondition(lambda self: any(tier.jobs for tier in self.tiers))
    @rule(i=st.integers(0, 9), ok=st.booleans())
    def answer(self, i, ok):
        busy = [(tier, job) for tier in self.tiers for job in tier.jobs]
        tier, job = busy[i % len(busy)]
        tier.jobs.remove(job)
        is_late = self.now_s - job.submitted_s >= DEADLINE_S
        late = self.manager.counters.late_replies
        tier.done.append(JobResult(job.job_id, ok))
        self.manager.advance(self.now_s)
        blocks = self.manager.table.blocks
        assert (self.manager.counters.late_replies > late) is is_late, "INV-33"
        if not is_late:
            assert all((key in blocks) is ok for key in job.keys), "INV-23"
        if not ok:
            r = self.requests.index(job.req_context)
            self.failed.update((r, key) for key in job.keys)

    @precondition(lambda self: not self.order)
    @rule(r=st.integers(0, 1))
    def load(self, r):
        """What is here is loaded; from then on waiting counts anew."""
        blocks = self.manager.table.blocks
        keys = [key for key, block in blocks.items() if block.state == 2]
        if keys:
            self.manager.prepare_load(keys, self.requests[r])
            self.manager.complete_load(keys, self.requests[r])
            self.retry_since.pop(r, None)

    @invariant()
    def own_books_are_right(self):
        self.manager.check_integrity()


def test_probes_machine():
    run_state_machine_as_test(ProbesMachine)
