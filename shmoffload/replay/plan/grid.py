"""Every asked-for policy at every asked-for capacity.

Covers: reading what a person asks for, running the cells, their figures.
Does not cover: one run (``drive``, ``optimum``), printing (``report``, ``sweep``).
Who calls it: the command line and tests; one thread; seconds per cell.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

from shmoffload.core.types import OffloadPolicy, parse_admit
from shmoffload.engine.policies import load_policy
from shmoffload.errors import ConfigError
from shmoffload.replay.plan.drive import drive
from shmoffload.replay.plan.optimum import optimum
from shmoffload.replay.plan.virtual_tier import TierPlan
from shmoffload.replay.settings import BlockScale, tier_options
from shmoffload.wire.config import (
    BUILT_IN_POLICIES,
    MAX_TIERS,
    POLICY_GROUP,
    closest,
)
from shmoffload.wire.layout import stride_of
from shmoffload.worker.registry import tier_types

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shmoffload.replay.plan.models import BlockModel
    from shmoffload.replay.plan.optimum import Optimum
    from shmoffload.replay.plan.traffic import Traffic
    from shmoffload.replay.plan.virtual_tier import VirtualTier

MIN: Final = "min"
"""Not a policy: the offline optimum."""
_NUMBER: Final = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Grid:
    """What to run.

    Attributes:
        primaries: capacities as they were written, and in blocks.
        policies: names, ``min`` among them if wanted.
        tiers: behind every primary.
        model: what a block weighs.
    """

    primaries: Sequence[tuple[str, int]]
    policies: Sequence[str]
    tiers: Sequence[TierPlan]
    model: BlockModel

    @classmethod
    def parse(
        cls,
        *,
        primary: str,
        policies: str,
        tiers: Sequence[str],
        num_distinct: int,
        model: BlockModel,
    ) -> Grid:
        """Read amounts, names and tier specifications.

        Raises:
            ConfigError: one of them is none.
        """
        scale = BlockScale(num_distinct, model.block_bytes)
        return cls(
            primaries=[
                (text, scale.blocks(text, option="--primary"))
                for text in _amounts(primary)
            ],
            policies=_known_policies(policies),
            tiers=_tiers(tiers, scale),
            model=model,
        )


@dataclass(frozen=True, slots=True)
class TierFigures:
    """What a tier would do; field names are stable JSON keys.

    Attributes:
        name: of the tier.
        max_blocks: its capacity.
        blocks_written: writes.
        bytes_written: the same for the model.
        writes_per_distinct: writes by distinct blocks of the workload.
        blocks_promoted: reads.
        bytes_promoted: the same for the model.
        promoted_per_block: reads by blocks of all requests.
        blocks_evicted: pushed out.
        never_read_share: of the writes, what was never read.
    """

    name: str
    max_blocks: int
    blocks_written: int
    bytes_written: int
    writes_per_distinct: float
    blocks_promoted: int
    bytes_promoted: int
    promoted_per_block: float
    blocks_evicted: int
    never_read_share: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy at one capacity; field names are stable JSON keys.

    Attributes:
        policy: its name.
        primary: the capacity as it was written.
        primary_blocks: the capacity.
        primary_bytes: what it takes for the model.
        prefix_hits: leading blocks that need not be computed, from anywhere.
        prefix_hit_rate: by blocks of all requests.
        block_hits: blocks that were there, also behind a hole.
        optimum_hits: prefix hits of the offline optimum with the slots of primary
            and tiers together.
        of_optimum: the share of them that was reached.
        stores: blocks stored by the GPU.
        stored_bytes: the same for the model.
        stores_refused: offers without room.
        hits_by_source: prefix hits by where they were.
        tiers: what each tier would do.
    """

    policy: str
    primary: str
    primary_blocks: int
    primary_bytes: int
    prefix_hits: int
    prefix_hit_rate: float
    block_hits: int
    optimum_hits: int
    of_optimum: float
    stores: int
    stored_bytes: int
    stores_refused: int
    hits_by_source: dict[str, int]
    tiers: list[TierFigures]

    def to_json(self) -> dict[str, Any]:
        """Return the cell with its stable keys."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields["tiers"] = [
            {name: getattr(tier, name) for name in tier.__slots__}
            for tier in self.tiers
        ]
        return fields


def run_grid(traffic: Traffic, grid: Grid) -> Iterator[Cell]:
    """Yield the cells, capacity by capacity, policies in the order asked for."""
    behind = sum(tier.max_blocks for tier in grid.tiers)
    for text, num_slots in grid.primaries:
        best = optimum(traffic, num_slots + behind)
        for policy in grid.policies:
            yield _run_cell(traffic, grid, policy, (text, num_slots), best)


def _run_cell(
    traffic: Traffic, grid: Grid, policy: str, primary: tuple[str, int], best: Optimum
) -> Cell:
    text, num_slots = primary
    tiers: Sequence[VirtualTier] = ()
    prefix_hits, block_hits = best.prefix_hits, best.block_hits
    stores, refused, by_source = best.stores, 0, {}
    if policy != MIN:
        driven = drive(
            traffic,
            policy=load_policy(policy, num_slots),
            num_slots=num_slots,
            tiers=grid.tiers,
        )
        prefix_hits, block_hits = driven.prefix_hits, driven.block_hits
        stores, refused = driven.stores, driven.stores_refused
        by_source, tiers = driven.hits_by_source, driven.tiers
    block_bytes = grid.model.block_bytes
    return Cell(
        policy=policy,
        primary=text,
        primary_blocks=num_slots,
        primary_bytes=num_slots * stride_of(block_bytes),
        prefix_hits=prefix_hits,
        prefix_hit_rate=_share(prefix_hits, traffic.num_blocks),
        block_hits=block_hits,
        optimum_hits=best.prefix_hits,
        of_optimum=_share(prefix_hits, best.prefix_hits) if best.prefix_hits else 1.0,
        stores=stores,
        stored_bytes=stores * block_bytes,
        stores_refused=refused,
        hits_by_source=by_source,
        tiers=[_tier_figures(tier, traffic, block_bytes) for tier in tiers],
    )


def _tier_figures(tier: VirtualTier, traffic: Traffic, block_bytes: int) -> TierFigures:
    return TierFigures(
        name=tier.name,
        max_blocks=tier.plan.max_blocks,
        blocks_written=tier.num_written,
        bytes_written=tier.num_written * block_bytes,
        writes_per_distinct=_share(tier.num_written, traffic.num_distinct),
        blocks_promoted=tier.num_read,
        bytes_promoted=tier.num_read * block_bytes,
        promoted_per_block=_share(tier.num_read, traffic.num_blocks),
        blocks_evicted=tier.num_evicted,
        never_read_share=_share(tier.num_never_read, tier.num_written),
    )


def _share(part: int, whole: int) -> float:
    return round(part / max(1, whole), 6)


def _amounts(text: str) -> list[str]:
    """Split ``1%,5%``, or ``1,5,10%``: a last percent sign is everybody's."""
    amounts = [part.strip() for part in text.split(",")]
    if amounts[-1].endswith("%"):
        amounts = [f"{a}%" if _NUMBER.fullmatch(a) else a for a in amounts]
    return amounts


