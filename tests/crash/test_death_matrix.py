"""Every way to die at every stage, for worker, supervisor and engine.

After each: every job was answered once, no slot is pinned or lost, a block is the
right bytes or a miss, the other tier was not touched, the tier is back, and after one
fresh start no name and no process is left (the autouse fixture looks).
"""

import os
import re
import signal
import subprocess
import sys
import threading
from functools import partial

import death_kit as dk
import pytest
from supervisor_kit import names_of, pids_of

from shmoffload.engine import Engine
from shmoffload.errors import StartError
from shmoffload.testing.faults.control import Call
from shmoffload.testing.faults.deaths import (
    Death,
    resume,
    strike,
    supervisor_pid,
    wait_gone,
    worker_pid,
)
from shmoffload.testing.leaks import new_session_name
from shmoffload.testing.poll import wait_until
from shmoffload.wire.session import SessionPage, TierWord

FILES_DIE_OF = (Death.SIGSEGV, Death.EXIT)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def control(request, tmp_path):
    """Slabs die of some deaths and files of the others: each of both kinds."""
    params = getattr(getattr(request.node, "callspec", None), "params", {})
    made = dk.make_control(
        tmp_path, inner="fs" if params.get("how") in FILES_DIE_OF else "slab"
    )
    yield made
    made.clear()


@pytest.fixture
def neighbour():
    with dk.Neighbour(new_session_name()) as made:
        yield made


class Victim:
    """Worker or supervisor of a session, as its page names them."""

    def __init__(self, who, how, session, control):
        self.who, self.how, self.session, self.control = who, how, session, control
        self.pid = 0
        self.goes_on = who == "supervisor"  # nobody's to kill

    def find(self):
        """Return the victim's pid, 0 while the session or the process starts."""
        find = worker_pid if self.who == "worker" else supervisor_pid
        return find(self.session)

    def aim(self, *, meanwhile=lambda: None):
        self.pid = wait_until(
            lambda: meanwhile() or self.find(),
            timeout_s=dk.WAIT_S,
            what=f"{self.who} of {names_of(self.session)}",
        )

    def strike(self):
        """Let it die its death; the held tier goes on when that is done."""
        if self.how is Death.EXIT and self.who == "worker":
            self.control.exit(dk.EXIT_CODE)
        else:
            assert strike(self.pid, self.how)
        if self.how is not Death.HANG:
            wait_gone(self.pid)
        self.control.release()

    def strike_at(self, is_time):
        """Strike from another thread, at a moment that ``is_time`` knows."""

        def run():
            wait_until(is_time, timeout_s=dk.WAIT_S, what="the moment to strike")
            self.strike()
            if self.how is Death.HANG and self.goes_on:
                resume(self.pid)

        thread = threading.Thread(target=run)
        thread.start()
        return thread


def start_over_a_death(victim, control, config):
    """Start an engine while its tier opens and the victim dies."""
    control.hold(Call.OPEN)

    def is_time():
        if not control.is_held(Call.OPEN):
            return False
        victim.pid = victim.find()
        return victim.pid

    thread = victim.strike_at(is_time)
    try:
        return Engine(config)
    finally:
        thread.join(dk.WAIT_S)


def check_start_over_a_hang(victim, control, folder):
    """What does not open in time is the start's failure, in one sentence."""
    config = dk.make_config(victim.session, folder, start_timeout_s=5)
    with pytest.raises(StartError, match="faulty did not come up in 5 s"):
        start_over_a_death(victim, control, config)
    wait_until(
        lambda: not names_of(victim.session) and not pids_of(victim.session),
        timeout_s=dk.WAIT_S,
        what="nothing to be left",
    )


def close_over_a_death(victim, engine):
    """The engine waits for its last store when the victim dies."""
    victim.aim(meanwhile=lambda: dk.kit.step(engine))
    thread = victim.strike_at(lambda: engine._is_closed)
    engine.close()
    thread.join(dk.WAIT_S)
    table = engine.manager.table
    assert table.num_pinned == table.num_quarantined == 0


def wait_noticed(engine, victim):
    """Until the engine has seen the death, or the supervisor has ended the hung."""
    if victim.how is Death.HANG and victim.goes_on:
        assert engine.wait_idle(dk.WAIT_S)  # the work needs no supervisor
        resume(victim.pid)
        return
    is_worker = victim.who == "worker"
    step = dk.fenced(engine, victim.pid) if is_worker else partial(dk.kit.step, engine)
    wait_until(
        lambda: step() or victim.find() not in (0, victim.pid),
        timeout_s=dk.WAIT_S,
        what=f"the next {victim.who}",
    )


CAUSES = {
    Death.SIGKILL: r"killed by SIGKILL \(out of memory, or by hand\)",
    Death.SIGSEGV: r"killed by SIGSEGV \(a crash in native code\)",
    Death.SIGBUS: r"killed by SIGBUS \(/dev/shm is full, or its file was cut\)",
    Death.EXIT: rf"left with exit code {dk.EXIT_CODE}; its last lines are on stderr",
    Death.HANG: r"hung: no heartbeat for [\d.]+ s",
}


def check_sentence(caplog, engine, victim, num_jobs):
    """A death is told in one sentence: tier, pid, cause, jobs, what comes next."""
    said = [r.getMessage() for r in caplog.records if "worker" in r.getMessage()]
    assert len(said) == 1, said
    assert re.fullmatch(
        rf"tier faulty: worker {victim.pid} {CAUSES[victim.how]}; {num_jobs} of its "
        r"jobs failed; all that the tier holds is a miss until the next worker is up",
        said[0],
    )
    assert re.fullmatch(CAUSES[victim.how], engine.page.tier_error(0))


