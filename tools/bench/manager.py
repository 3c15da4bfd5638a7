#!/usr/bin/env python3
"""What does a key cost in the scheduler? Our manager beside vLLM's.

Covers: CPU time of this thread per key in each public call, 64 keys a call, at
1,000 and 100,000 resident blocks, both managers in this process in alternating
rounds; growth to a million blocks beside a bare dict.
Does not cover: tiers that do something (``shmoffload replay --live``).
Who calls it: ``make bench-manager``, in the environment of ``tools/vllm_env.sh``.
Exit code 1: a goal is missed; 2: vLLM is not here (``--growth-only`` needs none).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
from statistics import median
from time import thread_time_ns
from typing import TYPE_CHECKING, Any

from manager_sides import OurSide, Side, VllmSide, copied, fresh_keys, load_vllm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shmoffload.core.types import OffloadKey

KEYS = 64
SIZES = (1_000, 100_000)
LARGEST = 1_000_000
MAX_GROWTH = 1.5
LOOKUP_GOAL = 0.25
OTHER_GOAL = 0.7
GOALS = {
    "lookup, hit": LOOKUP_GOAL,
    "lookup, waiting (pending)": LOOKUP_GOAL,
    "lookup, waiting (retry)": LOOKUP_GOAL,
    "prepare_load": OTHER_GOAL,
    "complete_load": OTHER_GOAL,
    "prepare_store, evicting": OTHER_GOAL,
    "prepare_store, free slots": OTHER_GOAL,
    "complete_store": OTHER_GOAL,
}
# Told without a goal: "lookup, promoting", "finish".
BARE = "bare dict lookup"

Times = dict[str, list[float]]
"""us per key by what was measured; one value per call of ``KEYS`` keys."""


class Watch:
    """Times calls on one side."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.times: Times = {}

    def lookups(self, what: str, keys: Sequence[OffloadKey], ctx: object) -> list[Any]:
        """Time one lookup per key; return the answers of a second, free pass."""
        lookup, poll = self.side.manager.lookup, self.side.poll
        start = thread_time_ns()
        poll()
        for key in keys:
            lookup(key, ctx)
        self._note(what, start)
        return [lookup(key, ctx).name for key in keys]

    def call(
        self,
        what: str,
        function: Callable[..., Any],
        *args: object,
        polls: bool = False,
    ) -> Any:  # noqa: ANN401
        """Time one call; return its result.

        ``polls``: the tier's answers are taken first, where vLLM's call does so.
        """
        poll = self.side.poll
        start = thread_time_ns()
        if polls:
            poll()
        result = function(*args)
        self._note(what, start)
        return result

    def _note(self, what: str, start: int) -> None:
        spent_us = (thread_time_ns() - start) / 1000 / KEYS
        self.times.setdefault(what, []).append(spent_us)


def load_batch(watch: Watch, keys: Sequence[OffloadKey]) -> None:
    """One request finds resident keys and loads them."""
    side, manager = watch.side, watch.side.manager
    ctx = side.request(keys)
    answers = watch.lookups("lookup, hit", keys, ctx)
    assert set(answers) == {"HIT"}, answers
    watch.call("prepare_load", manager.prepare_load, keys, ctx)
    side.end_step()
    watch.call("complete_load", manager.complete_load, keys, ctx)
    watch.call("finish", manager.on_request_finished, ctx)
    side.end_step()


def store_batch(watch: Watch) -> None:
    """Two requests store new keys: one must evict, one finds its slots free."""
    side, manager = watch.side, watch.side.manager
    for what in ("prepare_store, evicting", "prepare_store, free slots"):
        keys = fresh_keys(KEYS)
        ctx = side.request(keys)
        granted = watch.call(what, manager.prepare_store, keys, ctx, polls=True)
        assert len(granted.evicted_keys) == (KEYS if "evicting" in what else 0)
        side.end_step()
        if "evicting" in what:
            manager.complete_store(keys, ctx, False)  # leaves its slots free
        else:
            watch.call("complete_store", manager.complete_store, keys, ctx)
        side.answer()
        manager.on_request_finished(ctx)
        side.end_step()


def promote_batch(watch: Watch) -> None:
    """One request waits for keys that only the tier has."""
    side = watch.side
    keys = fresh_keys(KEYS)
    side.hold(keys)
    ctx = side.request(keys)
    watch.lookups("lookup, promoting", keys, ctx)
    side.end_step()
    answers = watch.lookups("lookup, waiting (pending)", keys, ctx)
    assert set(answers) == {"HIT_PENDING"}, answers
    side.end_step()
    side.answer()
    side.release(keys)
    side.manager.on_request_finished(ctx)
    side.end_step()


def retry_batch(watch: Watch) -> None:
    """One request waits for a tier that does not know yet."""
    side = watch.side
    keys = fresh_keys(KEYS)
    ctx = side.request(keys)
    for key in keys:
        side.manager.lookup(key, ctx)
    side.end_step()
    answers = watch.lookups("lookup, waiting (retry)", keys, ctx)
    assert set(answers) == {"RETRY"}, answers
    side.manager.on_request_finished(ctx)
    side.end_step()


def resident_sample(side: Side, candidates: Sequence[OffloadKey]) -> list[OffloadKey]:
    """Draw keys that are resident, as a new request would bring them."""
    resident = side.resident()
    chosen: dict[OffloadKey, None] = {}
    while len(chosen) < KEYS:
        key = random.choice(candidates)
        if key in resident:
            chosen[key] = None
    return copied(chosen)


