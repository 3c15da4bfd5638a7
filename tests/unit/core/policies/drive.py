"""Pushes recorded requests through a manager, one at a time, without bytes.

Covers: the model of the recorded anchors: look up, load the leading run, offer every
full block, all copies complete at once, finish.
Does not cover: tiers, several requests at once.
Who calls it: tests of policies.
"""

import functools
import json
from pathlib import Path

import pytest

from shmoffload.core.manager import TieringOffloadingManager
from shmoffload.core.policies.registry import make_policy
from shmoffload.core.types import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from shmoffload.replay.traces import read_trace

DATA = Path(__file__).parents[5] / "shared" / "data"
SHARES = ("0.01", "0.05", "0.1", "0.25")
BLOCK_TOKENS = 512


def cells_of(trace):
    """Return the anchors of a trace by share, or skip where there are none."""
    if not DATA.is_dir():
        pytest.skip("the recorded traces are not beside the checkout")
    anchors = json.loads((DATA / "anchors.json").read_text())
    return anchors[trace]["cells"]


@functools.cache
def requests_of(trace):
    """Return the keys of every request of a trace, heads first."""
    if not DATA.is_dir():
        pytest.skip("the recorded traces are not beside the checkout")
    work = read_trace(DATA / f"{trace}.ptrace.zst", block_tokens=BLOCK_TOKENS)
    names = {}
    return [
        [names.setdefault(block, make_offload_key(block)) for block in request.hashes]
        for request in work.requests
    ]


def drive(policy, num_slots, requests, *, part=None):
    """Return the prefix hits of a policy, by name or object.

    ``part``: blocks per offer; all of a request at once if None.
    """
    if isinstance(policy, str):
        policy = make_policy(policy, num_slots)
    manager = TieringOffloadingManager(num_slots, [], block_bytes=1, policy=policy)
    longest = max(map(len, requests))
    positions = range(BLOCK_TOKENS, (longest + 1) * BLOCK_TOKENS, BLOCK_TOKENS)
    end = ScheduleEndContext()
    total = 0
    for number, keys in enumerate(requests):
        ctx = ReqContext(str(number), None, dict(zip(keys, positions, strict=False)))
        manager.on_new_request(ctx)
        num = 0
        for key in keys:
            if manager.lookup(key, ctx) is not LookupResult.HIT:
                break
            num += 1
        if num:
            manager.prepare_load(keys[:num], ctx)
            manager.complete_load(keys[:num], ctx)
            total += num
        step = part or len(keys) or 1
        for first in range(0, len(keys), step):
            granted = manager.prepare_store(keys[first : first + step], ctx)
            if granted is not None:
                manager.complete_store(granted.keys_to_store, ctx)
        manager.on_request_finished(ctx)
        manager.on_schedule_end(end)
    manager.check_integrity()
    return total
