"""``shmoffload demo``: generated requests, two tiers, every byte compared.

Covers: the verb, killing one worker on request, the closing sentence.
Does not cover: the replay (``replay``, the same code path as ``replay --live``).
Who calls it: ``cli.main``; ``make demo`` through it.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shmoffload.cli.replay import describe, progress_on_terminal, show
from shmoffload.engine import Engine
from shmoffload.errors import BadInputError
from shmoffload.replay.generate import MultiTurn, generate
from shmoffload.replay.kill import WorkerKiller
from shmoffload.replay.live import LoopSettings
from shmoffload.replay.report import Hooks, replay_on
from shmoffload.replay.settings import BlockScale, build_config

if TYPE_CHECKING:
    from shmoffload.replay.live import SchedulerLoop
    from shmoffload.replay.report import Report

_BLOCK_BYTES = 64 * 1024
_TIERS = ("slab", "fs")


def demo_command(
    kill: Annotated[
        str, typer.Option(help="SIGKILL the worker of this tier midway: slab or fs.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON with stable keys.")
    ] = False,
) -> None:
    """Serve generated conversations with two tiers, in under 20 seconds.

    Everything is kept in a temporary directory that is removed at the end.
    """
    if kill and kill not in _TIERS:
        raise BadInputError(
            f'--kill "{kill}": the demo has no such tier: write slab or fs'
        )
    with tempfile.TemporaryDirectory(prefix="shmoffload-demo-") as folder:
        report, story, is_back = _serve(folder, kill)
    show(report, as_json=as_json)
    if not as_json:
        console = Console(highlight=False)
        if story:
            console.print(story)
        console.print(_summary(report))
    raise typer.Exit(0 if report.ok and is_back else 1)


def _serve(folder: str, kill: str) -> tuple[Report, str, bool]:
    """Replay; return the report, the story of the kill, and whether it is over."""
    workload = generate(MultiTurn())
    settings = LoopSettings(max_decode=32)
    config = build_config(
        session=f"demo-{os.getpid()}",
        primary="20%",
        # The slab forgets, so that the second tier has something to give.
        tiers=[f"slab:{folder}/slab,cap=40%", f"fs:{folder}/fs,cap=100%"],
        scale=BlockScale(workload.num_distinct, _BLOCK_BYTES),
    )
    described = {"workload": workload.name, **describe(config, settings)}
    num_requests = len(workload.requests)
    with progress_on_terminal(num_requests) as progress, Engine(config) as engine:
        killer = (
            WorkerKiller(engine, _TIERS.index(kill), after=num_requests // 2)
            if kill
            else None
        )

        def on_step(loop: SchedulerLoop) -> None:
            if progress is not None:
                progress(loop)
            if killer is not None:
                killer.on_step(loop)

        hooks = Hooks(on_step=on_step)
        report = replay_on(engine, workload, settings, hooks=hooks, described=described)
        if killer is None:
            return report, "", True
        is_back = killer.await_return()
        return report, killer.story(), is_back


def _summary(report: Report) -> str:
    if not report.ok:
        return "[bold red]NOT verified[/]: see the figures above."
    return (
        f"[bold green]Verified[/]: {report.requests} requests, {report.prefix_hits} "
        f"blocks came back from other processes, every byte of them compared, "
        f"none wrong."
    )
