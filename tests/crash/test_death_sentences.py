"""A death is told once, in one sentence; those of signals are in the matrix."""

import re

import death_kit as dk
import pytest

from shmoffload.engine import Engine
from shmoffload.testing.faults.deaths import Death, strike, wait_gone, worker_pid
from shmoffload.testing.poll import wait_until
from shmoffload.wire.messages import WorkerGone

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def control(tmp_path):
    made = dk.make_control(tmp_path)
    yield made
    made.clear()


def deaths_in(caplog):
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if "of its jobs failed" in text]


def test_who_misses_a_deadline(session_name, tmp_path, control, caplog):
    """Not a block of its job is free before it is dead, and the tier comes back."""
    config = dk.make_config(session_name, tmp_path, job_deadline_s=2.0)
    with dk.watch(Engine(config)) as engine:
        dk.reach("mid-load", engine, control)
        pid = worker_pid(session_name)
        assert engine.tiers[0].num_open_jobs == 1
        step = dk.fenced(engine, pid)
        wait_until(
            lambda: step() or deaths_in(caplog),
            timeout_s=dk.WAIT_S,
            what="the worker to be killed",
        )
        control.release()
        dk.settle(engine)
        dk.check_quiet(engine)
        dk.check_serves(engine, ["mid-load"])
        assert deaths_in(caplog) == [
            f"tier faulty: worker {pid} did not answer a job before its deadline; 1 of "
            f"its jobs failed; all that the tier holds is a miss until the next worker "
            f"is up"
        ]
        assert engine.page.tier_error(0) == "did not answer a job before its deadline"


def test_a_death_is_told_once_whatever_a_supervisor_says(
    session_name, tmp_path, control, caplog
):
    """Of deaths that it makes up, only the engine's own count of jobs is believed."""
    with Engine(dk.make_config(session_name, tmp_path)) as engine:
        dk.reach("idle", engine, control)
        traffic = engine._traffic
        for tier_idx, epoch in ((0, 0), (0, 2), (-1, 1), (2, 1), (10**9, 1)):
            traffic._on_control(WorkerGone(tier_idx, epoch, "dreamed"))
        assert deaths_in(caplog) == []
        pid = worker_pid(session_name)
        assert strike(pid, Death.SIGKILL)
        wait_gone(pid)
        wait_until(
            lambda: dk.kit.step(engine) or deaths_in(caplog),
            timeout_s=dk.WAIT_S,
            what="the death to be told",
        )
        for _ in range(3):
            traffic._on_control(WorkerGone(0, 1, "killed\nagain\n"))
        dk.settle(engine)
        (text,) = deaths_in(caplog)
        assert re.match(rf"tier faulty: worker {pid} killed by SIGKILL \(.*; 0 ", text)
        traffic._on_control(WorkerGone(0, 2, "two\nlines\n"))
        assert "worker" in deaths_in(caplog)[1]
        assert "two lines; 0 of its jobs failed" in deaths_in(caplog)[1]
