"""What a soak came to: figures, the verdict and its reasons, JSON.

Covers: the report's fields, what makes it green, a summary for people.
Does not cover: measuring (``driver``).
Who calls it: ``driver`` fills it, ``tools/soak.py`` shows it. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from shmoffload.testing.soak.cost import Spectrum, mixed
from shmoffload.testing.soak.plan import Fault, Stage
from shmoffload.testing.soak.watch import growth

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shmoffload.testing.soak.watch import Resources

VERSION: Final = 1
MIN_PACE: Final = 0.5
"""Steps and requests per second with faults, as a part of those without."""
MAX_CPU_RATIO: Final = 2.0
"""p99 of the CPU time of a manager call with faults, by that without."""


@dataclass(slots=True)
class Half:
    """All pieces without faults, or all with.

    Attributes:
        pieces: of the trace.
        seconds: from the first request of a piece to the end of its last, added.
        steps: of the scheduler.
        requests: that ended.
        blocks_compared: loaded, every byte of them.
        costs: CPU time of the manager's calls, by name.
        steps_cpu: the same, added up for each step.
    """

    pieces: int = 0
    seconds: float = 0.0
    steps: int = 0
    requests: int = 0
    blocks_compared: int = 0
    costs: dict[str, Spectrum] = field(default_factory=dict)
    steps_cpu: Spectrum = field(default_factory=Spectrum)

    def per_s(self, count: int) -> float:
        """Return a count by the half's seconds."""
        return count / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the half's figures."""
        costs = mixed(self.costs)
        return {
            "pieces": self.pieces,
            "seconds": round(self.seconds, 3),
            "steps": self.steps,
            "requests": self.requests,
            "steps_per_s": round(self.per_s(self.steps), 2),
            "requests_per_s": round(self.per_s(self.requests), 2),
            "blocks_compared": self.blocks_compared,
            "call_cpu_us": costs.to_json(),
            "step_cpu_us": self.steps_cpu.to_json(),
            "call_cpu_us_by_name": {
                name: spectrum.to_json()
                for name, spectrum in sorted(self.costs.items())
            },
        }


