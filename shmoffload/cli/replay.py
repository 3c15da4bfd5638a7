"""``shmoffload replay``: recorded requests, against a live engine or planned.

Covers: the verb's options, progress, output of ``--live``.
Does not cover: the replay (``replay``), ``--plan`` (``cli.plan``), printing of errors
(``cli``).
Who calls it: ``cli.main``; a person or a script through it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from shmoffload.cli.plan import make_plan, read_workload, show_plan
from shmoffload.engine import Engine
from shmoffload.errors import BadInputError
from shmoffload.replay.live import AS_FAST_AS_IT_COMPLETES, LoopSettings
from shmoffload.replay.plan.models import DEFAULT_MODEL
from shmoffload.replay.report import Hooks, replay_on, table_of
from shmoffload.replay.settings import BlockScale, build_config
from shmoffload.wire.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shmoffload.replay.live import SchedulerLoop
    from shmoffload.replay.report import Report
    from shmoffload.replay.requests import Workload
    from shmoffload.wire.config import Config


_Trace = Annotated[
    Path, typer.Argument(help="Compact trace (.ptrace.zst) or Mooncake JSONL.")
]
_Live = Annotated[
    bool, typer.Option("--live", help="Drive a real engine with real bytes.")
]
_Plan = Annotated[
    bool, typer.Option("--plan", help="Metadata only, in virtual time; seconds.")
]
_Policy = Annotated[str, typer.Option(help="Eviction policy.")]
_Compare = Annotated[
    str,
    typer.Option(help="Plan: several policies like lru,auto; min = the optimum."),
]
_Model = Annotated[
    str, typer.Option(help="Plan: a model's name, or bytes of a block like 64MiB.")
]
_Limit = Annotated[int, typer.Option(help="First N requests; 0 = all.")]
_Window = Annotated[
    str, typer.Option(help="Seconds A:B of the trace, both included; empty = all.")
]
_Speed = Annotated[
    str,
    typer.Option(help="Times faster than recorded, or max: as fast as it completes."),
]
_BlockTokens = Annotated[int, typer.Option(help="Tokens of a block.")]
_BlockBytes = Annotated[str, typer.Option(help="Bytes of a block, like 64K.")]
_Primary = Annotated[
    str,
    typer.Option(
        help="Host memory: 5% of the distinct blocks, 944 blocks, or 64MiB; "
        "plan: also several like 1%,5%."
    ),
]
_Tiers = Annotated[
    list[str] | None,
    typer.Option(
        help="TYPE[:DIR][,cap=100%][,name=NAME][,policy=..][,admit=all]; repeatable."
    ),
]
_StepMs = Annotated[float, typer.Option(help="Wall time of a step.")]
_MaxNumSeqs = Annotated[int, typer.Option(help="Most running requests.")]
_MaxTokens = Annotated[int, typer.Option(help="Most tokens computed in a step.")]
_MaxDecode = Annotated[int, typer.Option(help="Most output tokens of a request.")]
_Prefill = Annotated[
    float,
    typer.Option(
        help="Live: tokens that the GPU computes in a second; a load that would take "
        "longer is a miss. 0 = load whatever a tier has."
    ),
]
_Gpu = Annotated[str, typer.Option(help="GPU prefix cache; only 0 is possible.")]
_Session = Annotated[str, typer.Option(help="Session name; default replay-PID.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON with stable keys.")]


def replay_command(
    trace: _Trace,
    live: _Live = False,
    plan: _Plan = False,
    window: _Window = "",
    limit: _Limit = 0,
    speed: _Speed = "1",
    block_tokens: _BlockTokens = 512,
    block_bytes: _BlockBytes = "64K",
    primary: _Primary = "5%",
    tier: _Tiers = None,
    step_ms: _StepMs = 5.0,
    max_num_seqs: _MaxNumSeqs = 256,
    max_num_batched_tokens: _MaxTokens = 8192,
    max_decode: _MaxDecode = 64,
    prefill_tokens_per_s: _Prefill = 0.0,
    gpu: _Gpu = "0",
    session: _Session = "",
    policy: _Policy = "auto",
    compare: _Compare = "",
    model: _Model = DEFAULT_MODEL,
    as_json: _Json = False,
) -> None:
    """Replay recorded requests and compare every byte that comes back, or plan.

    Exit code 0: all served, no byte wrong; 1: not so; 2: bad input.
    """
    _check_mode(live=live, plan=plan, compare=compare, gpu=gpu)
    settings = LoopSettings(
        _speed(speed), step_ms, max_num_seqs, max_num_batched_tokens, max_decode
    )
    settings.check()
    workload = read_workload(trace, window, limit, block_tokens)
    described = {"trace": str(trace), "window": window, "limit": limit}
    if plan:
        policies = compare or policy
        planned = make_plan(workload, primary, policies, tier or [], model, described)
        show_plan(planned, as_json=as_json)
        return
    block = parse_size(block_bytes, key="--block-bytes")
    config = build_config(
        session=session or f"replay-{os.getpid()}",
        primary=primary,
        tiers=tier or [],
        scale=BlockScale(workload.num_distinct, block),
        policy=policy,
        prefill_s_per_block=_prefill(prefill_tokens_per_s, workload.block_tokens),
    )
    report = _replay_live(config, workload, settings, described)
    show(report, as_json=as_json)
    raise typer.Exit(0 if report.ok else 1)


def _replay_live(
    config: Config,
    workload: Workload,
    settings: LoopSettings,
    described: dict[str, Any],
) -> Report:
    described |= {"block_tokens": workload.block_tokens}
    described |= describe(config, settings)
    with progress_on_terminal(len(workload.requests)) as on_step, Engine(config) as up:
        hooks = Hooks(on_step=on_step)
        return replay_on(up, workload, settings, hooks=hooks, described=described)


def _check_mode(*, live: bool, plan: bool, compare: str, gpu: str) -> None:
    """Refuse what is not there.

    Raises:
        BadInputError: a sentence that says what to type.
    """
    if live == plan:
        raise BadInputError("replay needs one mode: add either --live or --plan")
    if live and compare:
        raise BadInputError(
            f"--compare {compare}: a live engine has one policy: add --policy NAME"
        )
    if gpu not in ("0", "0%"):
        raise BadInputError(
            f'--gpu "{gpu}": a GPU prefix cache is not simulated: write --gpu 0'
        )


def _prefill(tokens_per_s: float, block_tokens: int) -> float:
    """Return the seconds in which the GPU computes a block; 0 = not given.

    Raises:
        BadInputError: no rate.
    """
    if not 0 <= tokens_per_s < math.inf:
        raise BadInputError(
            f"--prefill-tokens-per-s {tokens_per_s:g}: give a number above 0, or 0 to "
            f"load whatever a tier has"
        )
    return block_tokens / tokens_per_s if tokens_per_s else 0.0


def _speed(text: str) -> float:
    """Read a factor, or ``max``.

    Raises:
        BadInputError: neither.
    """
    if text == "max":
        return AS_FAST_AS_IT_COMPLETES
    try:
        return float(text)
    except ValueError as error:
        raise BadInputError(
            f'--speed "{text}": write a factor like 10, or max'
        ) from error


def describe(config: Config, settings: LoopSettings) -> dict[str, Any]:
    """Return the settings that a report repeats."""
    return {
        "session": config.session.name,
        "block_bytes": config.block_bytes,
        "primary_blocks": config.num_slots,
        "policy": config.primary.policy,
        "prefill_s_per_block": config.limits.prefill_s_per_block,
        "tiers": [
            {
                "name": tier.name,
                "type": tier.type,
                "path": tier.path,
                "max_bytes": tier.max_bytes,
                "policy": None if tier.policy is None else tier.policy.value,
                "admit": tier.admit,
            }
            for tier in config.tier
        ],
        **{name: getattr(settings, name) for name in settings.__slots__},
        "speed": "max" if math.isinf(settings.speed) else settings.speed,
        "gpu": 0,
    }


def show(report: Report, *, as_json: bool) -> None:
    """Print a report on standard output."""
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        Console().print(table_of(report))


@contextlib.contextmanager
def progress_on_terminal(
    num_requests: int,
) -> Iterator[Callable[[SchedulerLoop], None] | None]:
    """Show a bar on standard error while requests end; None if it is no terminal."""
    if not sys.stderr.isatty():
        logging.basicConfig(level=logging.WARNING, format="shmoffload: %(message)s")
        yield None
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=num_requests)

        def on_step(loop: SchedulerLoop) -> None:
            if loop.num_steps % 20 == 0:
                progress.update(task, completed=loop.figures.num_requests)

        yield on_step
