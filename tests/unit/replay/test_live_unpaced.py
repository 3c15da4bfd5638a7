"""``--speed max``: the next request comes when there is room."""

import math

from paper_engine import FakeEngine

from shmoffload.replay.live import AS_FAST_AS_IT_COMPLETES, LoopSettings, SchedulerLoop
from shmoffload.replay.requests import ReplayRequest, Workload

HOUR_S = 3600.0


def workload(num_requests):
    return Workload(
        "hours apart",
        16,
        [
            ReplayRequest(
                req_id=f"r{i}",
                arrival_s=i * HOUR_S,
                num_input_tokens=16 * 3 + 1,
                num_output_tokens=4,
                hashes=[b"head0000", b"%08d" % (i // 2), b"%08d" % (100 + i // 2)],
            )
            for i in range(num_requests)
        ],
    )


def run(engine, num_requests, *, on_step=None, **settings):
    loop = SchedulerLoop(
        engine,
        workload(num_requests),
        LoopSettings(speed=AS_FAST_AS_IT_COMPLETES, **settings),
        on_step=on_step,
    )
    loop.run()
    return loop


def test_recorded_times_do_not_matter():
    loop = run(FakeEngine(slots=64), 20, max_num_seqs=4)
    assert loop.figures.num_requests == 20
    assert loop.now_s() < 60
    assert loop.figures.max_running <= 4
    # Waits count from when a request came, not from when it was recorded.
    assert min(loop.figures.resolved_s) >= 0
    assert max(loop.figures.resolved_s) < 60


def test_one_at_a_time_ends_before_the_next_begins():
    def on_step(loop):
        assert len(loop._waiting) + len(loop._running) <= 1

    engine = FakeEngine(slots=64, tiers=())
    loop = run(engine, 20, max_num_seqs=1, on_step=on_step)
    # Each second one finds all three blocks of the one before it, others the head.
    assert loop.figures.prefix_hits == 10 * 3 + 9 * 1
    assert loop.figures.max_running == 1


def test_steps_that_move_something_are_not_paced():
    loop = run(FakeEngine(slots=64), 20, max_num_seqs=1, step_ms=500)
    assert loop.num_steps > 20 * 5
    assert loop.now_s() < 20 * 5 * 0.5 / 4
    assert math.isinf(loop.settings.speed)
