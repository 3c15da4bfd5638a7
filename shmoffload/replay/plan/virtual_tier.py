"""A secondary tier without bytes: a bounded LRU that answers at once.

Covers: which keys a tier would hold, what it would write and read.
Does not cover: bandwidth, failures, admission (the manager's).
Who calls it: the manager, on behalf of plan mode; one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from shmoffload.core.interfaces import SecondaryTierManager
from shmoffload.core.types import (
    JobMetadata,
    JobResult,
    LookupResult,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
)


@dataclass(frozen=True, slots=True)
class TierPlan:
    """A tier to simulate.

    Attributes:
        name: unique in a plan.
        max_blocks: its capacity.
        policy: which blocks of a request it wants.
        withheld: what it does not get at first store; see ``TierTraits``.
    """

    name: str
    max_blocks: int
    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL
    withheld: int = 0


class VirtualTier(SecondaryTierManager):
    """Answers each job before the manager asks next.

    Tails leave before heads: a job's keys come head first and are taken in from
    its end.

    Attributes:
        plan: what was asked for.
        num_written: blocks written; a key that is here is only touched.
        num_read: blocks promoted.
        num_evicted: blocks pushed out.
    """

    def __init__(self, plan: TierPlan) -> None:
        super().__init__(plan.name)
        self.plan = plan
        self.num_written = 0
        self.num_read = 0
        self.num_evicted = 0
        self._num_wasted = 0
        self._was_read: OrderedDict[OffloadKey, bool] = OrderedDict()
        self._done: list[JobResult] = []

    @property
    def num_never_read(self) -> int:
        """Writes that nobody has read before they were evicted, or until now."""
        return self._num_wasted + sum(not read for read in self._was_read.values())

    def __contains__(self, key: object) -> bool:
        return key in self._was_read

    def on_new_request(self, ctx: ReqContext) -> RequestOffloadingContext:
        """See ``SecondaryTierManager``."""
        return RequestOffloadingContext(self.plan.policy)

    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        """See ``SecondaryTierManager``."""
        return LookupResult.HIT if key in self._was_read else LookupResult.MISS

    def submit_store(self, job: JobMetadata) -> None:
        """Take the keys in."""
        for key in reversed(job.keys):
            if key in self._was_read:
                self._was_read.move_to_end(key)
                continue
            self._was_read[key] = False
            self.num_written += 1
        while len(self._was_read) > self.plan.max_blocks:
            _, was_read = self._was_read.popitem(last=False)
            self.num_evicted += 1
            self._num_wasted += not was_read
        self._done.append(JobResult(job.job_id, success=True))

    def submit_load(self, job: JobMetadata) -> None:
        """Give what is here; what was evicted since the lookup is a miss."""
        found = [key for key in reversed(job.keys) if key in self._was_read]
        for key in found:
            self._was_read[key] = True
            self._was_read.move_to_end(key)
        self.num_read += len(found)
        is_whole = len(found) == len(job.keys)
        self._done.append(
            JobResult(job.job_id, is_whole, None if is_whole else tuple(found))
        )

    def get_finished_jobs(self) -> list[JobResult]:
        """See ``SecondaryTierManager``."""
        done, self._done = self._done, []
        return done
