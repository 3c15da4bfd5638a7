"""What a connector scheduler and the planner tell each other.

Covers: the request as the planner sees it, a step's schedule, transfer jobs and
the metadata that the GPU side executes.
Does not cover: deciding (``planner``), copies (a GPU worker, or ``replay.gpu``).
Who calls it: the scheduler process; the structures are plain data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shmoffload.core.types import OffloadKey, SlotArray

NULL_GPU_BLOCK = 0
"""GPU block id that stands for "no block here" (vLLM's null block)."""


class PlannerRequest(Protocol):
    """A request as its scheduler keeps it; the planner only reads it.

    Counts are those before the step's tokens are added, as in vLLM's
    ``Request`` at the time of ``build_connector_meta``.
    """

    @property
    def req_id(self) -> str:
        """Unique among live requests."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output so far."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in GPU memory."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One hash per complete GPU block, prefix-dependent; only ever grows."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """The request's own words; see docs/requests.md."""

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Load nothing for this request; store as usual."""


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Geometry and switches of the planner.

    Attributes:
        tokens_per_gpu_block: tokens of the engine's own paged unit.
        gpu_blocks_per_block: GPU blocks in one offloaded block
            (``blocks_per_chunk`` in vLLM).
        offload_prompt_only: do not store decoded blocks (vLLM's default).
        gpu_prefix_cache: the engine shares GPU blocks between requests, so that
            waiting for another request's load beats loading twice.
        num_gpu_workers: reports after which a transfer counts as complete.
        window_blocks: the group attends to so many last blocks only; None = to all.
    """

    tokens_per_gpu_block: int
    gpu_blocks_per_block: int = 1
    offload_prompt_only: bool = True
    gpu_prefix_cache: bool = False
    num_gpu_workers: int = 1
    window_blocks: int | None = None

    @property
    def tokens_per_block(self) -> int:
        """Tokens of one offloaded block."""
        return self.tokens_per_gpu_block * self.gpu_blocks_per_block


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's schedule.

    Attributes:
        num_scheduled_tokens: request id -> tokens computed in this step.
        block_tables: whole GPU block tables of requests new or resumed in it.
        new_block_ids: GPU blocks added in it to running requests.
        new_req_ids: requests scheduled for the first time.
        preempted_req_ids: requests that lost their GPU blocks in it.
    """

    num_scheduled_tokens: Mapping[str, int] = field(default_factory=dict)
    block_tables: Mapping[str, Sequence[int]] = field(default_factory=dict)
    new_block_ids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    new_req_ids: Sequence[str] = ()
    preempted_req_ids: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class TransferJob:
    """One copy between GPU blocks and primary slots.

    Attributes:
        job_id: the planner's own, increasing; unrelated to ids of tier jobs.
        req_id: the request that it belongs to.
        is_load: True for slots -> GPU.
        keys: blocks, co-indexed with ``slots``.
        slots: int32 primary slots.
        gpu_block_ids: GPU blocks in order, a whole block's worth per key, except
            that the first key's first ``gpu_blocks_skipped`` are not listed.
        gpu_blocks_skipped: GPU blocks of the first key that are there already.
    """

    job_id: int
    req_id: str
    is_load: bool
    keys: Sequence[OffloadKey]
    slots: SlotArray
    gpu_block_ids: Sequence[int]
    gpu_blocks_skipped: int = 0


@dataclass(frozen=True, slots=True)
class ConnectorMetadata:
    """What the GPU side does for one step.

    Attributes:
        stores: hand to the copy engine at the start of the next step.
        loads: copy in this step, after ``jobs_to_flush``.
        jobs_to_flush: store jobs, of this step or before, whose GPU blocks are
            about to be overwritten: copy them before anything else.
    """

    stores: Sequence[TransferJob]
    loads: Sequence[TransferJob]
    jobs_to_flush: frozenset[int]


@dataclass(slots=True)
class PlannerCounters:
    """What happened since the planner was made; plain integers.

    Attributes:
        matches: definite answers to a match query.
        deferred: match queries answered "ask again".
        stores_refused: offers that the manager refused.
        blocks_never_stored: blocks still refused when their request ended.
        bad_params: per-request parameters ignored for their type or range.
        unknown_requests: calls for requests that were not announced.
        unknown_completions: reports of jobs that are not open.
    """

    matches: int = 0
    deferred: int = 0
    stores_refused: int = 0
    blocks_never_stored: int = 0
    bad_params: int = 0
    unknown_requests: int = 0
    unknown_completions: int = 0
