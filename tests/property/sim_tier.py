"""A tier whose jobs move real bytes: late, in part, twice, or never.

Covers: contents, the order of words about each request, job ids, what a request
level tier has got of each request.
Does not cover: workers (``test_worker_machine``).
Who calls it: the manager's state machine.

Bytes move when a job is *answered*, so a slot that was handed out too early is
seen by its contents. What the manager calls must not raise, for it survives a tier
that does: a broken promise goes to ``faults``, by the name of its invariant, and
``audit`` raises it.
"""

from shmoffload.core.interfaces import SecondaryTierManager
from shmoffload.core.types import (
    JobResult,
    LookupResult,
    OffloadPolicy,
    RequestOffloadingContext,
)

HIT, MISS = LookupResult.HIT, LookupResult.MISS
GARBAGE = b"garbage"


class SimTier(SecondaryTierManager):
    """A tier with contents, whose jobs move bytes when they are answered.

    Attributes:
        memory: slot -> bytes, shared with the world.
        ids: every job id so far, shared by all tiers.
        held: key -> its bytes here.
        jobs: open and not answered; ``answered``: not collected yet.
        got: (request, key) pairs of store jobs that may still succeed or did.
        missing: request -> keys that we were told not to expect.
        offered: request -> keys that the world offered, for the last word.
        no_credit_for: requests that were alive while we had no credit, or were
            overdue: what follows a hole in them is not sent either.
    """

    def __init__(self, name, memory, policy, ids):
        super().__init__(name)
        self.memory, self.policy, self.ids = memory, policy, ids
        self.held, self.jobs, self.done = {}, {}, []
        self.answered = {}
        self.live, self.closed = set(), set()
        self.retry, self.credit, self.broken = False, True, False
        self.stores, self.loads = [], []
        self.got, self.missing, self.offered = {}, {}, {}
        self.no_credit_for = set()
        self.faults, self.lost = [], []

    def _promise(self, is_kept, text):
        if not is_kept:
            self.faults.append(text)

    def on_new_request(self, ctx):
        self._promise(
            ctx.req_id not in self.live | self.closed, "INV-26: announced twice"
        )
        self.live.add(ctx.req_id)
        if not self.credit:
            self.no_credit_for.add(ctx.req_id)
        return RequestOffloadingContext(self.policy)

    def on_request_incomplete(self, ctx, keys):
        self._promise(ctx.req_id in self.live, "INV-26: a word after the last word")
        self._promise(
            ctx.req_id not in self.missing, "INV-22: told twice what is missing"
        )
        self.missing[ctx.req_id] = set(keys)

    def on_request_finished(self, ctx):
        self._promise(ctx.req_id in self.live, "INV-26: finished, but not announced")
        self.live.remove(ctx.req_id)
        self.closed.add(ctx.req_id)
        if self.policy is OffloadPolicy.REQUEST_LEVEL:
            got = self.got.get(ctx.req_id, set())
            missing = self.missing.get(ctx.req_id, set())
            offered = self.offered.get(ctx.req_id, set())
            self._promise(
                got | missing == offered,
                f"INV-22: of {sorted(offered)} came {sorted(got)}, and "
                f"{sorted(missing)} were said to be missing",
            )
            self._promise(not got & missing, "INV-22: what came was said to be missing")

    def lookup(self, key, ctx):
        self._promise(ctx.req_id in self.live, "INV-26: a lookup after the last word")
        if self.retry:
            return LookupResult.RETRY
        return HIT if key in self.held else MISS

    def admits(self, num_blocks):
        return self.credit

    def take_credit(self, has_credit):
        self.credit = has_credit
        if not has_credit:
            self.no_credit_for |= self.live

    def submit_store(self, job):
        self._accept(job)
        self._promise(not job.is_promotion, "INV-17")
        if self.policy is OffloadPolicy.REQUEST_LEVEL:
            got = self.got.setdefault(job.req_context.req_id, set())
            self._promise(not got & set(job.keys), "INV-22: a key was sent twice")
            got.update(job.keys)
        self.stores.append(job)

    def submit_load(self, job):
        self._accept(job)
        self.loads.append(job)

    def _accept(self, job):
        self._promise(
            job.req_context.req_id in self.live, "INV-26: a job after the last word"
        )
        self._promise(
            not self.ids or job.job_id > self.ids[-1], "INV-16: ids must increase"
        )
        self.ids.append(job.job_id)
        self._promise(len(set(job.keys)) == len(job.keys) == len(job.slots), "INV-1")
        if self.broken:
            raise OSError(self.name)
        self.jobs[job.job_id] = job

    def get_finished_jobs(self):
        done, self.done = self.done, []
        self.answered.clear()
        for job in self.lost:  # from now on the manager knows
            self.got.get(job.req_context.req_id, set()).difference_update(job.keys)
        self.lost.clear()
        return done

    def answer(self, job_id, num_good):
        """Move the bytes of the first ``num_good`` keys; the rest fails."""
        job = self.answered[job_id] = self.jobs.pop(job_id)
        good = list(job.keys)[:num_good]
        for key, slot in zip(job.keys, job.slots.tolist(), strict=True):
            if job.is_promotion:
                self.memory[slot] = self.held[key] if key in good else GARBAGE
            elif key in good:
                assert self.memory[slot] == key, "INV-37: a cascade read other bytes"
                self.held[key] = key
        ok = len(good) == len(job.keys)
        if not ok and not job.is_promotion:
            self.lost.append(job)
        listed = good if job.is_promotion and not ok else None
        self.done.append(JobResult(job_id, ok, listed))

    def die(self):
        """Fail every open job; nothing of ours touches a slot any more."""
        for job_id in list(self.jobs):
            self.answer(job_id, 0)
