"""What the planner remembers: one request, and GPU blocks that nobody owns.

Covers: keys of complete blocks, how far a request may be stored, the fence of GPU
blocks that an open store still reads.
Does not cover: deciding (``planner``).
Who calls it: ``planner`` only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shmoffload.core.planner_types import NULL_GPU_BLOCK
from shmoffload.core.types import make_offload_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shmoffload.core.planner_types import (
        PlannerConfig,
        PlannerRequest,
        TransferJob,
    )
    from shmoffload.core.types import (
        OffloadKey,
        ReqContext,
        RequestOffloadingContext,
    )


@dataclass(slots=True, eq=False)
class RequestOffloadState:
    """What the planner remembers of one request.

    Attributes:
        request: the scheduler's object.
        ctx: the one context that the manager sees.
        offloading: the manager's answer to the announcement.
        max_offload_tokens: blocks that end beyond it are not stored; None = no cap.
        max_load_tokens: blocks that end beyond it are not loaded; None = no cap.
        keys: of complete blocks; appended as hashes appear, never changed.
        gpu_block_ids: the request's GPU block table.
        next_store_idx: first block that was not offered with success.
        local_tokens: tokens that the GPU itself had at the last match.
        jobs: open transfers; one load or any number of stores.
        aborted: ended early; only computed tokens count.
        finish_told: the manager has heard the finish.
    """

    request: PlannerRequest
    ctx: ReqContext
    offloading: RequestOffloadingContext
    max_offload_tokens: int | None = None
    max_load_tokens: int | None = None
    keys: list[OffloadKey] = field(default_factory=list)
    gpu_block_ids: list[int] = field(default_factory=list)
    next_store_idx: int = 0
    local_tokens: int = 0
    jobs: dict[int, TransferJob] = field(default_factory=dict)
    aborted: bool = False
    finish_told: bool = False

    @property
    def is_loading(self) -> bool:
        """Whether a load is open."""
        return any(job.is_load for job in self.jobs.values())

    def extend_keys(self, config: PlannerConfig) -> None:
        """Name the blocks that became complete since the last call.

        A block has the key of its last GPU block's hash. Its position goes to the
        context before the manager sees the key.
        """
        per_block = config.gpu_blocks_per_block
        hashes = self.request.block_hashes
        for i in range(len(self.keys), len(hashes) // per_block):
            key = make_offload_key(hashes[(i + 1) * per_block - 1])
            self.keys.append(key)
            self.ctx.key_positions[key] = (i + 1) * config.tokens_per_block

    def load_end(self, config: PlannerConfig) -> int:
        """Return the number of leading blocks that may be loaded."""
        self.extend_keys(config)
        end = len(self.keys)
        if config.window_blocks is not None:
            # The last prompt token is computed, so its window ends before it.
            end = min(end, (self.request.num_tokens - 1) // config.tokens_per_block)
        if self.max_load_tokens is None:
            return end
        return min(end, self.max_load_tokens // config.tokens_per_block)

    def blank_reused(self, allocated: Mapping[int, RequestOffloadState | None]) -> None:
        """Strike unstored GPU blocks that have just got another use.

        A sliding window lets go of blocks while its request runs; what was not
        stored by then has been overwritten.

        Args:
            allocated: GPU block -> who has just got it.
        """
        table = self.gpu_block_ids
        mine: set[int] = set()  # seen from the end: only the last is the new one
        for i in range(len(table) - 1, -1, -1):
            block_id = table[i]
            if block_id not in allocated:
                continue
            if allocated[block_id] is self and block_id not in mine:
                mine.add(block_id)
            else:
                table[i] = NULL_GPU_BLOCK

    def store_end(self, config: PlannerConfig, known_tokens: int) -> int:
        """Return the number of leading blocks that may be stored by now."""
        limit = min(known_tokens, self.request.num_tokens)
        if config.offload_prompt_only:
            limit = min(limit, self.request.num_prompt_tokens)
        if self.max_offload_tokens is not None:
            limit = min(limit, self.max_offload_tokens)
        end = min(
            limit // config.tokens_per_block,
            len(self.gpu_block_ids) // config.gpu_blocks_per_block,
        )
        if end > len(self.keys):
            self.extend_keys(config)
        return min(end, len(self.keys))

    def final_tokens(self) -> int:
        """Return the tokens that may be stored of an ended request.

        The last sampled token was never computed.
        """
        if self.aborted:
            return self.request.num_computed_tokens
        return max(self.request.num_prompt_tokens, self.request.num_tokens - 1)


class GpuBlockFence:
    """Open stores by the GPU blocks that they read and nobody owns any more.

    A request's GPU blocks are free from its end on. Is one allocated again before
    the copy was made, the copy has to come first: the job goes on the flush list.
    """

    def __init__(self) -> None:
        self._jobs: dict[int, set[int]] = {}

    def add(self, job: TransferJob) -> None:
        """Fence the source of a store; adding twice is fine."""
        for block_id in job.gpu_block_ids:
            self._jobs.setdefault(block_id, set()).add(job.job_id)

    def remove(self, job: TransferJob) -> None:
        """Forget a store that was copied; it need not be fenced."""
        for block_id in job.gpu_block_ids:
            jobs = self._jobs.get(block_id)
            if jobs is not None:
                jobs.discard(job.job_id)
                if not jobs:
                    del self._jobs[block_id]

    def jobs_on(self, block_ids: Iterable[int]) -> set[int]:
        """Return the stores that read any of these GPU blocks."""
        if not self._jobs:
            return set()
        return {i for block in block_ids for i in self._jobs.get(block, ())}
