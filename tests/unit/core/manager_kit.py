"""A manager with hand-driven tiers.

Covers: keys by number, a tier that answers when told, a mailbox whose worker is
the test, the steps of a scheduler.
Does not cover: real workers.
Who calls it: tests of the manager, scenarios, faults.
"""

from shmoffload.core.interfaces import SecondaryTierManager
from shmoffload.core.mailbox import MailboxTier
from shmoffload.core.manager import TieringOffloadingManager
from shmoffload.core.types import (
    JobMetadata,
    JobReply,
    JobResult,
    LookupResult,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TierUp,
    make_offload_key,
)

HIT, MISS = LookupResult.HIT, LookupResult.MISS
PENDING, RETRY = LookupResult.HIT_PENDING, LookupResult.RETRY


def key(number):
    return make_offload_key(b"block-%04d" % number)


def keys(*numbers):
    return [key(number) for number in numbers]


def number(of_key):
    """The number of one of our keys; other keys stand for themselves."""
    return int(of_key[6:10]) if of_key.startswith(b"block-") else of_key


def numbers(of_keys):
    return [number(k) for k in of_keys]


ENGINE_EPOCH = 7


def make_mailbox(
    *,
    epoch=1,
    credit_blocks=100,
    max_outbox=100,
    name="slab",
    policy=OffloadPolicy.BLOCK_LEVEL,
    events=False,
):
    """A worker's tier as the core sees it; the test feeds it. ``epoch`` 0: down."""
    tier = MailboxTier(
        name,
        policy=policy,
        credit_bytes=credit_blocks * 64,
        block_bytes=64,
        engine_epoch=ENGINE_EPOCH,
        max_outbox=max_outbox,
        events=events,
    )
    if epoch:
        tier.feed([TierUp(epoch)])
    return tier


def reply(job_id, *, worker=1, engine=ENGINE_EPOCH, **more):
    """A worker's answer to a job."""
    return JobReply(engine, worker, job_id, **more)


def sent_jobs(tier):
    """Take a mailbox's outbox; return the jobs in it."""
    return [out for out in tier.take_outbox() if isinstance(out, JobMetadata)]


class ManualTier(SecondaryTierManager):
    """Answers jobs when told; ``log`` has every word in order."""

    def __init__(self, name="t", policy=OffloadPolicy.BLOCK_LEVEL):
        super().__init__(name)
        self.policy = policy
        self.have = set()
        self.verdicts = {}
        self.log = []
        self.jobs = {}
        self.done = []
        self.credit = True
        self.raises = ()

    def on_new_request(self, ctx):
        self._say("new", ctx.req_id)
        return RequestOffloadingContext(self.policy)

    def on_request_finished(self, ctx):
        self._say("finished", ctx.req_id)

    def lookup(self, k, ctx):
        self._say("lookup", ctx.req_id, number(k), logged=False)
        return self.verdicts.get(k, HIT if k in self.have else MISS)

    def submit_store(self, job):
        self._say("store", job.req_context.req_id, *numbers(job.keys))
        self.jobs[job.job_id] = job

    def submit_load(self, job):
        self._say("load", job.req_context.req_id, *numbers(job.keys))
        self.jobs[job.job_id] = job

    def get_finished_jobs(self):
        self._say("poll", logged=False)
        done, self.done = self.done, []
        return done

    def admits(self, num_blocks):
        return self.credit

    def _say(self, word, *about, logged=True):
        if word in self.raises:
            raise OSError(word)
        if logged:
            self.log.append((word, *about))

    def said(self, word):
        return [about for said, *about in self.log if said == word]

    def answer(self, *, ok=True, only=None):
        """Answer every open job; ``only``: the keys of promotions that arrived."""
        for job in list(self.jobs.values()):
            self.answer_job(job, ok=ok, only=only)

    def answer_job(self, job, *, ok=True, only=None):
        del self.jobs[job.job_id]
        if ok and not job.is_promotion:
            self.have.update(job.keys)
        self.done.append(JobResult(job.job_id, ok, only))


