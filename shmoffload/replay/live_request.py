"""A request on its way through the simulated scheduler.

Covers: token counts, block table, state.
Does not cover: what happens to it (``live``).
Who calls it: ``live``, and the planner, which only reads it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shmoffload.replay.requests import ReplayRequest


class Stage(enum.Enum):
    """Where a request stands (vLLM's RequestStatus, as far as needed)."""

    WAITING = 0
    LOADING = 1
    """Waits for its load; vLLM says WAITING_FOR_REMOTE_KVS."""
    LOADED = 2
    RUNNING = 3


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request; fits ``core.planner_types.PlannerRequest``.

    Attributes:
        spec: as recorded.
        due_s: when it arrives, in seconds of the replay.
        num_to_decode: output tokens after which it ends.
        num_prompt_tokens: at least 1.
        num_tokens: prompt and output so far.
        num_computed_tokens: tokens whose KV is in GPU memory.
        stage: where it stands.
        table: its GPU blocks.
    """

    spec: ReplayRequest
    due_s: float
    num_to_decode: int
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_computed_tokens: int = 0
    stage: Stage = Stage.WAITING
    table: list[int] = field(default_factory=list)
    kv_transfer_params: Mapping[str, Any] | None = None
    skip_reading_prefix_cache: bool = False

    @classmethod
    def arriving(
        cls, spec: ReplayRequest, *, due_s: float, max_decode: int
    ) -> LiveRequest:
        """Return a recorded request as it arrives."""
        num_tokens = max(1, spec.num_input_tokens)
        return cls(
            spec,
            due_s,
            num_to_decode=max(1, min(spec.num_output_tokens, max_decode)),
            num_prompt_tokens=num_tokens,
            num_tokens=num_tokens,
        )

    @property
    def req_id(self) -> str:
        """Unique in its replay."""
        return self.spec.req_id

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Hashes of the prompt's full blocks."""
        return self.spec.hashes

    @property
    def is_done(self) -> bool:
        """Whether the last output token was sampled."""
        return self.num_tokens - self.num_prompt_tokens >= self.num_to_decode
