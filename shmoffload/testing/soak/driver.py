"""The run: pieces of the trace without and with faults in turn.

Covers: both sessions, the lanes, moments in which nothing is under way and
everything is checked, adding all up.
Does not cover: single faults (``strikes``, ``second``), the verdict (``report``).
Who calls it: ``tools/soak.py`` and tests, in one thread; it waits for the soak.

    piece without faults | piece with | piece with | without | with | with | ...
                         ^ all lanes end, the engine is idle: equation, resources

One lane per faulty tier and one for the second session; faults that concern all tiers
strike alone. The driver's process is the live engine's, so that its descriptors and
memory are watched as well.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from shmoffload.replay.live import SchedulerLoop
from shmoffload.testing.faults.control import Control
from shmoffload.testing.soak.cost import MeteredEngine, Spectrum
from shmoffload.testing.soak.lane import Lane
from shmoffload.testing.soak.plan import LIVE, SECOND, Deck, faults_of
from shmoffload.testing.soak.report import Half, SoakReport
from shmoffload.testing.soak.second import SecondSession
from shmoffload.testing.soak.settings import (
    FAULTY_TIERS,
    LOOP,
    live_config,
)
from shmoffload.testing.soak.strikes import strike_of
from shmoffload.testing.soak.target import Gate, TierTarget
from shmoffload.testing.soak.watch import Resources, excess, look, names_of, pids_of
from shmoffload.testing.soak.workload import make_piece, make_trace
from shmoffload.wire.session import TierWord, Word

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shmoffload.core.planner_types import TransferJob
    from shmoffload.replay.requests import Workload
    from shmoffload.testing.soak.settings import SoakSettings

_SETTLE_S: Final = 90.0
_GONE_S: Final = 30.0
_SLICE_S: Final = 0.02
_MAX_PROBLEMS: Final = 100
_WARM_UP: Final = 2
"""Pieces that only warm up: one without faults, one with."""
_QUIET_EVERY: Final = 3
"""Of so many pieces one is without faults."""
_LAST_FAULTS_AT: Final = 0.85
"""Of a piece's requests; later ones are too few to find open jobs with."""
_SHOWN: Final = {
    "worker_epoch": TierWord.WORKER_EPOCH,
    "jobs_failed": TierWord.JOBS_FAILED,
    "late_replies": TierWord.LATE_REPLIES,
    "blocks_bad": TierWord.BLOCKS_BAD,
    "blocks_failed": TierWord.BLOCKS_FAILED,
    "blocks_read": TierWord.BLOCKS_READ,
    "blocks_written": TierWord.BLOCKS_WRITTEN,
}


def run_soak(
    settings: SoakSettings,
    *,
    on_piece: Callable[[SoakReport], None] = lambda _: None,
    on_load: Callable[[MeteredEngine, TransferJob], None] | None = None,
) -> SoakReport:
    """Run one soak and return what it came to.

    Args:
        settings: of the run.
        on_piece: called after each piece, for progress.
        on_load: called before the slots of a load of the live engine are read, for
            tests.

    Raises:
        BadInputError: the settings, or what a tier needs, are not usable.
        StartError: the live session did not come up.
    """
    settings.check()
    start_s = time.monotonic()
    trace = make_trace(replace(settings.shape, seed=settings.seed))
    with contextlib.ExitStack() as undo:
        controls = [
            Control(settings.folder / name, inner=name) for name in FAULTY_TIERS
        ]
        engine = undo.enter_context(
            MeteredEngine(live_config(settings, trace.whole.num_distinct))
        )
        soak = _Soak(settings, engine, controls)
        undo.callback(soak.close)
        spoil = None if on_load is None else partial(on_load, engine)
        while time.monotonic() - start_s < settings.minutes * 60 or not soak.is_fair:
            soak.run_piece(make_piece(trace, soak.num_pieces), on_load=spoil)
            on_piece(soak.report)
            if soak.is_lost:
                break
        soak.note_counters()
    report = soak.report
    _check_gone(report, (settings.session, settings.second_session))
    report.seconds = time.monotonic() - start_s
    return report


