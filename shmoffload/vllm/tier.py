"""``ShmTier``: a secondary tier under vLLM's own ``TieringOffloadingSpec``.

Covers: vLLM's interface of a tier (``tiering/base.py``, 0.32 and 0.33), its types,
letting no exception out.
Does not cover: the jobs (``staging.jobs``), the options (``staging.options``).
Who calls it: vLLM's tiering manager in the scheduler process, its main thread, after
``secondary_tiers: [{"type": "ShmTier", "module_path": "shmoffload.vllm.tier",
"tier": "slab", "path": ...}]``.

The trial without risk: vLLM keeps its manager, its memory and its GPU copies; only
the tier's I/O runs in a process of its own, which may hang, die and come back. It
costs one more copy of each block than ``ShmOffloadingSpec``: vLLM's rows have no
room for a block header, and its memory cannot be mapped reliably from outside.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, Final, ParamSpec, TypeVar

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import (
    JobResult,
    SecondaryTierManager,
    TransferJob,
)

from shmoffload.core.types import OffloadPolicy
from shmoffload.engine import Engine
from shmoffload.vllm import release
from shmoffload.vllm.staging.jobs import RowJobs
from shmoffload.vllm.staging.options import read_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.kv_offload.base import OffloadingSpec

    from shmoffload.core.types import OffloadKey
    from shmoffload.vllm.staging.job_types import Outcome

log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")

_TELLS_BYTES: Final = "transfer_bytes" in {field.name for field in fields(JobResult)}


class ShmTier(SecondaryTierManager):
    """Keeps vLLM's blocks in a tier of ours, served by a process of its own.

    Nothing here waits but the constructor, ``drain_jobs`` (for copies alone) and
    ``shutdown``. Nothing raises but the constructor. Should our own code fail, it is
    logged once, open jobs fail and everything is a miss from then on.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: object | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """Start the engine and its worker; waits until the tier is open.

        Args:
            offloading_spec: vLLM's spec; its configuration names what changes bytes.
            primary_kv_view: vLLM's primary, one row a block.
            tier_type: vLLM's name for this tier.
            backpressure_detector: vLLM's; it works as with any tier.
            options: see ``staging.options``.

        Raises:
            BadInputError: an option or the storage cannot work; a sentence says why.
            StartError: a process could not be started in time.
        """
        more = {}
        if backpressure_detector is not None:  # not known to every version
            more["backpressure_detector"] = backpressure_detector
        super().__init__(offloading_spec, primary_kv_view, tier_type, **more)
        release.share_log_handlers()
        release.warn_if_untested()
        config, notes = read_options(
            options,
            offloading_spec.config,
            row_bytes=self.block_size_bytes,
            is_replicated=offloading_spec.replicated_layout,
            engine=release.engine_text(),
        )
        for note in notes:
            log.warning("%s", note)
        (tier,) = config.tier
        medium = tier.medium or ("CPU" if tier.type == "memory" else "STORAGE")
        self.locality = Locality(tier.locality or "LOCAL")
        if Medium(medium) is not self.medium:
            self._be_in_host_memory()
        engine = Engine(config)
        try:
            self._jobs = RowJobs(engine, primary_kv_view)
        except BaseException:
            engine.close()
            raise

    def _be_in_host_memory(self) -> None:
        """Say so to filters and to the figures of where hits came from."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        self.medium = Medium.CPU  # type: ignore[misc]  # of this object
        self.cache_hit_source = CacheHitSource.HOST

    # Requests -----------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Answer what the tier wants of the request."""
        # vLLM's own dict, which it fills as it goes; 0.31 and later have it.
        positions = getattr(req_context, "_offload_key_positions", {})
        wanted = self._try(
            self._jobs.announce,
            req_context.req_id,
            req_context.kv_transfer_params,
            positions,
        )
        is_whole = wanted is OffloadPolicy.REQUEST_LEVEL
        return RequestOffloadingContext(
            release.offload_policy(is_request_level=is_whole)
        )

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the request; its jobs go on."""
        self._try(self._jobs.finish, req_context.req_id)

    # Lookups and jobs -----------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Answer from memory: HIT or MISS, never RETRY. Starts nothing."""
        if self._try(self._jobs.holds, key):
            return LookupResult.HIT
        return LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Start to copy rows out; the job fails at once if there is no room."""
        job, req_id = job_metadata, job_metadata.req_context.req_id
        self._try(self._jobs.store, job.job_id, req_id, job.keys, job.chunk_ids)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Take in a load; this step's ``on_schedule_end`` begins it."""
        job = job_metadata
        self._try(self._jobs.load, job.job_id, job.keys, job.chunk_ids)

    def get_finished_jobs(self) -> list[JobResult]:
        """Return what has ended since the last call, each job once."""
        self._try(self._jobs.begin_step)
        return [self._result(outcome) for outcome in self._jobs.take_outcomes()]

    def _result(self, outcome: Outcome) -> JobResult:
        result = JobResult(
            outcome.job_id,
            outcome.success,
            successful_keys=None if outcome.success else outcome.loaded,
            transfer_time=outcome.time_s,
        )
        if _TELLS_BYTES:
            result.transfer_bytes = outcome.num_bytes
        return result

    # Steps ----------------------------------------------------------------------

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Have loads promoted."""
        self._try(self._jobs.end_step)

    def has_pending_work(self) -> bool:
        """Say whether a load needs steps; stores never do."""
        return self._jobs.has_loads

    def drain_jobs(self) -> None:
        """End every job; queued loads fail. Waits for running copies alone."""
        self._try(self._jobs.drain)

    def shutdown(self) -> None:
        """Touch vLLM's memory no more, and end the worker. Waits, bounded."""
        try:
            self._jobs.close()
        except Exception:
            # Not by ``_try``, which would end jobs once more with what just failed.
            log.critical("ShmTier failed at its shutdown", exc_info=True)

    def _try(
        self, call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
    ) -> _R | None:
        """Call; None if it fails, now or before. An exception ends the server."""
        try:
            return call(*args, **kwargs)
        except Exception:
            if not self._jobs.is_off:
                log.critical(
                    "ShmTier failed in %s and is off: everything is a miss from here",
                    call.__name__,
                    exc_info=True,
                )
                self._jobs.switch_off()
        return None
