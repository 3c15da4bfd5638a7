"""Runs a workload on an engine and says what came of it.

Covers: one replay from engine to report, the stable JSON, the table.
Does not cover: the loop (``live``), options (``settings``, ``cli``).
Who calls it: the command line and tests; one thread; it waits for the replay.

Tier counters are the workers' own words in the session page, not what the engine
believes that workers did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from rich.table import Table

from shmoffload.core.types import LookupResult, ReqContext, make_offload_key
from shmoffload.replay.figures import LookupCount, TierWords
from shmoffload.replay.live import LoopSettings, SchedulerLoop
from shmoffload.wire.session import TierWord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shmoffload.core.planner_types import TransferJob
    from shmoffload.engine import Engine
    from shmoffload.replay.requests import Workload

DRAIN_TIMEOUT_S: Final = 60.0
"""Twice the default job deadline: after it no job can be open."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """Where a caller may look into a replay; see ``SchedulerLoop``."""

    on_step: Callable[[SchedulerLoop], None] | None = None
    on_load: Callable[[TransferJob], None] | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What a replay came to; field names are the stable JSON keys.

    Attributes:
        ok: every request was served, everything drained, no byte was wrong.
        requests: that ended.
        blocks: full blocks of all prompts.
        prefix_hits: leading blocks that were loaded and verified.
        prefix_hits_attainable: the same, had every store been instant.
        hits_by_tier: where they came from: ``primary``, or the tier that brought
            them for this request.
        blocks_written: physical writes by tier, and their ``total``.
        stores_failed: blocks never stored when their request ended.
        jobs_failed: cascades and promotions that failed in part or whole.
        jobs_dropped: cascades without credit.
        bad_stamps: loaded blocks with a wrong byte.
        max_running: most requests running at once.
        step_ms: p50, p99, max of the time inside planner and engine per step.
        resolved_ms: p50, p99 from arrival to a definite prefix.
        lookups_per_block: manager lookups per block of the workload.
        bytes: ``store`` and ``load`` between GPU and primary, ``cascade`` and
            ``promotion`` between primary and tiers.
        seconds: from the first step until everything was drained.
        settings: what was asked for.
    """

    ok: bool
    requests: int
    blocks: int
    prefix_hits: int
    prefix_hits_attainable: int
    hits_by_tier: dict[str, int]
    blocks_written: dict[str, int]
    stores_failed: int
    jobs_failed: int
    jobs_dropped: int
    bad_stamps: int
    max_running: int
    step_ms: dict[str, float]
    resolved_ms: dict[str, float]
    lookups_per_block: float
    bytes: dict[str, int]
    seconds: float
    settings: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the report with its stable keys."""
        return {name: getattr(self, name) for name in self.__slots__}


def replay_on(
    engine: Engine,
    workload: Workload,
    settings: LoopSettings,
    *,
    hooks: Hooks | None = None,
    described: dict[str, Any] | None = None,
) -> Report:
    """Serve a workload on an engine that is up, and measure it.

    Args:
        engine: left up; nothing else may use it meanwhile.
        workload: requests in order of arrival.
        settings: of the simulated scheduler.
        hooks: into the loop.
        described: goes into the report as ``settings``.
    """
    hooks = hooks or Hooks()
    at_start = _held_by_tiers(engine, workload)
    words = TierWords(engine.page)
    lookups = LookupCount(engine.manager)
    loop = SchedulerLoop(
        engine, workload, settings, on_step=hooks.on_step, on_load=hooks.on_load
    )
    loop.run()
    is_idle = engine.wait_idle(DRAIN_TIMEOUT_S)
    return Report(
        ok=is_idle and not engine.is_broken and _is_right(loop),
        prefix_hits_attainable=workload.attainable_hits(at_start),
        lookups_per_block=round(lookups.take() / max(1, workload.num_blocks), 3),
        seconds=round(loop.now_s(), 3),
        settings=described or {},
        **_of_loop(loop),
        **_of_tiers(engine, words, loop),
    )


def _is_right(loop: SchedulerLoop) -> bool:
    is_served = loop.figures.num_requests == len(loop.workload.requests)
    return is_served and loop.gpu.num_bad == 0


def _of_loop(loop: SchedulerLoop) -> dict[str, Any]:
    """Return what the simulated scheduler saw."""
    figures = loop.figures
    return {
        "requests": figures.num_requests,
        "blocks": loop.workload.num_blocks,
        "prefix_hits": figures.prefix_hits,
        "hits_by_tier": figures.hits_by_tier,
        "stores_failed": loop.planner.counters.blocks_never_stored,
        "bad_stamps": loop.gpu.num_bad,
        "max_running": figures.max_running,
        "step_ms": _percentiles(figures.step_s, p50=50, p99=99, max=100),
        "resolved_ms": _percentiles(figures.resolved_s, p50=50, p99=99),
    }


def _of_tiers(engine: Engine, words: TierWords, loop: SchedulerLoop) -> dict[str, Any]:
    """Return what the session page says, and the bytes of both directions."""
    written = {
        tier.name: words.grown(i, TierWord.BLOCKS_WRITTEN)
        for i, tier in enumerate(engine.config.tier)
    }
    return {
        "blocks_written": {**written, "total": sum(written.values())},
        "jobs_failed": words.total(TierWord.JOBS_FAILED),
        "jobs_dropped": words.total(TierWord.JOBS_DROPPED),
        "bytes": {
            "store": loop.gpu.bytes_stored,
            "load": loop.gpu.bytes_loaded,
            "cascade": words.total(TierWord.BYTES_WRITTEN),
            "promotion": words.total(TierWord.BYTES_READ),
        },
    }


def _held_by_tiers(engine: Engine, workload: Workload) -> set[bytes]:
    """Return hashes of the workload's blocks that some tier has now."""
    nobody = ReqContext("replay")
    return {
        block
        for block in {h for request in workload.requests for h in request.hashes}
        for tier in engine.tiers
        if tier.lookup(make_offload_key(block), nobody) is LookupResult.HIT
    }


