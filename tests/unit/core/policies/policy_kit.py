"""Small words for tests of policies.

Covers: keys by number, contexts with positions, a manager without tiers, a tier that
holds keys and answers at the next poll.
Does not cover: recorded traces (``drive``).
Who calls it: tests of policies.
"""

from shmoffload.core.interfaces import SecondaryTierManager
from shmoffload.core.manager import TieringOffloadingManager
from shmoffload.core.policies.registry import make_policy
from shmoffload.core.types import (
    JobResult,
    LookupResult,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    make_offload_key,
)

STEP = ScheduleEndContext()


def key(number):
    return make_offload_key(b"block-%06d" % number)


def keys(*of_numbers):
    return [key(number) for number in of_numbers]


def numbers(of_keys):
    return [int(k[6:12]) for k in of_keys]


def ctx_of(req_id, *of_numbers):
    """Return a context in which the numbers are the prompt, heads first."""
    places = {key(n): (i + 1) * 16 for i, n in enumerate(of_numbers)}
    return ReqContext(req_id, key_positions=places)


def in_order(policy):
    return numbers(policy.victims(lambda _: True))


class HeldTier(SecondaryTierManager):
    """Has keys, reads them on demand; counts the rounds and the blocks read."""

    def __init__(self, held=(), policy=OffloadPolicy.BLOCK_LEVEL):
        super().__init__("held")
        self.held = set(held)
        self.policy = policy
        self.done = []
        self.blocks_read = 0
        self.stored = []

    def on_new_request(self, ctx):
        return RequestOffloadingContext(self.policy)

    def lookup(self, k, ctx):
        return LookupResult.HIT if k in self.held else LookupResult.MISS

    def submit_store(self, job):
        self.stored += job.keys
        self.done.append(JobResult(job.job_id, success=True))

    def submit_load(self, job):
        self.blocks_read += len(job.keys)
        self.done.append(JobResult(job.job_id, success=True))

    def get_finished_jobs(self):
        done, self.done = self.done, []
        return done


class Desk:
    """A manager with a named policy, driven request by request."""

    def __init__(self, policy, num_slots, tiers=()):
        self.policy = make_policy(policy, num_slots)
        self.manager = TieringOffloadingManager(
            num_slots, tiers, block_bytes=1, policy=self.policy
        )
        self.contexts = {}
        self.now_s = 0.0

    def new(self, req_id, *of_numbers):
        ctx = self.contexts[req_id] = ctx_of(req_id, *of_numbers)
        self.manager.on_new_request(ctx)

    def offer(self, req_id, *of_numbers):
        """Return (granted, evicted) numbers, or None."""
        ctx = self.contexts[req_id]
        granted = self.manager.prepare_store(keys(*of_numbers), ctx)
        if granted is None:
            return None
        return numbers(granted.keys_to_store), numbers(granted.evicted_keys)

    def stored(self, req_id, *of_numbers, ok=True):
        self.manager.complete_store(keys(*of_numbers), self.contexts[req_id], ok)

    def store(self, req_id, *of_numbers):
        """Offer and complete; returns what was evicted."""
        granted, evicted = self.offer(req_id, *of_numbers)
        self.stored(req_id, *granted)
        return evicted

    def load(self, req_id, *of_numbers):
        ctx = self.contexts[req_id]
        self.manager.prepare_load(keys(*of_numbers), ctx)
        self.manager.complete_load(keys(*of_numbers), ctx)

    def finish(self, req_id):
        self.manager.on_request_finished(self.contexts.pop(req_id))

    def step(self):
        self.manager.on_schedule_end(STEP)
        self.now_s += 0.005
        self.manager.advance(self.now_s)

    def serve(self, req_id, *of_numbers):
        """A whole request, primary only; returns its prefix hits."""
        self.new(req_id, *of_numbers)
        ctx, num = self.contexts[req_id], 0
        for k in keys(*of_numbers):
            if self.manager.lookup(k, ctx) is not LookupResult.HIT:
                break
            num += 1
        if num:
            self.load(req_id, *of_numbers[:num])
        self.store(req_id, *of_numbers)
        self.finish(req_id)
        self.step()
        return num

    def holds(self, *of_numbers):
        return [key(n) in self.manager.table.blocks for n in of_numbers]
