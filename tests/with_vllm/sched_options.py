"""How a seed of the scheduler loop is set up, and what it showed.

Covers: options drawn from a seed, the configuration that they make, the report.
Does not cover: what happens in between (``sched_traffic``).
Who calls it: ``sched_traffic``, ``loop_kit``, the scheduler-loop tests.
"""

import dataclasses
import random
from collections import Counter
from dataclasses import dataclass, field

import sched_kv
from vllm.v1.kv_offload.base import OffloadingManager

from shmoffload.wire.layout import stride_of

LIMITS = {"restart_backoff_max_s": 1.0, "scan_hold_s": 2.0}
HAS_SYNC_LOADS = hasattr(OffloadingManager, "on_reset_flushed")
"""0.33: a load may be part of the step that needs it."""


CHUNKS = (1, 1, 2, 4)
CHUNKS_OF_GROUPS = CHUNKS if HAS_SYNC_LOADS else (1,)
"""0.32 stores a block of which the window has left the first GPU blocks, and loads
the whole of it: wrong bytes where there is a window and more than one GPU block."""


@dataclass(frozen=True)
class Options:
    """How one seed is set up; see ``draw``."""

    seed: int
    is_reset_running: bool
    is_grouped: bool
    blocks_per_chunk: int
    num_slots: int
    num_gpu_blocks: int
    tiers: tuple[str, ...]
    tier_bytes: int
    policy: str
    is_prompt_only: bool
    sync_load_bytes: int
    max_delay: int
    is_fifo: bool
    num_requests: int
    num_request_level: int
    reset_share: float
    is_cuda: bool = False
    """Copies as of a GPU (``sched_cuda``)."""
    num_ranks: int = 1

    @classmethod
    def draw(cls, seed, *, is_reset_running, is_grouped, num_requests, **fixed):
        """Draw the options of a seed, but for those that are ``fixed``."""
        rng = random.Random(f"options {seed}")
        num_gpu_blocks = rng.randint(90, 150) if is_grouped else rng.randint(32, 64)
        drawn = cls(
            seed=seed,
            is_reset_running=is_reset_running,
            is_grouped=is_grouped,
            blocks_per_chunk=rng.choice(CHUNKS_OF_GROUPS if is_grouped else CHUNKS),
            num_slots=rng.choice([4, 8, 16, 24, 32, 48, 64]) * (1 + 2 * is_grouped),
            num_gpu_blocks=num_gpu_blocks,
            tiers=rng.choice(
                [("slab",), ("fs",), ("memory",), ("slab", "fs"), ("memory", "slab")]
            ),
            tier_bytes=rng.choice([1 << 20, 1 << 26]),
            policy=rng.choice(["lru", "arc"]),
            is_prompt_only=rng.random() < 0.5,
            sync_load_bytes=rng.choice([0, 0, 1 << 16]) if HAS_SYNC_LOADS else 0,
            max_delay=rng.choice([0, 2, 6, 12]),
            is_fifo=rng.random() < 0.5,
            num_requests=num_requests,
            num_request_level=rng.choice([0, 2, 10]),
            reset_share=rng.choice([0.04, 0.04, 0.15]),
        )
        return dataclasses.replace(drawn, **fixed)

    @property
    def groups(self):
        """The KV groups of the model."""
        return sched_kv.THREE_GROUPS if self.is_grouped else sched_kv.PLAIN

    def extra_config(self, work_dir, session):
        """Return what a user writes into ``kv_connector_extra_config``."""
        num_rows = max(len(group.layers) for group in self.groups)
        payload = sched_kv.page_bytes() * num_rows * self.blocks_per_chunk
        payload *= self.num_ranks
        extra = {
            "spec_name": "ShmOffloadingSpec",
            "spec_module_path": "shmoffload.vllm.spec",
            "cpu_bytes_to_use": self.num_slots * stride_of(payload),
            "blocks_per_chunk": self.blocks_per_chunk,
            "eviction_policy": self.policy,
            "offload_prompt_only": self.is_prompt_only,
            "secondary_tiers": [self._tier(kind, work_dir) for kind in self.tiers],
            "shmoffload": {"session": session, "limits": LIMITS},
        }
        if self.sync_load_bytes:
            extra["sync_load_budget_bytes"] = self.sync_load_bytes
        return extra

    def _tier(self, kind, work_dir):
        tier = {"type": kind, "max_bytes": self.tier_bytes}
        return tier if kind == "memory" else tier | {"root_dir": str(work_dir / kind)}


@dataclass
class Report:
    """What one seed showed."""

    options: Options
    num_steps: int = 0
    num_sync_steps: int = 0
    num_aborts: int = 0
    num_preempted: int = 0
    num_resets: int = 0
    num_resets_refused: int = 0
    num_kills: int = 0
    num_stops: int = 0
    num_mismatches: int = 0
    num_wrong_outputs: int = 0
    num_unfinished: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    our_faults: list[str] = field(default_factory=list)
    vllm_faults: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    has_ended: bool = False
    seconds: float = 0.0

    @property
    def is_good(self):
        """Nothing of ours went wrong, whatever vLLM did."""
        return not (
            self.num_mismatches
            or self.num_wrong_outputs
            or self.num_unfinished
            or self.our_faults
        )

    def as_dict(self):
        return dataclasses.asdict(self)


def total(reports):
    """Add up reports: every ``num_*``, hits by source, faults of vLLM by place."""
    sums = Counter()
    for report in reports:
        for name, value in vars(report).items():
            if name.startswith("num_"):
                sums[name] += value
        sums["num_seeds"] += 1
        sums["num_ended"] += report.has_ended
        sums["num_with_hits"] += bool(report.hits)
        sums["num_our_faults"] += len(report.our_faults)
        for source, tokens in report.hits.items():
            sums[f"hits {source}"] += tokens
        for fault in report.vllm_faults:
            sums[f"vllm {fault}"] += 1
    return sums