def _known_policies(text: str) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    known = (*BUILT_IN_POLICIES, *entry_points(group=POLICY_GROUP).names, MIN)
    for name in names:
        if name not in known:
            near = closest(name, known, "did you mean {}?", "known are {}")
            raise ConfigError(f'there is no eviction policy "{name}": {near}')
    return names


def _tiers(specs: Sequence[str], scale: BlockScale) -> list[TierPlan]:
    if len(specs) > MAX_TIERS:
        raise ConfigError(f"{len(specs)} tiers are too many: {MAX_TIERS} at most")
    plans: dict[str, TierPlan] = {}
    for spec in specs:
        options = tier_options(spec, scale)
        kind = options["type"]
        if kind not in (known := tier_types()):
            near = closest(kind, known, "did you mean {}?", "known are {}")
            raise ConfigError(f'--tier "{spec}": there is no type "{kind}": {near}')
        name = options.get("name", kind)
        if name in plans:
            raise ConfigError(
                f'--tier "{spec}": there is a tier {name} already: add ,name=OTHER'
            )
        # Without a bound it never has to forget.
        max_bytes = options.get("max_bytes")
        plans[name] = TierPlan(
            name,
            scale.num_distinct
            if max_bytes is None
            else max_bytes // stride_of(scale.block_bytes),
            OffloadPolicy(options.get("policy", OffloadPolicy.BLOCK_LEVEL)),
            parse_admit(options.get("admit", "all")),
        )
    return list(plans.values())
