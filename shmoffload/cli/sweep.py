"""``shmoffload sweep``: hit rate against capacity, per policy.

Covers: the verb's options, where the files are.
Does not cover: the figures (``replay.plan``), printing of errors (``cli``).
Who calls it: ``cli.main``; a person or a script through it.
"""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003  (typer reads it)
from typing import Annotated

import typer

from shmoffload.cli.plan import make_plan, read_workload, show_plan
from shmoffload.replay.plan.models import DEFAULT_MODEL
from shmoffload.replay.plan.sweep import write_sweep


def sweep_command(
    trace: Annotated[
        Path, typer.Argument(help="Compact trace (.ptrace.zst) or Mooncake JSONL.")
    ],
    out: Annotated[Path, typer.Option(help="Directory for sweep.csv and sweep.png.")],
    primary: Annotated[
        str, typer.Option(help="Capacities: 1,5,10%, numbers of blocks, or 64GiB,...")
    ] = "1,5,10,25,50%",
    policy: Annotated[str, typer.Option(help="Policies; min = the optimum.")] = (
        "lru,auto,min"
    ),
    window: Annotated[
        str, typer.Option(help="Seconds A:B of the trace, both included; empty = all.")
    ] = "",
    limit: Annotated[int, typer.Option(help="First N requests; 0 = all.")] = 0,
    block_tokens: Annotated[int, typer.Option(help="Tokens of a block.")] = 512,
    model: Annotated[
        str, typer.Option(help="A model's name, or bytes of a block like 64MiB.")
    ] = DEFAULT_MODEL,
) -> None:
    """Plan every policy at every capacity; write a CSV and a PNG."""
    workload = read_workload(trace, window, limit, block_tokens)
    report = make_plan(workload, primary, policy, model=model)
    missing = write_sweep(
        report.cells, out, title=f"{workload.name}: prefix hit rate, {model}"
    )
    show_plan(report, as_json=False)
    if missing:
        print(f"shmoffload: {missing}", file=sys.stderr)
