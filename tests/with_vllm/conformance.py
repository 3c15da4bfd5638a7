"""A pytest plugin that points vLLM's own manager tests at our manager.

Covers: building our manager where vLLM's test file builds its own, playing the
scheduler's part that the tests leave out, one line per outcome.
Does not cover: fetching the file (``tools/vllm_tests.sh``), which failures are
expected and why (``test_vllm_conformance.py``).
Who calls it: ``python -m pytest -p conformance``, in a process of its own.

What is added to the calls of a test, and nothing else:

- a request that is not known yet is announced first, as the scheduler does;
- every call but a lookup ends its step, and an offer begins a new one: a test has
  no steps, and ours keep what was answered HIT until the step ends;
- slot ids are handed out as vLLM's ``CPULoadStoreSpec``, which the tests look for;
- a reset preempts the requests that run, as ``reset_running_requests`` does: ours
  stores nothing of a request that runs on across one;
- a touch is a request of its own, over at once: ours count a use when its request
  finishes, and no scheduler calls ``touch``;
- figures that have not changed are said again: ours are said when they change;
- ``_policy`` of arc, ``counts``, ``medium`` and one more show what ours has.
"""

import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.v1.kv_offload.base import Medium, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.policies.arc import ARCCachePolicy

from shmoffload.core.policies.arc import ArcPolicy
from shmoffload.core.slots import READY
from shmoffload.engine import Engine
from shmoffload.testing import leaks
from shmoffload.vllm.manager import ShmOffloadingManager
from shmoffload.vllm.report.metric_names import DEFINITIONS, Kind
from shmoffload.vllm.setup.settings import Settings
from shmoffload.wire import config as wire_config

BLOCK_BYTES = 4096
SWAPPED = "CPUOffloadingManager"
STEP_END = ScheduleEndContext((), ())


class ArcView(ARCCachePolicy):
    """Our ``arc`` under the names by which the tests look into vLLM's."""

    def __init__(self, policy, table):
        self._ours = policy
        self._table = table
        self.cache_capacity = table.num_slots

    def get(self, key):
        block = self._table.blocks.get(key)
        return block and SimpleNamespace(is_ready=block.state == READY)

    t1 = property(lambda self: self._ours._t1)
    t2 = property(lambda self: self._ours._t2)
    b1 = property(lambda self: self._ours._b1)
    b2 = property(lambda self: self._ours._b2)

    @property
    def target_t1_size(self):
        return self._ours._target

    @target_t1_size.setter
    def target_t1_size(self, value):
        self._ours._target = value


class RepeatedStats:
    """Figures, with those of before that have not changed since."""

    def __init__(self):
        self._last = {}

    def add(self, stats):
        kinds, figures = stats.data["types"], stats.reduce()
        for name, value in list(self._last.items()):
            self._last[name] = value if DEFINITIONS[name].kind is Kind.GAUGE else 0
        for name, value in figures.items():
            if name in kinds and kinds[name] != "histogram":
                self._last[name] = value
        self._now = {**self._last, **figures}
        return self

    def reduce(self):
        return self._now


class SteppedManager:
    """Our manager, for callers that have neither steps nor announced requests."""

    medium = Medium.CPU

    def __init__(self, engine, settings):
        self._engine = engine
        self._ours = ShmOffloadingManager(engine, settings)
        self._stats = RepeatedStats()
        self._known = set()
        self._touches = itertools.count()
        policy = engine.manager._policy
        if isinstance(policy, ArcPolicy):
            self._policy = ArcView(policy, engine.manager.table)

    def _announce(self, ctx):
        if ctx.req_id not in self._known:
            self._known.add(ctx.req_id)
            self._ours.on_new_request(ctx)

    def _end_step(self):
        self._ours.on_schedule_end(STEP_END)

    def lookup(self, key, ctx):
        self._announce(ctx)
        return self._ours.lookup(key, ctx)

    def prepare_load(self, keys, ctx):
        self._announce(ctx)
        spec = self._ours.prepare_load(keys, ctx)
        self._end_step()
        return CPULoadStoreSpec(spec.block_ids)

    def complete_load(self, keys, ctx):
        self._ours.complete_load(keys, ctx)
        self._end_step()

    def prepare_store(self, keys, ctx):
        self._end_step()
        self._announce(ctx)
        output = self._ours.prepare_store(keys, ctx)
        self._end_step()
        if output is not None:
            output.store_spec = CPULoadStoreSpec(output.store_spec.block_ids)
        return output

    def complete_store(self, keys, ctx, success=True):
        self._ours.complete_store(keys, ctx, success)
        self._end_step()

    def touch(self, keys, ctx):
        toucher = ReqContext(f"touch-{next(self._touches)}")
        self._ours.on_new_request(toucher)
        self._ours.touch(keys, toucher)
        self._ours.on_request_finished(toucher)

    def reset_cache(self):
        self._ours.reset_cache()
        self._ours.on_schedule_end(ScheduleEndContext((), tuple(self._known)))

    def on_request_finished(self, ctx):
        self._known.discard(ctx.req_id)
        self._ours.on_request_finished(ctx)
        self._end_step()

    def get_stats(self):
        return self._stats.add(self._ours.get_stats())

    @property
    def counts(self):
        offers = self._engine.manager._stores._offers
        return offers and offers._counts

    @property
    def stores_skipped_in_current_batch(self):
        return self._engine.manager.counters.stores_skipped

    def __getattr__(self, name):
        if name.startswith("_"):  # vLLM's insides: ours has none of that name
            raise AttributeError(name)
        return getattr(self._ours, name)


_open = []


def make_manager(
    num_chunks,
    cache_policy="lru",
    cache_policy_module_path=None,
    enable_events=False,
    store_threshold=0,
    max_tracker_size=64_000,
):
    """Build our manager from what vLLM's takes; no tiers, so no other process."""
    assert cache_policy_module_path is None
    config = wire_config.from_dict(
        {
            "session": {"name": leaks.new_session_name()},
            "primary": {
                "block_bytes": BLOCK_BYTES,
                "slots": num_chunks,
                "policy": cache_policy,
                "store_threshold": store_threshold,
                "max_tracker_size": max_tracker_size,
            },
        }
    )
    settings = Settings(
        config=config,
        num_ranks=1,
        rank=0,
        is_replicated=False,
        part_bytes=BLOCK_BYTES,
        blocks_per_chunk=1,
        has_events=enable_events,
        tier_events=(),
        notes=(),
    )
    engine = Engine(config, events=enable_events)
    _open.append(engine)
    return SteppedManager(engine, settings)


def pytest_collection_modifyitems(items):
    for module in {item.module for item in items}:
        assert hasattr(module, SWAPPED), f"{module} has no {SWAPPED} to swap"
        setattr(module, SWAPPED, make_manager)


@pytest.fixture(autouse=True)
def _close_engines():
    yield
    while _open:
        _open.pop().close()


def pytest_runtest_logreport(report):
    """Append ``name<TAB>outcome<TAB>first line of the error`` to a file."""
    out = os.environ.get("SHMOFFLOAD_CONFORMANCE_OUT")
    if out is None or (report.when != "call" and report.passed):
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    why = crash.message.splitlines()[0] if crash else ""
    name = report.nodeid.partition("::")[2]
    outcome = report.outcome if report.when == "call" else f"{report.when} error"
    with Path(out).open("a") as lines:
        lines.write(f"{name}\t{outcome}\t{why}\n")
