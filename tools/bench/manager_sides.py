"""The two managers of `manager.py`, built alike and driven alike.

Covers: our manager before one idle worker's mailbox, vLLM's before one idle tier in
the same process; filling them, the untimed half of a step.
Does not cover: what is measured (``manager``).
Who calls it: ``tools/bench/manager.py``. vLLM is imported only by ``VllmSide``.
"""

from __future__ import annotations

import importlib
import os
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from shmoffload.core.interfaces import SecondaryTierManager
from shmoffload.core.mailbox import MailboxTier
from shmoffload.core.manager import TieringOffloadingManager
from shmoffload.core.types import (
    JobMetadata,
    JobReply,
    LookupResult,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    Residency,
    ScheduleEndContext,
    TierUp,
    make_offload_key,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

BLOCK_TOKENS = 16
ROW_BYTES = 16  # no byte of a block is touched
NO_LIMIT = 1 << 60


def fresh_keys(num: int) -> list[OffloadKey]:
    """Return keys that nobody has seen, as long as vLLM's."""
    return [make_offload_key(os.urandom(32)) for _ in range(num)]


def copied(keys: Iterable[OffloadKey]) -> list[OffloadKey]:
    """Return equal keys whose hash is not cached yet, as a new request brings them."""
    return [OffloadKey(bytes(bytearray(key))) for key in keys]


class Side:
    """One manager and its tier.

    Attributes:
        manager: its public calls are what is timed.
        poll: called inside the timed part, before the calls; vLLM polls by itself.
    """

    name = ""
    manager: Any

    def poll(self) -> None:
        """Take the tier's answers."""

    def request(self, keys: Sequence[OffloadKey]) -> Any:  # noqa: ANN401
        """Announce a new request that will name these keys."""
        raise NotImplementedError

    def answer(self) -> None:
        """Let the tier answer every job, well."""
        raise NotImplementedError

    def hold(self, keys: Iterable[OffloadKey]) -> None:
        """Let the tier have keys."""
        raise NotImplementedError

    def release(self, keys: Iterable[OffloadKey]) -> None:
        """Let the tier lose keys."""
        raise NotImplementedError

    def resident(self) -> Mapping[OffloadKey, object]:
        """Return the manager's own map of what the primary has."""
        raise NotImplementedError

    def end_step(self) -> None:
        """End the step."""
        raise NotImplementedError

    def fill(self, keys: Sequence[OffloadKey], batch: int) -> None:
        """Store keys, one request per batch, and let the tier answer."""
        for start in range(0, len(keys), batch):
            part = keys[start : start + batch]
            ctx = self.request(part)
            granted = self.manager.prepare_store(part, ctx)
            assert granted is not None
            self.manager.complete_store(granted.keys_to_store, ctx)
            self.answer()
            self.manager.on_request_finished(ctx)
            self.end_step()


class _RetryTier(SecondaryTierManager):
    """Knows nothing yet, ever."""

    def on_new_request(self, ctx: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        return LookupResult.RETRY

    def submit_store(self, job: JobMetadata) -> None:
        raise NotImplementedError

    def submit_load(self, job: JobMetadata) -> None:
        raise NotImplementedError

    def get_finished_jobs(self) -> list[Any]:
        return []

    def admits(self, num_blocks: int) -> bool:
        return False


class OurSide(Side):
    """Our manager; its tier is the mailbox of a worker that is up."""

    name = "ours"

    def __init__(self, num_slots: int, *, retry: bool = False) -> None:
        self._num_requests = 0
        self._box = MailboxTier(
            "idle",
            policy=OffloadPolicy.BLOCK_LEVEL,
            credit_bytes=NO_LIMIT,
            block_bytes=ROW_BYTES,
            engine_epoch=1,
            max_outbox=1 << 20,
        )
        self._box.feed([TierUp(worker_epoch=1)])
        tier = _RetryTier("unknown") if retry else self._box
        self.manager = TieringOffloadingManager(
            num_slots, [tier], block_bytes=ROW_BYTES
        )

    def poll(self) -> None:
        """Advance the manager; time stands still."""
        self.manager.advance(0.0)

    def request(self, keys: Sequence[OffloadKey]) -> ReqContext:
        """Announce a request; the planner fills in the positions."""
        self._num_requests += 1
        ctx = ReqContext(f"r{self._num_requests}")
        for idx, key in enumerate(keys):
            ctx.key_positions[key] = (idx + 1) * BLOCK_TOKENS
        self.manager.on_new_request(ctx)
        return ctx

    def answer(self) -> None:
        """Feed a good reply for each job in the outbox."""
        jobs = [m for m in self._box.take_outbox() if isinstance(m, JobMetadata)]
        self._box.feed(
            JobReply(engine_epoch=1, worker_epoch=1, job_id=job.job_id) for job in jobs
        )
        self.manager.advance(0.0)
        # The set of what a tier holds must not grow with the run.
        self.release([key for job in jobs if not job.is_promotion for key in job.keys])

    def hold(self, keys: Iterable[OffloadKey]) -> None:
        """Tell of resident keys."""
        self._box.feed([Residency(worker_epoch=1, added=list(keys))])

    def release(self, keys: Iterable[OffloadKey]) -> None:
        """Tell of keys that have gone."""
        self._box.feed([Residency(worker_epoch=1, removed=list(keys))])

    def resident(self) -> Mapping[OffloadKey, object]:
        """Return the slot table's blocks."""
        return self.manager.table.blocks  # type: ignore[no-any-return]

    def end_step(self) -> None:
        """End the step."""
        self.manager.on_schedule_end(ScheduleEndContext())


class VllmSide(Side):
    """vLLM's manager; its tier keeps a set and a list of jobs."""

    name = "vllm"

    def __init__(self, num_slots: int, *, retry: bool = False) -> None:
        self._vllm = load_vllm()
        self._num_requests = 0
        base, tiering = self._vllm.base, self._vllm.manager
        rows = memoryview(bytearray(num_slots * ROW_BYTES)).cast(
            "B", [num_slots, ROW_BYTES]
        )
        region = SimpleNamespace(create_kv_memoryview=lambda: rows)
        primary = tiering.CPUPrimaryTierOffloadingManager(
            num_chunks=num_slots, mmap_region=region
        )
        self._jobs: list[Any] = []
        self._done: list[Any] = []
        self._have: set[OffloadKey] = set()
        tier = self._tier(base.LookupResult, rows, retry=retry)
        self.manager = tiering.TieringOffloadingManager(primary, [tier])
        self._step_end = base.ScheduleEndContext([], [])

    def _tier(self, answers: Any, rows: memoryview, *, retry: bool) -> Any:  # noqa: ANN401
        side, base = self, self._vllm.base
        hit, miss, unknown = answers.HIT, answers.MISS, answers.RETRY

        class Tier(self._vllm.tier.SecondaryTierManager):  # type: ignore[misc, name-defined]
            def on_new_request(self, ctx: Any) -> Any:  # noqa: ANN401
                return base.RequestOffloadingContext()

            def lookup(self, key: OffloadKey, ctx: Any) -> Any:  # noqa: ANN401
                if retry:
                    return unknown
                return hit if key in side._have else miss

            def submit_store(self, job: Any) -> None:  # noqa: ANN401
                if retry:
                    side._done.append(side._vllm.tier.JobResult(job.job_id, True))
                else:
                    side._jobs.append(job)

            def submit_load(self, job: Any) -> None:  # noqa: ANN401
                side._jobs.append(job)

            def get_finished_jobs(self) -> list[Any]:
                done, side._done = side._done, []
                return done

            def on_request_finished(self, ctx: Any) -> None:  # noqa: ANN401
                pass

            def drain_jobs(self) -> None:
                pass

        return Tier(SimpleNamespace(), rows, "idle")

    def request(self, keys: Sequence[OffloadKey]) -> Any:  # noqa: ANN401
        """Announce a request with the positions that the connector notes."""
        self._num_requests += 1
        ctx = self._vllm.base.ReqContext(f"r{self._num_requests}")
        for idx, key in enumerate(keys):
            ctx.set_offload_key_position(key, (idx + 1) * BLOCK_TOKENS)
        self.manager.on_new_request(ctx)
        return ctx

    def answer(self) -> None:
        """Finish each job and poll."""
        jobs, self._jobs = self._jobs, []
        self._done += [self._vllm.tier.JobResult(job.job_id, True) for job in jobs]
        self.end_step()  # polls, whatever this step has done before

    def hold(self, keys: Iterable[OffloadKey]) -> None:
        """Add to the tier's set."""
        self._have.update(keys)

    def release(self, keys: Iterable[OffloadKey]) -> None:
        """Take from the tier's set."""
        self._have.difference_update(keys)

    def resident(self) -> Mapping[OffloadKey, object]:
        """Return the policy's chunks."""
        policy = self.manager.primary_tier._policy  # noqa: SLF001
        return policy.chunks  # type: ignore[no-any-return]

    def end_step(self) -> None:
        """End the step and take the statistics, as the connector does."""
        self.manager.on_schedule_end(self._step_end)
        self.manager.get_stats()


def load_vllm() -> SimpleNamespace:
    """Import what is needed of vLLM.

    Raises:
        ModuleNotFoundError: it is not installed here.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SimpleNamespace(
            version=importlib.import_module("vllm").__version__,
            base=importlib.import_module("vllm.v1.kv_offload.base"),
            tier=importlib.import_module("vllm.v1.kv_offload.tiering.base"),
            manager=importlib.import_module("vllm.v1.kv_offload.tiering.manager"),
        )