class Rig:
    """A manager, its tiers, and requests by name."""

    def __init__(
        self, num_slots=5, num_tiers=1, *, request_level=(), tiers=None, **settings
    ):
        self.tiers = tiers or [
            ManualTier(
                f"t{i}",
                OffloadPolicy.REQUEST_LEVEL
                if i in request_level
                else OffloadPolicy.BLOCK_LEVEL,
            )
            for i in range(num_tiers)
        ]
        self.manager = TieringOffloadingManager(
            num_slots, self.tiers, block_bytes=64, **settings
        )
        self.now_s = 0.0
        self.contexts = {}

    @property
    def counters(self):
        return self.manager.counters

    def new(self, req_id, *of_keys, params=None):
        """Announce; ``of_keys`` are the numbers of its prompt, in order."""
        positions = {key(n): (i + 1) * 16 for i, n in enumerate(of_keys)}
        ctx = ReqContext(req_id, params, key_positions=positions)
        self.contexts[req_id] = ctx
        return self.manager.on_new_request(ctx).policy

    def finish(self, req_id):
        self.manager.on_request_finished(self.contexts[req_id])

    def look(self, req_id, *of_keys):
        ctx = self.contexts[req_id]
        return [self.manager.lookup(key(n), ctx) for n in of_keys]

    def scan(self, req_id, *of_keys):
        """Scan a prefix as the planner does: its hits, or None = ask again."""
        ctx = self.contexts[req_id]
        num, undecided = 0, False
        for n in of_keys:
            result = self.manager.lookup(key(n), ctx)
            if result is MISS:
                break
            num += 1
            undecided = undecided or result is not HIT
        return None if undecided else num

    def offer(self, req_id, *of_keys):
        return self.manager.prepare_store(keys(*of_keys), self.contexts[req_id])

    def stored(self, req_id, *of_keys, ok=True):
        self.manager.complete_store(keys(*of_keys), self.contexts[req_id], ok)

    def store(self, req_id, *of_keys):
        granted = self.offer(req_id, *of_keys)
        assert granted is not None
        self.stored(req_id, *numbers(granted.keys_to_store))

    def load(self, req_id, *of_keys):
        return self.manager.prepare_load(keys(*of_keys), self.contexts[req_id])

    def loaded(self, req_id, *of_keys):
        self.manager.complete_load(keys(*of_keys), self.contexts[req_id])

    def advance(self, seconds=0.0):
        self.now_s += seconds
        self.manager.advance(self.now_s)
        self.manager.check_integrity()

    def step(self):
        self.manager.on_schedule_end(ScheduleEndContext())
        self.manager.check_integrity()

    def settle(self):
        """Answer all that is open, in a few steps."""
        for _ in range(3):
            for tier in self.tiers:
                tier.answer()
            self.advance()
            self.step()

    def resident(self, *of_keys, by="seed"):
        """Fill the primary with idle blocks that no tier knows."""
        self.new(by, *of_keys)
        self.store(by, *of_keys)
        self.settle()
        self.finish(by)
        for tier in self.tiers:
            tier.log.clear()
            tier.have.clear()

    def order(self):
        """Numbers in the order of eviction, whether they may go or not."""
        return numbers(self.manager._policy.victims(lambda _: True))

    def slot(self, of_key):
        return self.manager.table.blocks[key(of_key)].slot

    def pins(self, *of_keys):
        return [self.manager.table.blocks[key(n)].pins for n in of_keys]

    def holds(self, *of_keys):
        return [key(n) in self.manager.table.blocks for n in of_keys]

    def tracked(self):
        """Requests of which anything is remembered."""
        return {*self.manager._requests, *self.manager._closing}

    def check_quiescent(self):
        """Nothing is open, every request has finished: no trace is left (INV-29)."""
        manager, table = self.manager, self.manager.table
        manager.check_integrity()
        assert not manager.has_pending_work()
        assert not self.tracked()
        assert not manager._desk.open
        assert not manager._request_level_tiers
        assert table.num_pending == table.num_quarantined == 0
        assert table.num_free + len(table.blocks) == table.num_slots
        assert all(block.pins == 0 for block in table.blocks.values())


def with_tier(num_slots, *numbers_in_tier, num_tiers=1, **settings):
    """A rig whose first tier has blocks."""
    rig = Rig(num_slots, num_tiers, **settings)
    rig.tiers[0].have.update(keys(*numbers_in_tier))
    return rig


def land(rig):
    """End the step; every tier does what it was told."""
    rig.step()
    for tier in rig.tiers:
        tier.answer()
    rig.advance()
