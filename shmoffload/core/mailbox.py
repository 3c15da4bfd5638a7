"""The core's side of a tier that lives in a worker process.

Covers: what the worker holds, its open jobs, its epochs, its credits.
Does not cover: sockets and processes (``engine``), what blocks mean (``manager``).
Who calls it: the manager as a tier; the engine puts replies in by ``feed`` and
sends what ``take_outbox`` returns. One thread, nothing blocks.

    down -- TierUp --> up -- TierDown --> down
    Residency of a new epoch may come before its TierUp, as it does.

Open jobs outlive a TierDown: until the worker's death is proven it may still
touch their slots.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shmoffload.core.interfaces import SecondaryTierManager
from shmoffload.core.tier_events import TierLog
from shmoffload.core.types import (
    AnnounceRequest,
    FinishRequest,
    JobMetadata,
    JobReply,
    JobResult,
    LookupResult,
    OffloadPolicy,
    RequestIncomplete,
    RequestOffloadingContext,
    Residency,
    TierDown,
    TierUp,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from shmoffload.core.events import OffloadingEvent
    from shmoffload.core.types import (
        OffloadKey,
        ReqContext,
        TierInput,
        TierOutput,
    )

_HIT = LookupResult.HIT
_MISS = LookupResult.MISS


class MailboxTier(SecondaryTierManager):
    """One worker's tier over all the worker's lives.

    Args:
        name: for people.
        policy: what the tier gets of a request; None = what its worker says.
        credit_bytes: bound of the bytes in cascades that are not answered.
        block_bytes: bytes that one block counts for.
        engine_epoch: replies to another engine's jobs do not count.
        max_outbox: messages that may wait for ``take_outbox``.
        events: keep what ``take_events`` returns.

    Attributes:
        is_up: the worker is there and has told all that it holds.
        worker_epoch: its incarnation; 0 before the first.
        capacity_bytes: bound of the tier, 0 = unbounded or not known.
        open_store_bytes: bytes in cascades that are not answered.
        open_load_blocks: blocks in promotions that are not answered.
        num_open_loads: those promotions.
        late_replies: answers to nothing that is open.
        bad_replies: answers with positions that their job does not have.
        jobs_refused: jobs failed at once: the tier was down or its outbox full.
        jobs_failed: jobs answered with blocks that failed.
        jobs_lost: jobs whose worker died.
        notices_dropped: notices of missing keys that found the outbox full.
        last_error: the worker's words for its latest failure.
    """

    def __init__(
        self,
        name: str,
        *,
        policy: OffloadPolicy | None,
        credit_bytes: int,
        block_bytes: int,
        engine_epoch: int,
        max_outbox: int,
        events: bool = False,
    ) -> None:
        super().__init__(name)
        self.is_up = False
        self.worker_epoch = 0
        self.capacity_bytes = 0
        self.open_store_bytes = 0
        self.open_load_blocks = 0
        self.num_open_loads = 0
        self.late_replies = 0
        self.bad_replies = 0
        self.jobs_refused = 0
        self.jobs_failed = 0
        self.jobs_lost = 0
        self.notices_dropped = 0
        self.last_error = ""
        self._has_policy = policy is not None
        self._policy = policy or OffloadPolicy.BLOCK_LEVEL
        self._answer = RequestOffloadingContext(self._policy)
        self._credit_bytes = credit_bytes
        self._block_bytes = block_bytes
        self._engine_epoch = engine_epoch
        self._max_outbox = max_outbox
        self._is_gone = False  # the worker of ``worker_epoch``: it never comes back
        self._resident: set[OffloadKey] = set()  # empty while down
        self._log = TierLog() if events else None
        self._told: set[OffloadKey] = set()  # by a worker that is not up yet
        self._open: dict[int, tuple[int, JobMetadata]] = {}  # worker epoch, job
        self._outbox: list[TierOutput] = []
        self._announced: set[str] = set()  # on this worker's channel
        self._finished_jobs: list[JobResult] = []

    @property
    def num_resident(self) -> int:
        """Keys that the tier is known to hold now."""
        return len(self._resident)

    @property
    def num_open_jobs(self) -> int:
        """Jobs that are not answered."""
        return len(self._open)

    # The manager's side -------------------------------------------------------

    def on_new_request(self, ctx: ReqContext) -> RequestOffloadingContext:
        """Answer the configured policy; the worker hears of it with a first job."""
        return self._answer

    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        """Answer from the resident set, which is empty while the tier is down."""
        return _HIT if key in self._resident else _MISS

    def submit_store(self, job: JobMetadata) -> None:
        """Put a cascade into the outbox, or fail it at once."""
        if self._submit(job):
            self.open_store_bytes += len(job.keys) * self._block_bytes

    def submit_load(self, job: JobMetadata) -> None:
        """Put a promotion into the outbox, or fail it at once."""
        if self._submit(job):
            self.num_open_loads += 1
            self.open_load_blocks += len(job.keys)

    def get_finished_jobs(self) -> list[JobResult]:
        """Return what ``feed`` has answered since the last call."""
        if not self._finished_jobs:
            return []
        finished, self._finished_jobs = self._finished_jobs, []
        return finished

    def on_request_incomplete(
        self, ctx: ReqContext, keys: Sequence[OffloadKey]
    ) -> None:
        """Tell the worker, be it as the first word; not if the tier is down."""
        if ctx.req_id not in self._announced:
            if not self._has_room(3):  # with the announcement and the finish
                self.notices_dropped += self.is_up
                return
            self._announce(ctx)
        self._outbox.append(RequestIncomplete(ctx.req_id, keys))

    def on_request_finished(self, ctx: ReqContext) -> None:
        """Tell the worker, if it has ever heard of the request."""
        if ctx.req_id in self._announced:
            self._announced.discard(ctx.req_id)
            self._outbox.append(FinishRequest(ctx.req_id))

    def take_events(self) -> list[OffloadingEvent]:
        """Return what came and went, a piece at a time; see ``TierLog``."""
        return [] if self._log is None else self._log.take()

    def on_mirrors_cleared(self) -> None:
        """Tell of everything anew: a reset of the primary is none of the tier."""
        if self._log is not None:
            self._log.restart(self._resident)

    def admits(self, num_blocks: int) -> bool:
        """Say whether the tier is up and has credit for a cascade."""
        return self.room_for(num_blocks) == num_blocks

    def room_for(self, num_blocks: int) -> int:
        """Return how many blocks have credit; 0 while the tier is down."""
        if not self._has_room(2):  # a job may bring its request's announcement
            return 0
        left = (self._credit_bytes - self.open_store_bytes) // self._block_bytes
        return num_blocks if left >= num_blocks else max(0, left)

    def withdraw(
        self, num_blocks: int, ctx: ReqContext
    ) -> Sequence[tuple[int, Collection[OffloadKey]]]:
        """Take ends off the unsent cascades of longer requests, the longest first.

        Of one request the youngest cascade first: it has the last blocks.
        """
        length = len(ctx.key_positions)
        if not self._has_room(2):
            return ()
        over = {o.req_id for o in self._outbox if isinstance(o, FinishRequest)}
        longer = [
            (len(item.req_context.key_positions), item.job_id, idx)
            for idx, item in enumerate(self._outbox)
            if isinstance(item, JobMetadata) and not item.is_promotion
            if len(item.req_context.key_positions) > length
            and item.req_context.req_id not in over
        ]
        taken: list[tuple[int, Collection[OffloadKey]]] = []
        emptied: set[int] = set()
        for _, job_id, idx in sorted(longer, reverse=True):
            if num_blocks <= 0:
                break
            keys = self._shorten(idx, num_blocks)
            taken.append((job_id, keys))
            num_blocks -= len(keys)
            if job_id not in self._open:
                emptied.add(idx)
        if emptied:
            rest = [item for i, item in enumerate(self._outbox) if i not in emptied]
            self._outbox = rest
        return taken

    def _shorten(self, idx: int, num_keys: int) -> set[OffloadKey]:
        """Take the last keys of an unsent cascade off it, by position."""
        job = self._outbox[idx]
        assert isinstance(job, JobMetadata)
        positions = job.req_context.key_positions
        in_order = sorted(
            range(len(job.keys)), key=lambda i: positions.get(job.keys[i], 0)
        )
        kept = sorted(in_order[: max(0, len(job.keys) - num_keys)])
        gone = {job.keys[i] for i in in_order[len(kept) :]}
        self.open_store_bytes -= len(gone) * self._block_bytes
        if kept:
            rest = [job.keys[i] for i in kept]
            shorter = replace(job, keys=rest, slots=job.slots[kept])
            self._outbox[idx] = shorter
            self._open[job.job_id] = (self.worker_epoch, shorter)
        else:
            del self._open[job.job_id]
        return gone

    def shutdown(self) -> None:
        """Answer MISS and send nothing more; workers are the engine's to stop."""
        self._go_down()

    # The edge's side ----------------------------------------------------------

    def feed(self, inputs: Iterable[TierInput]) -> None:
        """Put in what has been received, in order."""
        for item in inputs:
            if isinstance(item, JobReply):
                self._on_reply(item)
            elif isinstance(item, Residency):
                self._on_residency(item)
            elif isinstance(item, TierUp):
                self._on_up(item)
            else:
                self._on_down(item)

    def take_outbox(self) -> list[TierOutput]:
        """Return what is to be sent to the worker of ``worker_epoch``, in order."""
        if not self._outbox:
            return []
        outbox, self._outbox = self._outbox, []
        return outbox

    def _has_room(self, num_messages: int) -> bool:
        return self.is_up and len(self._outbox) + num_messages <= self._max_outbox

    def _submit(self, job: JobMetadata) -> bool:
        req_id = job.req_context.req_id
        is_new = req_id not in self._announced
        if not self._has_room(2 if is_new else 1):
            self.jobs_refused += 1
            self._finished_jobs.append(JobResult(job.job_id, success=False))
            return False
        if is_new:
            self._announce(job.req_context)
        self._open[job.job_id] = (self.worker_epoch, job)
        self._outbox.append(job)
        return True

    def _announce(self, ctx: ReqContext) -> None:
        levels = ctx.tier_levels or {}
        level = levels.get(self.name, self._policy)
        self._announced.add(ctx.req_id)
        self._outbox.append(AnnounceRequest(ctx.req_id, level))

    def _on_reply(self, reply: JobReply) -> None:
        epoch, job = self._open.get(reply.job_id, (-1, None))
        if (
            job is None
            or reply.engine_epoch != self._engine_epoch
            or reply.worker_epoch != epoch
        ):
            self.late_replies += 1
            return
        failed = set(reply.failed_idx)
        if failed and not failed <= set(range(len(job.keys))):
            self.bad_replies += 1
            failed = set(range(len(job.keys)))
        self.jobs_failed += bool(failed)
        if reply.error:
            self.last_error = reply.error
        self._close(job)
        good = [key for idx, key in enumerate(job.keys) if idx not in failed]
        if self.is_up and epoch == self.worker_epoch:
            if job.is_promotion:
                # F21: what could not be read is not held, whatever was said.
                self._resident.difference_update(set(job.keys).difference(good))
            else:
                self._resident.update(good)
            # Last: a key that this very job pushed out again is not held.
            self._resident.difference_update(reply.removed)
            if self._log is not None:
                self._log.note([*job.keys, *reply.removed], self._resident)
        result = JobResult(
            job.job_id,
            success=not failed,
            successful_keys=good if failed else None,
        )
        self._finished_jobs.append(result)

    def _on_residency(self, item: Residency) -> None:
        if not self._is_current(item.worker_epoch):
            return
        keys = self._resident if self.is_up else self._told
        keys.update(item.added)
        keys.difference_update(item.removed)
        if self._log is not None and self.is_up:
            self._log.note([*item.added, *item.removed], keys)

    def _on_up(self, item: TierUp) -> None:
        if not self._is_current(item.worker_epoch) or self.is_up:
            return
        self.is_up = True
        self.capacity_bytes = item.capacity_bytes
        if not self._has_policy:
            self._policy = item.policy
            self._answer = RequestOffloadingContext(item.policy)
        self._resident, self._told = self._told, set()
        if self._log is not None:
            self._log.replace(self._resident)

    def _on_down(self, item: TierDown) -> None:
        if item.worker_epoch >= self.worker_epoch:
            self.worker_epoch = item.worker_epoch
            self._is_gone = True
            self._go_down()
        if not item.dead:
            return
        # Workers of one tier never overlap: with this one the earlier are dead.
        for epoch, job in list(self._open.values()):
            if epoch <= item.worker_epoch:
                self._close(job)
                self.jobs_lost += 1
                self._finished_jobs.append(JobResult(job.job_id, success=False))

    def _is_current(self, worker_epoch: int) -> bool:
        """Say whether the speaker is the live worker; a newer one takes over."""
        if worker_epoch > self.worker_epoch:
            self._go_down()
            self.worker_epoch = worker_epoch
            self._is_gone = False
        if worker_epoch == self.worker_epoch and not self._is_gone:
            return True
        self.late_replies += 1
        return False

    def _go_down(self) -> None:
        self.is_up = False
        self._resident = set()
        self._told = set()
        self._announced.clear()  # the next channel has heard of nobody
        self._outbox.clear()  # its jobs stay open until the death is proven
        if self._log is not None:
            self._log.replace(self._resident)

    def _close(self, job: JobMetadata) -> None:
        del self._open[job.job_id]
        if job.is_promotion:
            self.num_open_loads -= 1
            self.open_load_blocks -= len(job.keys)
        else:
            self.open_store_bytes -= len(job.keys) * self._block_bytes