@dataclass(slots=True)
class SoakReport:
    """What one soak came to.

    Attributes:
        seed: it decides the requests and the order in which faults are tried.
        minutes: as asked.
        min_faults: as asked; struck at open jobs.
        seconds: from start to end.
        wanted: every fault that has to strike at least once.
        struck: how often each did.
        missed: how often each found no open job and was put off.
        quiet: the pieces without faults.
        faulty: those with.
        wrong_bytes: loaded blocks with a wrong byte, of all engines.
        looks: at resources, the first after the warm-up.
        num_quiescent: moments in which nothing was under way and all was checked.
        second_lives: engines of the second session.
        second_blocks_compared: that they loaded.
        counters: words of the session page at the end, by tier.
        problems: what went wrong on the way, in sentences.
    """

    seed: int
    minutes: float
    min_faults: int
    wanted: list[Fault]
    seconds: float = 0.0
    struck: dict[Fault, int] = field(default_factory=dict)
    missed: dict[Fault, int] = field(default_factory=dict)
    quiet: Half = field(default_factory=Half)
    faulty: Half = field(default_factory=Half)
    wrong_bytes: int = 0
    looks: list[Resources] = field(default_factory=list)
    num_quiescent: int = 0
    second_lives: int = 0
    second_blocks_compared: int = 0
    counters: dict[str, dict[str, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def num_faults(self) -> int:
        """Faults that struck a target with an open job."""
        return sum(
            count
            for fault, count in self.struck.items()
            if fault.stage is not Stage.STARTING
        )

    @property
    def num_starting(self) -> int:
        """Faults that struck a target while it started: no job can be open then."""
        return sum(self.struck.values()) - self.num_faults

    @property
    def cpu_p99_us(self) -> tuple[float, float]:
        """p99 of the CPU time of a manager call, without faults and with.

        With faults requests wait longer, and look up again and again: the p99 is the
        higher one of the calls as they came and of those in the quiet half's mix.
        """
        quiet = mixed(self.quiet.costs).percentile_us(99)
        as_they_came = mixed(self.faulty.costs).percentile_us(99)
        alike = mixed(self.faulty.costs, self.quiet.costs).percentile_us(99)
        return quiet, max(as_they_came, alike)

    @property
    def cpu_ratio(self) -> float:
        """p99 of the CPU time of a manager call with faults by that without."""
        quiet_us, faulty_us = self.cpu_p99_us
        return _ratio(faulty_us, quiet_us)

    @property
    def step_ratio(self) -> float:
        """Steps per second with faults by those without."""
        quiet, faulty = self.quiet, self.faulty
        return _ratio(faulty.per_s(faulty.steps), quiet.per_s(quiet.steps))

    @property
    def request_ratio(self) -> float:
        """Requests per second with faults by those without."""
        quiet, faulty = self.quiet, self.faulty
        return _ratio(faulty.per_s(faulty.requests), quiet.per_s(quiet.requests))

    def reasons(self) -> list[str]:
        """Return why the soak is not green, in sentences; none: it is."""
        found = list(self.problems)
        if self.wrong_bytes:
            found.append(f"{self.wrong_bytes} loaded blocks had a wrong byte")
        if not (self.quiet.blocks_compared and self.faulty.blocks_compared):
            found.append("no loaded block was compared in a half: run longer")
        never = [fault for fault in self.wanted if not self.struck.get(fault)]
        found += [f"{f.kind}, {f.stage}: never struck; run longer" for f in never]
        if self.num_faults < self.min_faults:
            found.append(
                f"{self.num_faults} faults struck an open job: {self.min_faults} were "
                f"asked for; run longer"
            )
        for what, ratio in (
            ("steps", self.step_ratio),
            ("requests", self.request_ratio),
        ):
            if ratio < MIN_PACE:
                found.append(
                    f"{what} per second fell to {ratio:.2f} of those without faults: "
                    f"{MIN_PACE} is needed"
                )
        if self.cpu_ratio > MAX_CPU_RATIO:
            found.append(
                f"p99 of the CPU time of a manager call rose by {self.cpu_ratio:.2f}: "
                f"{MAX_CPU_RATIO} is allowed"
            )
        if len(self.looks) < 2:
            found.append("resources were looked at less than twice: run longer")
        else:
            found += growth(self.looks)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the report with its stable keys."""
        reasons = self.reasons()
        looks = [look.to_json() for look in self.looks]
        return {
            "version": VERSION,
            "ok": not reasons,
            "reasons": reasons,
            "seed": self.seed,
            "plan": "the seed alone decides the order in which faults are tried",
            "minutes": self.minutes,
            "seconds": round(self.seconds, 3),
            "num_faults": self.num_faults,
            "num_starting": self.num_starting,
            "faults": _by_kind(self.wanted, self.struck),
            "put_off": _by_kind(self.missed, self.missed),
            "without_faults": self.quiet.to_json(),
            "with_faults": self.faulty.to_json(),
            "call_cpu_p99_us": {
                "without_faults": round(self.cpu_p99_us[0], 3),
                "with_faults": round(self.cpu_p99_us[1], 3),
                "meaning": "the higher one of all calls and of the quiet half's mix",
            },
            "ratios": {
                "steps_per_s": round(self.step_ratio, 3),
                "requests_per_s": round(self.request_ratio, 3),
                "call_cpu_p99": round(self.cpu_ratio, 3),
            },
            "wrong_bytes": self.wrong_bytes,
            "num_quiescent": self.num_quiescent,
            "second_session": {
                "lives": self.second_lives,
                "blocks_compared": self.second_blocks_compared,
            },
            "resources": {
                "first": looks[0] if looks else {},
                "last": looks[-1] if looks else {},
                "highest": _highest(looks),
                "num_looks": len(looks),
            },
            "counters": self.counters,
        }

    def summary(self) -> str:
        """Return a few lines for people."""
        first = self.looks[0].to_json() if self.looks else {}
        last = self.looks[-1].to_json() if self.looks else {}
        compared = sum(
            (
                self.quiet.blocks_compared,
                self.faulty.blocks_compared,
                self.second_blocks_compared,
            )
        )
        quiet_us, faulty_us = self.cpu_p99_us
        lines = [
            f"seed {self.seed}: {self.seconds:.0f} s, {self.num_faults} faults at open "
            f"jobs, {self.num_starting} at starts, {len(self.wanted)} kinds and stages",
            f"{compared} blocks compared, {self.wrong_bytes} wrong; "
            f"{self.num_quiescent} quiescent moments; {self.second_lives} engines "
            f"killed or closed beside it",
            f"pace with faults: {self.step_ratio:.2f} of the steps, "
            f"{self.request_ratio:.2f} of the requests per second",
            f"p99 of a manager call: {quiet_us:.1f} us of CPU without faults, "
            f"{faulty_us:.1f} with: {self.cpu_ratio:.2f}",
            *(
                f"{name}: {first[name]} at first, {last[name]} at the end"
                for name in first
            ),
        ]
        reasons = self.reasons()
        lines += [f"NOT GREEN: {reason}" for reason in reasons] or ["green"]
        return "\n".join(lines)


def _by_kind(
    faults: Iterable[Fault], counts: Mapping[Fault, int]
) -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = {}
    for fault in faults:
        table.setdefault(fault.kind, {})[fault.stage.value] = counts.get(fault, 0)
    return table


def _highest(looks: list[dict[str, int]]) -> dict[str, int]:
    return {name: max(look[name] for look in looks) for name in (looks or [{}])[0]}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
