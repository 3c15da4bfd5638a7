"""F36: no process and no name outlives a scheduler that was killed.

Its whole process tree at once, stopped workers alone, a daemon: ``tests/crash``.
"""

import contextlib
import os
import signal

import engine_kit as kit
import pytest
from faults_kit import faulty, make_config
from late_faults_kit import (
    WAIT_S,
    engine_process,
    hear,
    tell,
    wait_nothing_left,
)
from supervisor_kit import names_of, pids_of, wait_gone

from shmoffload.engine import Engine
from shmoffload.errors import SessionInUseError
from shmoffload.testing.faults.control import Call
from shmoffload.testing.faults.deaths import Death, resume, strike, supervisor_pid
from shmoffload.testing.poll import wait_until

pytestmark = pytest.mark.timeout(300)
NUM = 6
ENGINE = """
session, folder, forks = sys.argv[1:]
slab = {"type": "faulty", "path": folder, "max_bytes": "4MiB", "min_free": 0}
tiers = [{**slab, "nice": 0}, {"type": "memory", "nice": 0}]
engine = Engine(kit.make_config(session, tiers))
keys = kit.keys_of(0, 6)
kit.store(engine, kit.request(engine, "s"), keys)
assert engine.wait_idle(60)
if forks == "fork":  # a child that has all our descriptors: it hides our end
    child = os.fork()
    if child == 0:
        os.close(1)
        signal.pause()
    say(child)
say("idle")
if hear() == "read":
    kit.drop_primary(engine)
    ctx = kit.request(engine, "l")
    kit.scan(engine, ctx, keys)
    say("asked")
hear()
"""


@contextlib.contextmanager
def resumed(pids):
    """Let processes that a test stopped go on, whatever becomes of it."""
    try:
        yield
    finally:
        for pid in pids:
            resume(pid)


def check_blocks_are_whole(session, control):
    """A fresh start finds every block of the disk tier with its bytes."""
    with Engine(make_config(session, [faulty(control)], slots=16)) as engine:
        found = kit.load(engine, kit.request(engine, "l"), kit.keys_of(0, NUM))
        assert found == NUM
    wait_nothing_left(session)


def start(session, control, forks="no"):
    return engine_process(ENGINE, session, control.folder, forks)


def test_f36_killed_while_its_workers_are_idle(session_name, control):
    with start(session_name, control) as engine:
        assert hear(engine) == "idle"
        assert len(pids_of(session_name)) >= 3  # the supervisor and two workers
        engine.kill()
        engine.wait()
        wait_nothing_left(session_name)
    check_blocks_are_whole(session_name, control)


def test_f36_killed_while_a_worker_is_in_a_long_read(session_name, control):
    """Ten minutes: who waits for the read to end fails here."""
    with start(session_name, control) as engine:
        assert hear(engine) == "idle"
        control.slow(Call.GET, 600.0)
        tell(engine, "read")
        assert hear(engine) == "asked"
        wait_until(
            lambda: control.num_struck("slow"), timeout_s=WAIT_S, what="the read"
        )
        engine.kill()
        engine.wait()
        wait_nothing_left(session_name)
    control.clear()
    check_blocks_are_whole(session_name, control)


@pytest.mark.parametrize("who", ["workers", "supervisor", "all"])
def test_f36_killed_while_others_are_stopped(session_name, control, who):
    """Stopped, nobody but a living supervisor acts; continued, everybody leaves."""
    with start(session_name, control) as engine:
        assert hear(engine) == "idle"
        supervisor = supervisor_pid(session_name)
        everybody = pids_of(session_name)
        stopped = {
            "workers": [pid for pid in everybody if pid != supervisor],
            "supervisor": [supervisor],
            "all": everybody,
        }[who]
        with resumed(stopped):
            for pid in stopped:
                strike(pid, Death.HANG)
            engine.kill()
            engine.wait()
            if who == "workers":  # SIGKILL reaches who is stopped
                wait_nothing_left(session_name)
        wait_nothing_left(session_name)
    check_blocks_are_whole(session_name, control)


def test_f36_killed_while_a_fork_of_it_lives_on(session_name, control):
    """The fork keeps every socket open: no end of file; the pidfd tells.

    It has the owner's lock as well, so the next start waits for its end.
    """
    with start(session_name, control, "fork") as engine:
        child = int(hear(engine))
        try:
            assert hear(engine) == "idle"
            ours = [
                pid for pid in pids_of(session_name) if pid not in (engine.pid, child)
            ]
            engine.kill()
            engine.wait()
            wait_until(
                lambda: not set(ours) & set(pids_of(session_name)),
                timeout_s=WAIT_S,
                what="the end of supervisor and workers",
            )
            os.kill(child, 0)  # it is still there, and could still write
            assert names_of(session_name) == [f"shmoffload.{session_name}.own"]
            with pytest.raises(SessionInUseError, match=session_name):
                Engine(make_config(session_name, [faulty(control)]))
        finally:
            os.kill(child, signal.SIGKILL)
            wait_gone([child])
    check_blocks_are_whole(session_name, control)
