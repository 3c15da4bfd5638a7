"""One session with a tier that can be held, for the matrix of deaths.

The tier is the fault kit's; a folder says where it holds. The same module is the
engine's side, in the test's process and in ``doomed_engine``.
"""

import re
import resource
import sys
import threading
from pathlib import Path

from shmoffload.engine import Engine
from shmoffload.testing.faults.control import Call, Control
from shmoffload.testing.faults.deaths import supervisor_pid, worker_pid
from shmoffload.testing.poll import wait_until
from shmoffload.wire.session import TierWord

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "integration"))

import engine_kit as kit  # noqa: E402
from supervisor_kit import is_alive  # noqa: E402

NUM_SLOTS, NUM_KEYS = 32, 6
STAGES = ["starting", "idle", "mid-load", "mid-store", "draining"]
EXIT_CODE = 7
WAIT_S = 60
NEVER_WAITING = (
    *("step_begin", "on_schedule_end", "flush", "on_new_request", "lookup"),
    *("prepare_load", "complete_load", "prepare_store", "complete_store"),
    *("on_request_finished", "has_pending_work", "reset_cache", "touch"),
)
"""Calls of a step: none of them waits, whoever dies (INV-31)."""
LEFT_BY_A_TIER = re.compile(r"lock|slab\.bin|index\.sqlite|[0-9a-f]{72}")
"""All that a fresh start and an orderly end leave in a tier's directory."""


def blocks(stage):
    """Keys of a stage: in the tiers before it, under way in it, stored after it."""
    first = 1000 * STAGES.index(stage)
    return [kit.keys_of(first + at, NUM_KEYS) for at in (0, 100, 200)]


def make_control(folder, inner=None):
    """Return what tells the faulty tier of a test what to do wrong."""
    return Control(folder / "tier", inner=inner)


def make_config(
    session,
    folder,
    *,
    slots=NUM_SLOTS,
    max_bytes="2MiB",
    hung_after_s=30.0,
    start_timeout_s=90.0,
    job_deadline_s=20.0,
):
    """Hangs are found late unless asked for: a busy machine looks like one."""
    tiers = [
        {
            "type": "faulty",
            "path": str(folder / "tier"),
            "max_bytes": max_bytes,
            "min_free": 0,
            "nice": 0,
        },
        {"type": "memory", "max_bytes": "2MiB", "nice": 0},
    ]
    return kit.make_config(
        session,
        tiers,
        slots=slots,
        heartbeat_s=0.1,
        hung_after_s=hung_after_s,
        job_deadline_s=job_deadline_s,
        job_deadline_min_s=job_deadline_s,  # nobody dies here of a slow machine
        start_timeout_s=start_timeout_s,
        restart_backoff_s=0.05,
        restart_backoff_max_s=0.2,
        close_timeout_s=20.0,
    )


def watch(engine):
    """Have every call of a step note whether its thread gave up the processor."""
    engine.waits = []

    def watched(name):
        call = getattr(engine, name)

        def run(*args, **kwargs):
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
            try:
                return call(*args, **kwargs)
            finally:
                after = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
                # Beside another thread of ours it may have waited for that one.
                if after != before and threading.active_count() == 1:
                    engine.waits.append((name, after - before))

        return run

    for name in NEVER_WAITING:
        setattr(engine, name, watched(name))
    return engine


def reach(stage, engine, control):
    """Bring an engine that is up to a stage, its old blocks in both tiers."""
    old, new, _ = blocks(stage)
    ctx = kit.request(engine, "old")
    assert kit.store(engine, ctx, old) == old
    assert engine.wait_idle(WAIT_S)
    engine.on_request_finished(ctx)
    kit.step(engine)
    if stage in ("mid-store", "draining"):
        control.hold(Call.PUT)
        ctx = kit.request(engine, "new")
        kit.store(engine, ctx, new)
        engine.on_request_finished(ctx)
        control.wait_held(Call.PUT, meanwhile=lambda: kit.step(engine))
    elif stage == "mid-load":
        kit.drop_primary(engine)
        control.hold(Call.GET)
        ctx = kit.request(engine, "load")
        assert kit.scan(engine, ctx, old) is None
        control.wait_held(Call.GET, meanwhile=lambda: kit.scan(engine, ctx, old))
        engine.on_request_finished(ctx)
        kit.step(engine)


