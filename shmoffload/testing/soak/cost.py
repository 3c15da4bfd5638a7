"""What the manager's calls cost the scheduler's thread.

Covers: thread CPU time per call, its distribution in a bounded space.
Does not cover: wall time (``replay.figures``); the planner's own time.
Who calls it: ``driver``; the scheduler's thread.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TypeVar

from shmoffload.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from shmoffload.core.types import (
        LookupResult,
        OffloadKey,
        PrepareStoreOutput,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
        SlotArray,
    )
    from shmoffload.wire.config import Config

T = TypeVar("T")
_PARTS: Final = 32
"""Cells per power of two: a percentile is known to 3 %."""
_POWERS: Final = 40
_ROUNDING: Final = 1e-6
"""Of weighted counts, which are no integers."""


class Spectrum:
    """Counts of times by their size; 40 powers of two of nanoseconds."""

    def __init__(self) -> None:
        self._cells = [0.0] * (_POWERS * _PARTS)
        self.num_calls = 0.0

    def add(self, time_ns: int) -> None:
        """Count one call."""
        power = max(0, time_ns.bit_length() - _PARTS.bit_length())
        cell = power * _PARTS + (time_ns >> power)
        self._cells[min(cell, len(self._cells) - 1)] += 1
        self.num_calls += 1

    def add_all(self, other: Spectrum, *, weight: float = 1.0) -> None:
        """Count what another spectrum has counted, each call ``weight`` times."""
        self._cells = [
            a + weight * b for a, b in zip(self._cells, other._cells, strict=True)
        ]
        self.num_calls += weight * other.num_calls

    def to_json(self) -> dict[str, float]:
        """Return the number of calls and their percentiles."""
        return {
            "calls": round(self.num_calls),
            "p50": round(self.percentile_us(50), 3),
            "p99": round(self.percentile_us(99), 3),
            "p99.9": round(self.percentile_us(99.9), 3),
        }

    def percentile_us(self, percent: float) -> float:
        """Return the time that so many percent of the calls did not exceed."""
        left = self.num_calls * percent / 100
        for cell, count in enumerate(self._cells):
            left -= count
            if left <= _ROUNDING and count:
                return _highest_ns(cell) / 1000
        return 0.0


def mixed(
    costs: Mapping[str, Spectrum], mix: Mapping[str, Spectrum] | None = None
) -> Spectrum:
    """Return the spectrum of all calls together.

    Args:
        costs: by name of the call.
        mix: weigh each name as if it had been called as often as here. Requests that
            wait for a tier look up again in every step; without this the many cheap
            calls would hide the dear ones.
    """
    total = Spectrum()
    for name, spectrum in costs.items():
        wanted = spectrum.num_calls
        if mix is not None:
            wanted = mix[name].num_calls if name in mix else 0
        total.add_all(spectrum, weight=wanted / spectrum.num_calls)
    return total


def _highest_ns(cell: int) -> int:
    """Return the longest time that falls into a cell; see ``Spectrum.add``."""
    # A time above 2 * _PARTS keeps its first 6 bits, of which the first is set.
    power = max(0, cell // _PARTS - 1)
    return ((cell - power * _PARTS + 1) << power) - 1


class MeteredEngine(Engine):
    """An engine whose manager calls are timed, each by its name.

    Attributes:
        costs: by name of the call, since ``take_costs``.
        steps_cpu: added up for each step.
    """

    def __init__(self, config: Config) -> None:
        self.costs: dict[str, Spectrum] = {}
        self.steps_cpu = Spectrum()
        self._step_ns = 0
        super().__init__(config)

    def take_costs(self) -> tuple[dict[str, Spectrum], Spectrum]:
        """Return ``costs`` and ``steps_cpu``, and begin anew."""
        taken = (self.costs, self.steps_cpu)
        self.costs, self.steps_cpu, self._step_ns = {}, Spectrum(), 0
        return taken

    def end_step(self) -> None:
        """Count what the manager's calls have cost since the last step."""
        self.steps_cpu.add(self._step_ns)
        self._step_ns = 0

    def _metered(self, name: str, call: Callable[..., T], *args: object) -> T:
        start_ns = time.thread_time_ns()
        try:
            return call(*args)
        finally:
            spent_ns = time.thread_time_ns() - start_ns
            if name not in self.costs:
                self.costs[name] = Spectrum()
            self.costs[name].add(spent_ns)
            self._step_ns += spent_ns

    def step_begin(self) -> None:
        """See ``Engine``."""
        self._metered("step_begin", super().step_begin)

    def on_schedule_end(self, ctx: ScheduleEndContext) -> None:
        """See ``Engine``."""
        self._metered("on_schedule_end", super().on_schedule_end, ctx)

    def on_new_request(self, ctx: ReqContext) -> RequestOffloadingContext:
        """See ``Engine``."""
        return self._metered("on_new_request", super().on_new_request, ctx)

    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        """See ``Engine``."""
        return self._metered("lookup", super().lookup, key, ctx)

    def prepare_load(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> SlotArray:
        """See ``Engine``."""
        return self._metered("prepare_load", super().prepare_load, keys, ctx)

    def complete_load(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        """See ``Engine``."""
        self._metered("complete_load", super().complete_load, keys, ctx)

    def prepare_store(
        self, keys: Collection[OffloadKey], ctx: ReqContext
    ) -> PrepareStoreOutput | None:
        """See ``Engine``."""
        return self._metered("prepare_store", super().prepare_store, keys, ctx)

    def complete_store(
        self, keys: Collection[OffloadKey], ctx: ReqContext, success: bool = True
    ) -> None:
        """See ``Engine``."""
        self._metered("complete_store", super().complete_store, keys, ctx, success)

    def on_request_finished(self, ctx: ReqContext) -> None:
        """See ``Engine``."""
        self._metered("on_request_finished", super().on_request_finished, ctx)

    def has_pending_work(self) -> bool:
        """See ``Engine``."""
        return self._metered("has_pending_work", super().has_pending_work)
