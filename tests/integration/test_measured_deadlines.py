"""Real workers: a hang is found by measured speed, and a slow load is a miss.

The configured maximum is an hour here: whatever ends in a test was measured.
"""

import time

import engine_kit as kit
import pytest

from shmoffload.core.types import LookupResult, ReqContext
from shmoffload.engine import Engine
from shmoffload.testing.faults.control import Call, Control
from shmoffload.testing.poll import wait_until
from shmoffload.wire.session import TierWord

pytestmark = pytest.mark.timeout(300)

WAIT_S = 60
HOUR_S = 3600.0


def config_of(session, control, *, min_s, **limits):
    tiers = [
        {
            "type": "faulty",
            "path": str(control.folder),
            "max_bytes": "4MiB",
            "min_free": 0,
            "nice": 0,
        },
        {"type": "memory", "max_bytes": "4MiB", "nice": 0},
    ]
    return kit.make_config(
        session,
        tiers,
        slots=64,
        job_deadline_s=HOUR_S,
        job_deadline_min_s=min_s,
        hung_after_s=HOUR_S,
        heartbeat_s=0.1,
        restart_backoff_s=0.05,
        restart_backoff_max_s=0.2,
        start_timeout_s=90.0,
        **limits,
    )


@pytest.fixture
def control(tmp_path):
    made = Control(tmp_path / "faulty", inner="memory")
    yield made
    made.clear()


def epochs(engine):
    return [tier.worker_epoch for tier in engine.tiers]


def store_jobs(engine, *starts, num_keys=4):
    """Store blocks, one job after the other."""
    ctx = kit.request(engine, f"store-{starts[0]}")
    for start in starts:
        assert kit.store(engine, ctx, kit.keys_of(start, num_keys))
        assert engine.wait_idle(WAIT_S)
    engine.on_request_finished(ctx)
    kit.step(engine)


def open_jobs(engine, tier_idx=0):
    jobs = engine.manager._desk.open.values()
    return [job for job in jobs if job.tier_idx == tier_idx]


def stepping_until(engine, is_it, what):
    def step():
        kit.step(engine)
        return is_it()

    wait_until(step, timeout_s=WAIT_S, what=what)


def test_a_quick_tier_that_hangs_is_killed_long_before_the_maximum(
    session_name, control
):
    """Its slots are free only then, the other tier is left alone, and it is back."""
    with Engine(config_of(session_name, control, min_s=2.0)) as engine:
        store_jobs(engine, *range(0, 50, 10))
        assert engine.manager.counters.overdue_jobs == 0
        before = epochs(engine)
        control.hold(Call.PUT)
        ctx = kit.request(engine, "held")
        held = kit.store(engine, ctx, kit.keys_of(100, 4))
        control.wait_held(Call.PUT, meanwhile=lambda: kit.step(engine))
        (job,) = open_jobs(engine)
        assert job.deadline_s - job.submitted_s < HOUR_S / 2
        assert [engine.manager.table.blocks[key].pins > 0 for key in held] == [True] * 4
        stepping_until(engine, lambda: not open_jobs(engine), "the job to be given up")
        assert engine.manager.counters.overdue_jobs == 1
        assert engine.manager.counters.cascade_jobs_failed == [1, 0]
        assert engine.manager.table.num_pinned == 0
        control.release()
        stepping_until(
            engine, lambda: all(tier.is_up for tier in engine.tiers), "the tier"
        )
        now = epochs(engine)
        assert now[0] > before[0]
        assert now[1] == before[1]
        # What was measured of the dead one does not count for the new one.
        control.hold(Call.PUT)
        kit.store(engine, ctx, kit.keys_of(200, 4))
        (job,) = open_jobs(engine)
        assert job.deadline_s - job.submitted_s == pytest.approx(HOUR_S)
        control.release()
        assert engine.wait_idle(WAIT_S)
        assert engine.manager.counters.overdue_jobs == 1


