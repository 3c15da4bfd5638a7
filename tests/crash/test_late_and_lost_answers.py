"""Answers that come late, twice or never, between a real worker and a real engine."""

import death_kit as dk
import pytest

from shmoffload.engine import Engine
from shmoffload.testing.faults.deaths import Death, strike, wait_gone, worker_pid
from shmoffload.testing.faults.link import FaultyLink
from shmoffload.testing.poll import wait_until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def control(tmp_path):
    made = dk.make_control(tmp_path)
    yield made
    made.clear()


def step_until(engine, is_it, what):
    wait_until(lambda: dk.kit.step(engine) or is_it(), timeout_s=dk.WAIT_S, what=what)


def test_an_answer_that_comes_twice_counts_once(session_name, tmp_path, control):
    with dk.watch(Engine(dk.make_config(session_name, tmp_path))) as engine:
        link = FaultyLink.of(engine)
        link.duplicate(times=3)
        dk.reach("idle", engine, control)
        dk.check_serves(engine, ["idle"], late_replies=3)
        assert link.num_struck("duplicate") == 3


def test_an_answer_that_comes_after_its_workers_death(session_name, tmp_path, control):
    """The job has failed by then, its slots are others': the answer changes nothing."""
    with dk.watch(Engine(dk.make_config(session_name, tmp_path))) as engine:
        link = FaultyLink.of(engine)
        dk.reach("mid-load", engine, control)
        link.hold()
        control.release()
        step_until(engine, lambda: link.num_kept == 1, "the answer")
        assert engine.tiers[0].num_open_jobs == 1  # whole, and not known to be
        pid = worker_pid(session_name)
        assert strike(pid, Death.SIGKILL)
        wait_gone(pid)
        step_until(engine, lambda: engine.tiers[0].jobs_lost == 1, "the death")
        dk.settle(engine)
        dk.check_quiet(engine)
        link.release()
        dk.kit.step(engine)
        dk.check_quiet(engine, late_replies=1)
        dk.check_serves(engine, ["mid-load"], late_replies=1)


def test_an_answer_that_never_comes_costs_the_worker_its_life(
    session_name, tmp_path, control
):
    """Nobody can tell it from one that hangs: past the deadline only death frees."""
    config = dk.make_config(session_name, tmp_path, job_deadline_s=2.0)
    with dk.watch(Engine(config)) as engine:
        link = FaultyLink.of(engine)
        dk.reach("idle", engine, control)
        pid = worker_pid(session_name)
        link.lose()
        ctx = dk.kit.request(engine, "lost")
        keys = dk.kit.keys_of(5000, dk.NUM_KEYS)
        assert dk.kit.store(engine, ctx, keys) == keys
        engine.on_request_finished(ctx)
        step = dk.fenced(engine, pid)
        wait_until(
            lambda: step() or engine.tiers[0].jobs_lost,
            timeout_s=dk.WAIT_S,
            what="the worker to be killed",
        )
        assert engine.tiers[0].jobs_lost == link.num_struck("lose") == 1
        dk.settle(engine)
        dk.check_serves(engine, ["idle"])
        assert worker_pid(session_name) != pid
