"""Every way to die at every stage, for worker, supervisor and engine.

After each: every job was answered once, no slot is pinned or lost, a block is the
right bytes or a miss, the other tier was not touched, the tier is back, and after one
fresh start no name and no process is left (the autouse fixture looks).
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading

import death_kit as dk
import pytest
from supervisor_kit import is_alive, names_of, pids_of, wait_gone

from shmoffload.engine import Engine
from shmoffload.errors import NoSessionError, StartError
from shmoffload.testing.poll import wait_until
from shmoffload.wire.session import SessionPage, TierWord, Word

SIGNALS = {"SIGKILL": 9, "SIGSEGV": 11, "SIGBUS": 7, "hang": signal.SIGSTOP}
WAYS = [*SIGNALS, "exit code"]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def control(tmp_path, monkeypatch):
    plugins = tmp_path / "plugins"
    dk.install_plugin(plugins)
    monkeypatch.syspath_prepend(str(plugins))
    paths = [str(plugins), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    made = dk.Control(tmp_path)
    yield made
    made.release()


class Victim:
    """Worker or supervisor of a session, as its page names them."""

    def __init__(self, who, how, session, control):
        self.who, self.how, self.session, self.control = who, how, session, control
        self.pid = 0
        self.goes_on = who == "supervisor"  # nobody's to kill

    def find(self):
        """Return the victim's pid, 0 while the session or the process starts."""
        try:
            page = SessionPage.look(self.session)
        except NoSessionError:
            return 0
        try:
            if self.who == "worker":
                return page.get_tier(0, TierWord.WORKER_PID)
            return page.get(Word.SUPERVISOR_PID)
        finally:
            page.close()

    def aim(self, *, meanwhile=lambda: None):
        self.pid = wait_until(
            lambda: meanwhile() or self.find(),
            timeout_s=dk.WAIT_S,
            what=f"{self.who} of {names_of(self.session)}",
        )

    def strike(self):
        """Let it die its death; the held tier goes on when that is done."""
        if self.how != "exit code":
            os.kill(self.pid, SIGNALS[self.how])
        elif self.who == "worker":
            self.control.exit_worker()
        else:
            os.kill(self.pid, signal.SIGTERM)  # the only way to make it leave
        if self.how != "hang":
            self.wait_gone()
        self.control.release()

    def strike_at(self, is_time):
        """Strike from another thread, at a moment that ``is_time`` knows."""

        def run():
            wait_until(is_time, timeout_s=dk.WAIT_S, what="the moment to strike")
            self.strike()
            if self.how == "hang" and self.goes_on:
                os.kill(self.pid, signal.SIGCONT)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def wait_gone(self):
        wait_until(
            lambda: not is_alive(self.pid), timeout_s=dk.WAIT_S, what="the death"
        )


def start_over_a_death(victim, control, config):
    """Start an engine while its tier opens and the victim dies."""
    control.hold("open")

    def is_time():
        if not control.is_held("open"):
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
    with pytest.raises(StartError, match="held did not come up in 5 s"):
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
    if victim.how == "hang" and victim.goes_on:
        assert engine.wait_idle(dk.WAIT_S)  # the work needs no supervisor
        os.kill(victim.pid, signal.SIGCONT)
        return
    now = victim.find
    wait_until(
        lambda: dk.kit.step(engine) or now() not in (0, victim.pid),
        timeout_s=dk.WAIT_S,
        what=f"the next {victim.who}",
    )


def check_sentence(engine, victim):
    """A death is told in one sentence: the signal by name, or what else it was."""
    text = engine.page.tier_error(0)
    words = {"exit code": f"exit code {dk.EXIT_CODE}", "hang": ""}
    assert words.get(victim.how, victim.how) in text
    assert text
    assert "\n" not in text


def die_and_check(engine, victim, stage):
    others = dk.worker_pid(engine, 1)
    dk.reach(stage, engine, victim.control)
    victim.aim(meanwhile=lambda: dk.kit.step(engine))
    victim.strike()
    wait_noticed(engine, victim)
    dk.settle(engine)
    dk.check_quiet(engine)
    dk.check_serves(engine, [stage])
    if victim.who == "worker":
        assert dk.worker_pid(engine, 1) == others
        check_sentence(engine, victim)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("who", ["worker", "supervisor"])
def test_deaths_under_a_live_engine(session_name, tmp_path, control, who, how):
    """At each stage in turn, in one engine's life: a start takes longest."""
    config = dk.make_config(
        session_name, tmp_path, hung_after_s=3 if how == "hang" else 30
    )
    victim = Victim(who, how, session_name, control)
    if (who, how) == ("worker", "hang"):
        check_start_over_a_hang(victim, control, tmp_path)
        started = Engine(config)
    else:
        started = start_over_a_death(victim, control, config)
    with started as engine:
        dk.reach("starting", engine, control)
        dk.check_serves(engine, ["starting"])
        for stage in ("idle", "mid-load", "mid-store"):
            die_and_check(engine, victim, stage)
        dk.reach("draining", engine, control)
        close_over_a_death(victim, engine)
    with Engine(config) as engine:
        dk.check_serves(engine, dk.STAGES)


class Doomed:
    """``doomed_engine`` at a stage; ``seen``: stages whose blocks it must find."""

    def __init__(self, session, folder, stage, control, *, seen=()):
        command = [sys.executable, str(dk.HERE / "doomed_engine.py")]
        self.session, self.stage, self.control = session, stage, control
        if stage == "starting":
            control.hold("open")
        self.process = subprocess.Popen(
            [*command, session, str(folder), stage, *seen],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            if stage == "starting":
                control.wait_held("open")
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
        if how == "exit code":
            self.process.stdin.write("exit\n")
            self.process.stdin.flush()
            assert self.process.wait(dk.WAIT_S) == dk.EXIT_CODE
        else:
            self.process.send_signal(SIGNALS[how])
            assert self.process.wait(dk.WAIT_S) == -SIGNALS[how]

    def stop_and_go_on(self):
        """A stopped engine is nobody's to clean up: it goes on where it was."""
        page = SessionPage.look(self.session)
        num_done = page.get_tier(0, TierWord.COMPLETIONS)
        self.process.send_signal(signal.SIGSTOP)
        self.control.release()
        if self.stage != "idle":  # its worker goes on alone
            wait_until(
                lambda: page.get_tier(0, TierWord.COMPLETIONS) > num_done,
                timeout_s=dk.WAIT_S,
                what="the worker's answer to a stopped engine",
            )
        page.close()
        assert len(names_of(self.session)) == 3
        self.process.send_signal(signal.SIGCONT)
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


@pytest.mark.parametrize("how", WAYS)
def test_deaths_of_the_engine(session_name, tmp_path, control, how):
    """At each stage in turn; each next engine finds what the last one had stored."""
    seen = []
    for stage in dk.STAGES:
        with Doomed(session_name, tmp_path, stage, control, seen=seen) as engine:
            if how == "hang":
                engine.stop_and_go_on()
            else:
                engine.die(how)
            engine.wait_cleaned_up()
        if stage != "starting" or how == "hang":
            seen = [stage]
    with Engine(dk.make_config(session_name, tmp_path)) as fresh:
        dk.check_serves(fresh, dk.STAGES[1:])


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
                with contextlib.suppress(ProcessLookupError):  # gone with another
                    os.kill(pid, signal.SIGKILL)
            wait_gone(pids)
    assert len(used) == 1, used
    with Engine(dk.make_config(session_name, tmp_path)) as fresh:
        dk.check_serves(fresh, ["mid-load"])
    assert names_of(session_name) == []
