"""``shmoffload stats``: what a trace is like.

Covers: the verb's options, output.
Does not cover: the figures (``replay.plan.stats``), printing of errors (``cli``).
Who calls it: ``cli.main``; a person or a script through it.
"""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003  (typer reads it)
from typing import Annotated

import typer
from rich.console import Console

from shmoffload.cli.plan import read_workload
from shmoffload.replay.plan.stats import TraceStats


def stats_command(
    trace: Annotated[
        Path, typer.Argument(help="Compact trace (.ptrace.zst) or Mooncake JSONL.")
    ],
    window: Annotated[
        str, typer.Option(help="Seconds A:B of the trace, both included; empty = all.")
    ] = "",
    limit: Annotated[int, typer.Option(help="First N requests; 0 = all.")] = 0,
    block_tokens: Annotated[int, typer.Option(help="Tokens of a block.")] = 512,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON with stable keys.")
    ] = False,
) -> None:
    """Count requests, blocks, reuse and lengths of a trace."""
    workload = read_workload(trace, window, limit, block_tokens)
    stats = TraceStats.of(workload)
    if as_json:
        print(json.dumps({"trace": str(trace), **stats.to_json()}, indent=2))
    else:
        Console().print(stats.to_table(workload.name))