def _percentiles(values_s: Sequence[float], **wanted: int) -> dict[str, float]:
    values_ms = np.array(values_s or [0.0]) * 1000
    return {
        name: round(float(np.percentile(values_ms, percent)), 3)
        for name, percent in wanted.items()
    }


def table_of(report: Report) -> Table:
    """Return the report as a table for people."""
    table = Table(title="replay", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    attainable = report.prefix_hits_attainable
    share = f" ({report.prefix_hits / attainable:.2%})" if attainable else ""
    rows: list[tuple[str, str]] = [
        ("requests", f"{report.requests}"),
        ("blocks", f"{report.blocks}"),
        ("prefix hits, verified", f"{report.prefix_hits} of {attainable}{share}"),
        *((f"  from {name}", f"{n}") for name, n in report.hits_by_tier.items()),
        *((f"written to {name}", f"{n}") for name, n in report.blocks_written.items()),
        *(
            (name, f"{_mib(num)} ({_mib(num / max(report.seconds, 1e-9))}/s)")
            for name, num in report.bytes.items()
        ),
        ("most running", f"{report.max_running}"),
        ("step p50 / p99 / max", _times(report.step_ms)),
        ("prefix resolved p50 / p99", _times(report.resolved_ms)),
        ("lookups per block", f"{report.lookups_per_block}"),
        ("stores failed", f"{report.stores_failed}"),
        ("jobs failed / dropped", f"{report.jobs_failed} / {report.jobs_dropped}"),
        ("bad stamps", f"{report.bad_stamps}"),
        ("seconds", f"{report.seconds}"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"


def _times(times_ms: dict[str, float]) -> str:
    return " / ".join(f"{value:g}" for value in times_ms.values()) + " ms"