def is_all_up(engine):
    kit.step(engine)
    return all(tier.is_up for tier in engine.tiers)


def fenced(engine, pid):
    """Return a step after which no job may be over while its dead man lives.

    For a worker that can no longer answer: only its proven death frees its slots.
    """
    num_jobs = engine.tiers[0].num_open_jobs

    def step():
        kit.step(engine)
        is_over = engine.tiers[0].num_open_jobs < num_jobs
        assert not (is_over and is_alive(pid)), "a job ended before its worker"

    return step


def settle(engine):
    """Wait until every tier is up and every job answered."""
    wait_until(lambda: is_all_up(engine), timeout_s=WAIT_S, what="all tiers to be up")
    assert engine.wait_idle(WAIT_S)
    kit.step(engine)


def check_quiet(engine, *, late_replies=0):
    """Nothing is open, pinned or lost, no answer came twice, and no call waited."""
    engine.manager.check_integrity()
    table = engine.manager.table
    assert not engine.is_broken
    assert not engine.has_pending_work()
    assert table.num_pending == table.num_pinned == table.num_quarantined == 0
    assert len(table.blocks) + table.num_free == table.num_slots
    assert [tier.num_open_jobs for tier in engine.tiers] == [0, 0]
    assert [tier.late_replies for tier in engine.tiers] == [late_replies, 0]
    assert [tier.open_store_bytes for tier in engine.tiers] == [0, 0]
    assert getattr(engine, "waits", []) == []


def check_serves(engine, stages, *, late_replies=0):
    """Old blocks come back from a tier with right bytes, new ones are taken."""
    kit.drop_primary(engine)
    ctx = kit.request(engine, "again")
    for stage in stages:
        old, new, later = blocks(stage)
        assert kit.load(engine, ctx, old) == NUM_KEYS
        assert 0 <= kit.load(engine, ctx, new) <= NUM_KEYS  # right bytes or a miss
    kit.store(engine, ctx, later)
    assert engine.wait_idle(WAIT_S)
    kit.drop_primary(engine)
    assert kit.load(engine, ctx, later) == NUM_KEYS
    engine.on_request_finished(ctx)
    kit.step(engine)
    check_quiet(engine, late_replies=late_replies)


def check_storage(control):
    """Nothing but blocks is left of all the deaths, once all have left in order."""
    files = [path for path in control.store.rglob("*") if path.is_file()]
    assert files
    assert [p for p in files if not LEFT_BY_A_TIER.fullmatch(p.name)] == []


class Neighbour:
    """Another live session, which deaths in the first one must not touch."""

    def __init__(self, session):
        tiers = [{"type": "memory", "max_bytes": "1MiB", "nice": 0}]
        self.engine = Engine(kit.make_config(session, tiers, slots=8))
        self.session = session
        self.keys = kit.keys_of(90_000, 4)

    def __enter__(self):
        ctx = kit.request(self.engine, "neighbour")
        assert kit.store(self.engine, ctx, self.keys) == self.keys
        assert self.engine.wait_idle(WAIT_S)
        self.seen = self.look()
        return self

    def look(self):
        pids = worker_pid(self.session), supervisor_pid(self.session)
        assert all(pids)
        return pids, self.engine.page.get_tier(0, TierWord.RESTARTS)

    def __exit__(self, *_):
        try:
            kit.drop_primary(self.engine)
            ctx = kit.request(self.engine, "again")
            assert kit.load(self.engine, ctx, self.keys) == len(self.keys)
            assert self.look() == self.seen
            assert not self.engine.is_broken
        finally:
            self.engine.close()
