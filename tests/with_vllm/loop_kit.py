"""Many seeds of the scheduler loop, and what they must have shown together.

Covers: how many seeds, the least that must have happened, which faults are vLLM's.
Does not cover: one seed (``sched_traffic``).
Who calls it: the scheduler-loop tests, ``tools/vllm_loop.py``.

A run in which nothing was loaded, preempted, killed or reset proves nothing, so
``check`` asks for all of it.
"""

import itertools
import logging
import os

from sched_loop import make_model_dir
from sched_options import HAS_SYNC_LOADS, Options, total
from sched_traffic import run_seed

NUM_SEEDS = int(os.environ.get("SHMOFFLOAD_LOOP_SEEDS") or 6)
NUM_VARIANT_SEEDS = max(3, NUM_SEEDS // 2)
"""Of a loop with the copier of GPUs, or with two ranks."""
CUDA = {"is_cuda": True, "sync_load_bytes": (1 << 16) * HAS_SYNC_LOADS}
"""Copies as of a GPU, and 0.33's expedited loads in every seed."""
TIMEOUT_S = max(120, 8 * NUM_SEEDS)
NUM_REQUESTS = 80
MAX_TRIES = 4
"""Seeds tried for one that vLLM 0.32 lets run to its end."""
CONTROL_SEEDS = 12
"""A planted bug has to be found within so many."""

_CONTROL = {
    "is_reset_running": False,
    "is_grouped": False,
    "num_requests": 120,
    "blocks_per_chunk": 1,
    "is_prompt_only": False,
    "tier_bytes": 1 << 26,
}
CONTROLS = {
    "lost stores": _CONTROL
    | {"num_slots": 64, "num_gpu_blocks": 36, "max_delay": 0, "reset_share": 0.0},
    "open fence": _CONTROL
    | {
        "num_slots": 48,
        "num_gpu_blocks": 60,
        "max_delay": 12,
        "reset_share": 0.3,
        "tiers": ("memory",),
    },
    "early ends": _CONTROL
    | {"num_slots": 48, "num_gpu_blocks": 36, "max_delay": 12, "is_cuda": True},
    "fence of rank 0": _CONTROL
    | {
        "num_slots": 48,
        "num_gpu_blocks": 60,
        "max_delay": 0,
        "reset_share": 0.3,
        "tiers": ("memory",),
        "num_ranks": 2,
    },
    "stale offers": _CONTROL
    | {
        "is_grouped": True,
        "num_slots": 192,
        "num_gpu_blocks": 105,
        "max_delay": 2,
        "reset_share": 0.15,
        "tiers": ("slab",),
    },
}

KNOWN_VLLM_FAULT = "assert self._jobs[any_jid].is_store"
"""0.32, offloading/scheduler.py: a request is preempted by a reset and reloads in
one step; the connector then finds a load where it expects stores. 0.33 mended it."""

logging.getLogger("vllm").setLevel(logging.ERROR)


def model_dir(path):
    """Make the model folder below ``path``."""
    return make_model_dir(path / "model")


def seeds(path, *, first=0, num_requests=NUM_REQUESTS, plant=None, **words):
    """Run seed after seed; yields reports without end."""
    model = model_dir(path)
    for seed in itertools.count(first):
        options = Options.draw(seed, num_requests=num_requests, **words)
        yield run_seed(
            options, model_dir=model, work_dir=path / f"seed{seed}", plant=plant
        )


def run_seeds(
    path, *, is_reset_running, is_grouped=False, num_seeds=NUM_SEEDS, **words
):
    """Run seeds until ``num_seeds`` have run to their end, and enough has happened.

    What happens hangs on timing: a few more seeds are tried for what is missing.
    Returns all reports.
    """
    reports, num_ended = [], 0
    words |= {"is_reset_running": is_reset_running, "is_grouped": is_grouped}
    for report in seeds(path, **words):
        reports.append(report)
        num_ended += report.has_ended
        is_enough = num_ended >= num_seeds and not missing(total(reports))
        if is_enough or len(reports) == MAX_TRIES * num_seeds:
            return reports


def check_variant(path, *, is_reset_running=False, is_grouped=False, **words):
    """Run ``NUM_VARIANT_SEEDS`` seeds with options ``words``, and check them."""
    reports = run_seeds(
        path,
        is_reset_running=is_reset_running,
        is_grouped=is_grouped,
        num_seeds=NUM_VARIANT_SEEDS,
        **words,
    )
    check(reports, num_seeds=NUM_VARIANT_SEEDS)
    check_vllm_faults(reports)


def first_wrong(path, control, *, plant=None):
    """Run seeds until one reads a wrong byte; None if all were right.

    ``control``: options under which the planted bug shows often (``CONTROLS``).
    """
    running = seeds(path, plant=plant, **CONTROLS[control])
    for report in itertools.islice(running, CONTROL_SEEDS):
        if report.num_mismatches:
            return report
    return None


def check(reports, *, num_seeds=NUM_SEEDS):
    """Assert that nothing was wrong, and that enough happened to say so."""
    bad = [report for report in reports if not report.is_good]
    assert not bad, f"{len(bad)} of {len(reports)} seeds; the first: {bad[0]}"
    sums = total(reports)
    assert sums["num_ended"] >= num_seeds, sums
    ended = [report for report in reports if report.has_ended]
    assert sum(bool(report.hits) for report in ended) * 2 >= len(ended), sums
    assert not missing(sums), f"{missing(sums)} is 0: this run proves nothing: {sums}"


def missing(sums):
    """Name what has not happened in a run, of what makes it worth something."""
    needed = [
        "hits host",
        "num_preempted",
        "num_aborts",
        "num_resets",
        "num_kills",
        "num_stops",
    ]
    if HAS_SYNC_LOADS:
        needed.append("num_sync_steps")
    names = [name for name in needed if not sums.get(name)]
    if not sums.get("hits disk", 0) + sums.get("hits external_unspecified", 0):
        names.append("hits of tiers")
    return names


def check_vllm_faults(reports):
    """Assert that vLLM failed nowhere but where 0.32 is known to."""
    faults = [fault for report in reports for fault in report.vllm_faults]
    known = [fault for fault in faults if fault.endswith(KNOWN_VLLM_FAULT)]
    assert len(faults) == len(known), sorted(set(faults) - set(known))
    assert not (HAS_SYNC_LOADS and known), "0.33 has mended this"
