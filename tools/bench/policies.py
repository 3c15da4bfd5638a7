#!/usr/bin/env python3
"""Does ``auto`` keep its promise on every recorded trace?

Covers: prefix hits of one policy in each cell (trace, share of the distinct blocks),
beside the better of vLLM's two policies and the offline optimum, which are read from
``anchors.json``; CPU time per cell.
Does not cover: tiers behind the primary (``shmoffload replay --plan --tier``).
Who calls it: ``make bench-policies``; a person. The agentic cells take minutes each.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from shmoffload.engine.policies import load_policy
from shmoffload.replay.plan.drive import drive
from shmoffload.replay.plan.traffic import Traffic
from shmoffload.replay.traces import read_trace

MIN_RATIO = 0.99
MIN_MEAN_OF_OPTIMUM = 0.74
NUM_CELLS = 16
SHARES = (0.01, 0.05, 0.1, 0.25)
CONVERSATION_RATES = dict(zip(SHARES, (0.085, 0.215, 0.298, 0.367), strict=True))


@dataclass(frozen=True)
class Cell:
    """One policy at one capacity on one trace."""

    trace: str
    share: float
    slots: int
    hits: int
    best_of_vllm: int
    optimum: int
    accesses: int
    cpu_s: float

    @property
    def ratio(self) -> float:
        """Hits beside the better of vLLM's lru and arc."""
        return self.hits / self.best_of_vllm

    @property
    def is_good(self) -> bool:
        """Whether the promise for this cell is kept."""
        rate = CONVERSATION_RATES.get(self.share, 0.0)
        if not self.trace.endswith("conversation"):
            rate = 0.0
        return self.ratio >= MIN_RATIO and self.hits / self.accesses >= rate

    def __str__(self) -> str:
        return (
            f"{self.trace:24}{self.share:5.0%}{self.slots:8,}{self.hits:12,}"
            f"{self.best_of_vllm:12,}{self.ratio:8.4f}"
            f"{self.hits / self.optimum:8.4f}{self.cpu_s:8.1f}"
            f"{'' if self.is_good else '  below its promise'}"
        )


def measure(
    traffic: Traffic, policy: str, trace: str, share: float, data: Path
) -> Cell:
    """Run one cell."""
    anchors = json.loads((data / "anchors.json").read_text())[trace]
    cell = next(c for key, c in anchors["cells"].items() if float(key) == share)
    slots = cell["capacity"]
    start_s = time.process_time()
    driven = drive(traffic, policy=load_policy(policy, slots), num_slots=slots)
    return Cell(
        trace,
        share,
        slots,
        driven.prefix_hits,
        max(cell["lru"]["prefix_hits"], cell["arc_vllm"]["prefix_hits"]),
        cell["min"]["prefix_hits"],
        traffic.num_blocks,
        time.process_time() - start_s,
    )


def main() -> int:
    """Measure what was asked for; 1 if a promise is broken, 2 without data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of traces and anchors.json")
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--trace", action="append", help="name; default all")
    parser.add_argument("--share", action="append", type=float, help="default all four")
    parser.add_argument("--json", action="store_true", help="one object per cell")
    args = parser.parse_args()
    if not (args.data / "anchors.json").is_file():
        print(f"{args.data} has no anchors.json: give the folder with the traces")
        return 2
    known = json.loads((args.data / "anchors.json").read_text())
    cells: list[Cell] = []
    if not args.json:
        print(f"{'trace':24}{'share':>5}{'slots':>8}{args.policy:>12}", end="")
        print(f"{'lru or arc':>12}{'ratio':>8}{'of min':>8}{'CPU s':>8}")
    for trace in args.trace or known:
        path = args.data / f"{trace}.ptrace.zst"
        traffic = Traffic.of(read_trace(path, block_tokens=512))
        for share in args.share or SHARES:
            cells.append(measure(traffic, args.policy, trace, share, args.data))
            row = json.dumps(asdict(cells[-1])) if args.json else str(cells[-1])
            print(row, flush=True)
    mean = sum(cell.hits / cell.optimum for cell in cells) / len(cells)
    is_mean_good = len(cells) < NUM_CELLS or mean >= MIN_MEAN_OF_OPTIMUM
    if not args.json:
        print(f"mean of min over {len(cells)} cells: {mean:.4f}")
    return int(not (is_mean_good and all(cell.is_good for cell in cells)))


if __name__ == "__main__":
    sys.exit(main())