class _Soak:
    """A live engine under faults, and what has come of it so far.

    Attributes:
        report: filled as it goes.
        num_pieces: that were run.
        is_lost: going on would show nothing.
    """

    def __init__(
        self, settings: SoakSettings, engine: MeteredEngine, controls: list[Control]
    ) -> None:
        self.num_pieces = 0
        self.is_lost = False
        self._engine = engine
        self._session = settings.session
        live = faults_of(LIVE, settings.kinds)
        second = faults_of(SECOND, settings.kinds)
        self.report = SoakReport(
            seed=settings.seed,
            minutes=settings.minutes,
            min_faults=settings.min_faults,
            wanted=list(dict.fromkeys((*live, *second))),
        )
        gate = Gate()
        self._targets = [
            TierTarget(
                engine,
                tier_idx,
                control,
                rng=random.Random(f"{settings.seed} choices {tier_idx}"),
                gate=gate,
            )
            for tier_idx, control in enumerate(controls)
        ]
        self._second = SecondSession(
            settings.second_session, settings.folder / "second", settings.seed
        )
        self._lanes = [
            Lane(
                Deck(live, f"{settings.seed} live", offset=idx / len(controls)),
                partial(strike_of, target),
                enter=partial(gate.enter, idx),
                leave=partial(gate.leave, idx),
            )
            for idx, target in enumerate(self._targets)
        ]
        second_deck = Deck(second, f"{settings.seed} second")
        self._second_lane = Lane(second_deck, self._second.strike_of)

    @property
    def is_fair(self) -> bool:
        """There is something to compare: a piece of each half, after the warm-up."""
        return bool(self.report.quiet.pieces and self.report.faulty.pieces)

    def run_piece(
        self, workload: Workload, *, on_load: Callable[[TransferJob], None] | None
    ) -> None:
        """Serve one piece, let all that is under way end, and look."""
        number = self.num_pieces
        self.num_pieces += 1
        is_faulty = number % _QUIET_EVERY != 0
        last_at = _LAST_FAULTS_AT * len(workload.requests)

        def on_step(loop: SchedulerLoop) -> None:
            may_begin = is_faulty and loop.figures.num_requests < last_at
            self._turn(may_begin=may_begin)
            self._engine.end_step()

        loop = SchedulerLoop(
            self._engine, workload, LOOP, on_step=on_step, on_load=on_load
        )
        self._engine.take_costs()
        loop.run()
        seconds = loop.now_s()
        costs, steps_cpu = self._engine.take_costs()
        self.report.wrong_bytes += loop.gpu.num_bad
        if loop.has_stalled or loop.figures.num_requests < len(workload.requests):
            self._say(f"piece {number} stalled: {loop.figures.num_requests} ended")
            self.is_lost = True
        if number >= _WARM_UP:
            half = self.report.faulty if is_faulty else self.report.quiet
            _add(half, loop, seconds, costs)
            half.steps_cpu.add_all(steps_cpu)
        self._settle()
        self._check_quiescent()
        if number >= _WARM_UP - 1:
            self._look()
        self._gather()

    def note_counters(self) -> None:
        """Note what the session page says of each tier; while the engine is up."""
        page = self._engine.page
        self.report.counters = {
            tier.name: {name: page.get_tier(idx, word) for name, word in _SHOWN.items()}
            for idx, tier in enumerate(self._engine.config.tier)
        }

    def close(self) -> None:
        """End what is under way, so that the engine can close."""
        for lane in (*self._lanes, self._second_lane):
            lane.close()
        for target in self._targets:
            target.clear()

    def _turn(self, *, may_begin: bool) -> None:
        for lane in (*self._lanes, self._second_lane):
            lane.turn(may_begin=may_begin)

    def _settle(self) -> None:
        """Let every fault end, every tier come up and every job be answered."""
        for lane in self._lanes:
            lane.give_up_waiting()  # the second session's jobs go on
        until_s = time.monotonic() + _SETTLE_S
        while time.monotonic() < until_s:
            self._turn(may_begin=False)
            is_idle = self._engine.wait_idle(_SLICE_S)
            lanes = (*self._lanes, self._second_lane)
            if (
                is_idle
                and all(lane.is_idle for lane in lanes)
                and all(tier.is_up for tier in self._engine.tiers)
            ):
                return
            time.sleep(_SLICE_S)
        self._say(f"not all was well {_SETTLE_S:g} s after a piece")
        self.is_lost = True

    def _check_quiescent(self) -> None:
        """Nothing is under way: every slot is free or evictable, and all adds up."""
        engine, table = self._engine, self._engine.manager.table
        try:
            engine.manager.check_integrity()
        except AssertionError as error:
            self._say(f"the core's equations do not hold: {error}")
        num_evictable = len(table.blocks) - table.num_pending - table.num_pinned
        figures = {
            "slots": table.num_slots - table.num_free - num_evictable,
            "quarantined slots": table.num_quarantined,
            "open jobs": sum(tier.num_open_jobs for tier in engine.tiers),
            "open store bytes": sum(tier.open_store_bytes for tier in engine.tiers),
            "open loads": sum(tier.num_open_loads for tier in engine.tiers),
            "pending work": int(engine.has_pending_work()),
            "broken engine": int(engine.is_broken),
        }
        wrong = [f"{name}: {count}" for name, count in figures.items() if count]
        if wrong:
            self._say(f"not quiescent after a piece: {', '.join(wrong)}")
        else:
            self.report.num_quiescent += 1

    def _look(self) -> None:
        """Look at resources, once what is just ending has ended."""
        until_s = time.monotonic() + _GONE_S
        while True:
            now = self._resources()
            found = excess(self.report.looks[0], now) if self.report.looks else []
            if not found or time.monotonic() > until_s:
                break
            self._engine.wait_idle(_SLICE_S)
            time.sleep(_SLICE_S)
        self.report.looks.append(now)
        for sentence in found:
            self._say(f"after piece {self.num_pieces - 1}, {sentence}")

    def _resources(self) -> Resources:
        page = self._engine.page
        return look(
            self._session,
            supervisor_pid=page.get(Word.SUPERVISOR_PID),
            worker_pids=[
                page.get_tier(idx, TierWord.WORKER_PID) for idx in range(page.num_tiers)
            ],
        )

    def _gather(self) -> None:
        """Put what lanes have counted into the report."""
        report, second = self.report, self._second
        lanes = (*self._lanes, self._second_lane)
        report.struck = dict(sum((lane.struck for lane in lanes), Counter()))
        report.missed = dict(sum((lane.missed for lane in lanes), Counter()))
        for problems in (*(lane.problems for lane in lanes), second.problems):
            while problems:
                self._say(problems.pop(0))
        report.wrong_bytes += second.take_bad()
        report.second_lives = second.num_lives
        report.second_blocks_compared = second.num_loaded

    def _say(self, sentence: str) -> None:
        if len(self.report.problems) < _MAX_PROBLEMS:
            self.report.problems.append(sentence)


def _add(
    half: Half, loop: SchedulerLoop, seconds: float, costs: dict[str, Spectrum]
) -> None:
    half.pieces += 1
    half.seconds += seconds
    half.steps += loop.num_steps
    half.requests += loop.figures.num_requests
    half.blocks_compared += loop.figures.prefix_hits + loop.gpu.num_bad
    for name, spectrum in costs.items():
        half.costs.setdefault(name, Spectrum()).add_all(spectrum)


def _check_gone(report: SoakReport, sessions: Sequence[str]) -> None:
    """Wait until nothing of the sessions is left, and say so if something is."""
    until_s = time.monotonic() + _GONE_S
    for session in sessions:
        while names_of(session) or pids_of(session):
            if time.monotonic() > until_s:
                left = [*names_of(session), *map(str, pids_of(session))]
                report.problems.append(
                    f"left of session {session} at the end: {', '.join(left)}"
                )
                break
            time.sleep(_SLICE_S)