def die_and_check(engine, victim, stage, caplog):
    others = worker_pid(victim.session, 1)
    dk.reach(stage, engine, victim.control)
    victim.aim(meanwhile=lambda: dk.kit.step(engine))
    num_jobs = engine.tiers[0].num_open_jobs
    assert num_jobs == (stage != "idle")
    caplog.clear()
    victim.strike()
    wait_noticed(engine, victim)
    dk.settle(engine)
    dk.check_quiet(engine)
    dk.check_serves(engine, [stage])
    if victim.who == "worker":
        assert worker_pid(victim.session, 1) == others
        check_sentence(caplog, engine, victim, num_jobs)


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize("how", list(Death))
@pytest.mark.parametrize("who", ["worker", "supervisor"])
def test_deaths_under_a_live_engine(session_name, tmp_path, control, caplog, who, how):
    """At each stage in turn, in one engine's life: a start takes longest."""
    config = dk.make_config(
        session_name, tmp_path, hung_after_s=3 if how is Death.HANG else 30
    )
    victim = Victim(who, how, session_name, control)
    if (who, how) == ("worker", Death.HANG):
        check_start_over_a_hang(victim, control, tmp_path)
        started = Engine(config)
    else:
        started = start_over_a_death(victim, control, config)
    with dk.watch(started) as engine:
        dk.reach("starting", engine, control)
        dk.check_serves(engine, ["starting"])
        for stage in ("idle", "mid-load", "mid-store"):
            die_and_check(engine, victim, stage, caplog)
        dk.reach("draining", engine, control)
        close_over_a_death(victim, engine)
    with Engine(config) as engine:
        dk.check_serves(engine, dk.STAGES)
    dk.check_storage(control)


class Doomed:
    """``doomed_engine`` at a stage; ``seen``: stages whose blocks it must find."""

    def __init__(self, session, folder, stage, control, *, seen=()):
        command = [sys.executable, str(dk.HERE / "doomed_engine.py")]
        self.session, self.stage, self.control = session, stage, control
        if stage == "starting":
            control.hold(Call.OPEN)
        self.process = subprocess.Popen(
            [*command, session, str(folder), stage, *seen],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            if stage == "starting":
                control.wait_held(Call.OPEN)
            else:
                assert self.process.stdout.readline() == "there\n"
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()
        self.control.release()

    def die(self, how):
        if how is Death.EXIT:
            self.process.stdin.write("exit\n")
            self.process.stdin.flush()
            assert self.process.wait(dk.WAIT_S) == dk.EXIT_CODE
        else:
            assert strike(self.process.pid, how)
            assert self.process.wait(dk.WAIT_S) == -signal.Signals[how.value]

    def stop_and_go_on(self):
        """A stopped engine is nobody's to clean up: it goes on where it was."""
        page = SessionPage.look(self.session)
        num_done = page.get_tier(0, TierWord.COMPLETIONS)
        assert strike(self.process.pid, Death.HANG)
        self.control.release()
        if self.stage != "idle":  # its worker goes on alone
            wait_until(
                lambda: page.get_tier(0, TierWord.COMPLETIONS) > num_done,
                timeout_s=dk.WAIT_S,
                what="the worker's answer to a stopped engine",
            )
        page.close()
        assert len(names_of(self.session)) == 3
        assert resume(self.process.pid)
        if self.stage == "starting":
            assert self.process.stdout.readline() == "there\n"
        if self.stage != "draining":
            self.process.stdin.write("check\n")
            self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"
        assert self.process.wait(dk.WAIT_S) == 0

    def wait_cleaned_up(self):
        wait_until(
            lambda: not names_of(self.session) and not pids_of(self.session),
            timeout_s=dk.WAIT_S,
            what="the supervisor to clean up",
        )


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize("how", list(Death))
def test_deaths_of_the_engine(session_name, tmp_path, control, how):
    """At each stage in turn; each next engine finds what the last one had stored."""
    seen = []
    for stage in dk.STAGES:
        with Doomed(session_name, tmp_path, stage, control, seen=seen) as engine:
            if how is Death.HANG:
                engine.stop_and_go_on()
            else:
                engine.die(how)
            engine.wait_cleaned_up()
        if stage != "starting" or how is Death.HANG:
            seen = [stage]
    with Engine(dk.make_config(session_name, tmp_path)) as fresh:
        dk.check_serves(fresh, dk.STAGES[1:])
    dk.check_storage(control)


def test_twenty_lives_and_deaths_leave_no_trace(session_name, tmp_path, control):
    """Start, load, SIGKILL everything, start: what is used returns each time."""
    used = set()
    for life in range(20):
        seen = ["mid-load"] if life else []
        with Doomed(session_name, tmp_path, "mid-load", control, seen=seen) as engine:
            pids = [engine.process.pid, *pids_of(session_name)]
            files = [os.stat(f"/dev/shm/{name}") for name in names_of(session_name)]
            used.add((len(pids), sum(file.st_blocks for file in files)))
            for pid in pids:
                strike(pid, Death.SIGKILL)  # some are gone with another
            for pid in pids:
                wait_gone(pid)
    assert len(used) == 1, used
    with Engine(dk.make_config(session_name, tmp_path)) as fresh:
        dk.check_serves(fresh, ["mid-load"])
    assert names_of(session_name) == []