def test_the_deadline_reaches_the_worker(session_name, control):
    """A job that waits behind a slow one for too long is not begun any more."""
    with Engine(config_of(session_name, control, min_s=2.0)) as engine:
        store_jobs(engine, *range(0, 50, 10))
        ctx = kit.request(engine, "a")
        control.hold(Call.PUT)
        kit.store(engine, ctx, kit.keys_of(100, 4))
        control.wait_held(Call.PUT, meanwhile=lambda: kit.step(engine))
        kit.store(engine, ctx, kit.keys_of(200, 4))
        last_s = max(job.deadline_s for job in open_jobs(engine))
        wait_until(
            lambda: time.monotonic() > last_s, timeout_s=WAIT_S, what="the deadline"
        )
        num_done = engine.page.get_tier(0, TierWord.JOBS_DONE)
        control.release()
        wait_until(  # without a look: the next one would have it killed
            lambda: engine.page.get_tier(0, TierWord.JOBS_DONE) == num_done + 2,
            timeout_s=WAIT_S,
            what="both answers",
        )
        assert engine.wait_idle(WAIT_S)
        assert engine.manager.counters.overdue_jobs == 0
        assert engine.tiers[0].last_error == "the job's deadline has passed"


def test_a_tier_that_was_always_slow_is_left_alone(session_name, control):
    """It takes longer than the minimum, but not much longer than it ever did."""
    with Engine(config_of(session_name, control, min_s=1.0)) as engine:
        before = epochs(engine)
        control.slow(Call.PUT, 0.5)
        store_jobs(engine, *range(0, 50, 10))
        control.slow(Call.PUT, 1.2)
        ctx = kit.request(engine, "slower")
        kit.store(engine, ctx, kit.keys_of(100, 4))
        (job,) = open_jobs(engine)
        patience_s = job.deadline_s - job.submitted_s
        assert 16 * 0.5 <= patience_s < HOUR_S / 2
        assert engine.wait_idle(WAIT_S)
        assert epochs(engine) == before
        assert engine.manager.counters.overdue_jobs == 0


def asks(engine, name, keys):
    positions = {key: 16 * (i + 1) for i, key in enumerate(keys)}
    ctx = ReqContext(name, key_positions=positions)
    engine.on_new_request(ctx)
    return ctx


def test_a_load_that_is_slower_than_prefill_is_a_miss_and_lands(session_name, control):
    config = config_of(session_name, control, min_s=HOUR_S, prefill_s_per_block=0.001)
    with Engine(config) as engine:
        old = [kit.keys_of(start, 8) for start in range(0, 60, 10)]
        store_jobs(engine, *range(0, 60, 10), num_keys=8)
        engine.tiers[1]._resident.clear()  # else it would serve
        control.slow(Call.GET, 0.2)
        kit.drop_primary(engine)
        for i in range(4):
            some = old[i][: 1 + 2 * i]
            ctx = asks(engine, f"teach-{i}", some)
            assert kit.load(engine, ctx, some) == len(some)
            engine.on_request_finished(ctx)
            kit.step(engine)
        assert engine.manager.counters.promotions_declined == [0, 0]
        ctx = asks(engine, "declined", old[5])
        assert kit.scan(engine, ctx, old[5]) == 0
        assert engine.manager.counters.promotions_declined == [8, 0]
        engine.on_request_finished(ctx)
        kit.step(engine)
        assert engine.page.get_tier(0, TierWord.BLOCKS_DECLINED) == 8
        stepping_until(
            engine, lambda: not engine.has_pending_work(), "the blocks to land"
        )
        ctx = asks(engine, "next", old[5])
        engine.step_begin()
        answers = {engine.lookup(key, ctx) for key in old[5]}
        assert answers == {LookupResult.HIT}
        assert kit.load(engine, ctx, old[5]) == 8
        engine.on_request_finished(ctx)
        kit.step(engine)
