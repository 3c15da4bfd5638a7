"""What ``replay --plan``, ``sweep`` and ``stats`` have in common.

Covers: reading the part of a trace that is asked for, running and showing a plan.
Does not cover: options (the verbs), figures (``replay.plan``).
Who calls it: the verbs; the main thread.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.console import Console

from shmoffload.errors import BadInputError
from shmoffload.replay.plan.grid import Grid, run_grid
from shmoffload.replay.plan.models import DEFAULT_MODEL, model_of
from shmoffload.replay.plan.report import PlanReport
from shmoffload.replay.plan.traffic import Traffic
from shmoffload.replay.traces import Window, read_trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shmoffload.replay.requests import Workload


def read_workload(
    trace: Path, window: str = "", limit: int = 0, block_tokens: int = 512
) -> Workload:
    """Read the first ``limit`` requests of a window; 0 = all of it.

    Raises:
        BadInputError: no such trace, window, limit or block.
    """
    if block_tokens < 1:
        raise BadInputError(f"--block-tokens {block_tokens}: give 1 or more")
    if limit < 0:
        raise BadInputError(f"--limit {limit}: give the number of requests, 0 = all")
    return read_trace(
        trace,
        block_tokens=block_tokens,
        window=Window.parse(window),
        limit=limit or None,
    )


def make_plan(
    workload: Workload,
    primary: str,
    policies: str,
    tiers: Sequence[str] = (),
    model: str = DEFAULT_MODEL,
    described: dict[str, Any] | None = None,
) -> PlanReport:
    """Run every cell; a terminal sees how many are done.

    Args:
        workload: what to replay.
        primary: capacities like ``1%,5%``.
        policies: names like ``lru,min``.
        tiers: specifications as for ``--tier``.
        model: what a block weighs.
        described: settings that the report repeats.

    Raises:
        BadInputError: an amount, a policy, a tier or a model is none.
    """
    traffic = Traffic.of(workload)
    grid = Grid.parse(
        primary=primary,
        policies=policies,
        tiers=tiers,
        num_distinct=max(1, traffic.num_distinct),
        model=model_of(model, block_tokens=workload.block_tokens),
    )
    cells = []
    num_cells = len(grid.primaries) * len(grid.policies)
    with Console(stderr=True).status("planning") as status:
        for cell in run_grid(traffic, grid):
            cells.append(cell)
            status.update(f"{len(cells)} of {num_cells} done")
    settings = (described or {}) | {"block_tokens": workload.block_tokens}
    return PlanReport(traffic, grid, cells, settings)


def show_plan(report: PlanReport, *, as_json: bool) -> None:
    """Print a plan on standard output."""
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        Console().print(*report.to_tables())