def run_round(watches: Sequence[Watch], retrying: Sequence[Watch], calls: int) -> None:
    """Let each side do the same, one after the other."""
    for watch in watches:
        candidates = list(watch.side.resident())
        for _ in range(calls):
            load_batch(watch, resident_sample(watch.side, candidates))
            store_batch(watch)
            promote_batch(watch)
    for watch in retrying:
        for _ in range(calls):
            retry_batch(watch)


def quiet(function: Callable[[], None]) -> None:
    """Run without the garbage collector, as a server with frozen objects does."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        function()
    finally:
        gc.enable()
        gc.unfreeze()


def compare(num_blocks: int, *, rounds: int, calls: int) -> dict[str, Any]:
    """Measure both managers with so many resident blocks."""
    watches = [Watch(OurSide(num_blocks)), Watch(VllmSide(num_blocks))]
    retrying = [
        Watch(OurSide(num_blocks, retry=True)),
        Watch(VllmSide(num_blocks, retry=True)),
    ]
    for watch in watches + retrying:
        watch.side.fill(fresh_keys(num_blocks), KEYS)

    def measure() -> None:
        for number in range(rounds):
            order = 1 if number % 2 else -1
            run_round(watches[::order], retrying[::order], calls)
            if number == 0:
                for watch in watches + retrying:
                    watch.times.clear()  # everybody's first round warms up

    quiet(measure)
    ours = watches[0].times | retrying[0].times
    theirs = watches[1].times | retrying[1].times
    rows = {}
    for what in sorted(
        ours, key=lambda what: list(GOALS).index(what) if what in GOALS else 99
    ):
        mine, other = median(ours[what]), median(theirs[what])
        rows[what] = {
            "ours_us": mine,
            "vllm_us": other,
            "ratio": mine / other,
            "goal": GOALS.get(what),
        }
    return rows


def growth(*, rounds: int, calls: int) -> dict[str, Any]:
    """Measure ours and a bare dict at the smallest and the largest size."""
    sides = {size: OurSide(size) for size in (SIZES[0], LARGEST)}
    watches: dict[int, Watch] = {}
    bare: dict[int, dict[OffloadKey, None]] = {}
    times: dict[int, list[float]] = {}
    for size, side in sides.items():
        keys = fresh_keys(size)
        side.fill(keys, KEYS)
        watches[size], times[size] = Watch(side), []
        bare[size] = dict.fromkeys(keys)

    def measure() -> None:
        for _ in range(rounds):
            for size, side in sides.items():
                candidates = list(side.resident())
                known = list(bare[size])
                for _ in range(calls):
                    load_batch(watches[size], resident_sample(side, candidates))
                    store_batch(watches[size])
                    chosen = copied(random.sample(known, KEYS))
                    get, start = bare[size].get, thread_time_ns()
                    for key in chosen:
                        get(key)
                    times[size].append((thread_time_ns() - start) / 1000 / KEYS)

    quiet(measure)
    small, large = (watches[size].times | {BARE: times[size]} for size in sides)
    rows: dict[str, Any] = {}
    of_dict = median(large[BARE]) / median(small[BARE])
    for what in [BARE, *(w for w in small if w != BARE)]:
        times_more = median(large[what]) / median(small[what])
        rows[what] = {
            "small_us": median(small[what]),
            "large_us": median(large[what]),
            "growth": times_more,
            "beside_dict": times_more / of_dict,
            "goal": MAX_GROWTH if what in GOALS else None,
        }
    return rows


def table(title: str, columns: Sequence[str], rows: dict[str, Any]) -> list[str]:
    """Render one table; its last column is what the goal is about."""
    lines = [title, "  " + " " * 28 + "".join(f"{c:>12}" for c in (*columns, "goal"))]
    for what, row in rows.items():
        figures = "".join(f"{row[column]:12.2f}" for column in columns)
        goal = "" if row["goal"] is None else f"<= {row['goal']}"
        missed = "  MISSED" if is_missed(row, columns[-1]) else ""
        lines.append(f"  {what:28}{figures}{goal:>12}{missed}")
    return lines


def told(report: dict[str, Any]) -> str:
    """Render the report."""
    lines: list[str] = []
    for size, rows in report["cost"].items():
        title = f"{size:,} resident blocks, {KEYS} keys a call, us per key"
        lines += table(title, ("ours_us", "vllm_us", "ratio"), rows)
    title = f"growth from {SIZES[0]:,} to {LARGEST:,} resident blocks, us per key"
    columns = ("small_us", "large_us", "growth", "beside_dict")
    return "\n".join(lines + table(title, columns, report["growth"]))


def is_missed(row: dict[str, Any], figure: str) -> bool:
    """Say whether a row has a goal and misses it."""
    return row["goal"] is not None and row[figure] > row["goal"]


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--calls", type=int, default=8, help="per round and side")
    parser.add_argument("--growth-only", action="store_true", help="without vLLM")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report: dict[str, Any] = {"cost": {}, "growth": {}}
    if not args.growth_only:
        try:
            report["vllm"] = load_vllm().version
        except ModuleNotFoundError:
            print(
                "vLLM is not here: run tools/vllm_env.sh and this in .venv-vllm,"
                " or use --growth-only",
                file=sys.stderr,
            )
            return 2
        for size in SIZES:
            report["cost"][size] = compare(size, rounds=args.rounds, calls=args.calls)
    report["growth"] = growth(rounds=max(3, args.rounds // 2), calls=args.calls)
    missed = [
        what
        for rows, figure in (
            *((rows, "ratio") for rows in report["cost"].values()),
            (report["growth"], "beside_dict"),
        )
        for what, row in rows.items()
        if is_missed(row, figure)
    ]
    report["ok"] = not missed
    print(json.dumps(report, indent=1) if args.json else told(report))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
