"""The pure decisions about one worker, with a made-up clock."""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shmoffload.supervisor.life import (
    HEALTHY_AFTER_S,
    STUCK_AFTER_S,
    Act,
    Phase,
    WorkerLife,
    describe_exit,
)
from shmoffload.wire.config import LimitsConfig
from shmoffload.wire.session import TierState

LIMITS = LimitsConfig(
    restart_backoff_s=0.1,
    restart_backoff_max_s=30.0,
    hung_after_s=10.0,
    start_timeout_s=30.0,
)


def turn(life, now_s, *, beat_s=None, ready=False, may_start=True):
    return life.turn(
        now_s=now_s,
        beat_s=now_s if beat_s is None else beat_s,
        is_ready=ready,
        may_start=may_start,
    )


def started_life(now_s=0.0, *, ready=True):
    life = WorkerLife(LIMITS)
    life.want(now_s=now_s)
    assert turn(life, now_s) is Act.START
    life.started(now_s=now_s)
    life.epoch += 1
    assert turn(life, now_s, ready=ready) is None
    return life


def test_nothing_is_started_before_it_is_wanted():
    life = WorkerLife(LIMITS)
    assert turn(life, 1e9) is None
    assert life.due_s(may_start=True) is None


def test_up_only_once_the_tier_is_open():
    life = started_life(ready=False)
    assert life.state is TierState.STARTING
    assert turn(life, 1.0, ready=True) is None
    assert life.state is TierState.UP


def test_back_off_doubles_up_to_its_limit_and_recovers():
    life = started_life(ready=False)
    now_s, waits = 0.0, []
    for _ in range(11):
        life.exited(1, now_s=now_s)
        due_s = life.due_s(may_start=True)
        waits.append(due_s - now_s)
        assert turn(life, due_s - 0.001) is None
        assert turn(life, due_s) is Act.START
        life.started(now_s=due_s)
        now_s = due_s
    assert waits[:3] == pytest.approx([0.1, 0.2, 0.4])
    assert waits[-1] == pytest.approx(30)
    assert life.restarts == 11
    turn(life, now_s, ready=True)
    life.exited(1, now_s=now_s + HEALTHY_AFTER_S - 1)
    assert life.due_s(may_start=True) - (now_s + HEALTHY_AFTER_S - 1) == 30
    now_s = life.due_s(may_start=True)
    turn(life, now_s)
    life.started(now_s=now_s)
    turn(life, now_s, ready=True)
    now_s += HEALTHY_AFTER_S
    life.exited(1, now_s=now_s)
    assert life.due_s(may_start=True) - now_s == pytest.approx(0.1)


def test_hang_is_counted_from_the_last_beat_and_from_the_start():
    life = started_life(now_s=100.0)
    assert turn(life, 110.0, beat_s=3.0) is None  # a beat of the one before
    assert turn(life, 119.0, beat_s=109.5) is None
    assert turn(life, 119.6, beat_s=109.5) is Act.KILL
    assert life.reason == "hung: no heartbeat for 10.1 s"
    life.exited(-9, now_s=120.0)
    assert life.reason == "hung: no heartbeat for 10.1 s"


def test_a_supervisor_that_slept_excuses_its_workers():
    life = started_life()
    life.excuse(now_s=100.0)
    assert turn(life, 100.0, beat_s=1.0) is None
    assert turn(life, 110.1, beat_s=1.0) is Act.KILL


def test_opening_has_its_own_limit():
    life = started_life(ready=False)
    assert turn(life, 30.0) is None
    assert turn(life, 30.1) is Act.KILL
    assert life.reason.startswith("did not open its tier")


def test_stop_asks_then_kills_then_gives_up():
    life = started_life()
    life.stop(now_s=1.0, grace_s=3.0)
    assert turn(life, 1.0) is Act.TERMINATE
    assert turn(life, 3.9) is None
    assert turn(life, 4.0) is Act.KILL
    assert turn(life, 4.0 + STUCK_AFTER_S - 0.1) is None
    assert not life.is_settled
    assert turn(life, 4.0 + STUCK_AFTER_S) is None
    assert life.state is TierState.STUCK
    assert life.is_settled
    assert "not gone 5 s after SIGKILL" in life.reason


def test_a_second_stop_only_shortens_the_grace():
    life = started_life()
    life.stop(now_s=1.0, grace_s=3.0)
    turn(life, 1.0)
    life.stop(now_s=2.0, grace_s=1.0)
    life.stop(now_s=2.9, grace_s=1.0)
    assert turn(life, 3.0) is Act.KILL


def test_stuck_worker_is_not_replaced_before_it_is_gone():
    life = started_life()
    assert life.kill(life.epoch, "it missed a deadline")
    assert turn(life, 1.0) is Act.KILL
    turn(life, 1.0 + STUCK_AFTER_S)
    assert life.state is TierState.STUCK
    life.want(now_s=50.0)
    assert turn(life, 1000.0) is None
    life.exited(-9, now_s=1001.0)
    assert turn(life, 1002.0) is Act.START


def test_kill_of_another_epoch_changes_nothing():
    life = started_life()
    assert not life.kill(life.epoch - 1, "late")
    assert not life.kill(life.epoch + 1, "early")
    assert turn(life, 1.0) is None


def test_refusal_waits_for_the_next_engine():
    life = started_life(ready=False)
    life.exited(2, now_s=1.0)
    assert life.state is TierState.REFUSED
    assert turn(life, 1e6) is None
    assert life.due_s(may_start=True) is None
    life.stop(now_s=1e6, grace_s=1.0)
    life.want(now_s=1e6)
    assert turn(life, 1e6) is Act.START


@pytest.mark.parametrize(
    ("code", "words", "kept"),
    [
        (2, "path is a file", "path is a file"),
        (1, "Input/output error", "Input/output error"),
        (-9, "Input/output error", ""),  # the signal came after the words
        (0, "anything", ""),
    ],
)
def test_last_words_count_if_it_left_by_itself(code, words, kept):
    life = started_life(ready=False)
    life.exited(code, now_s=1.0, words=words)
    assert life.words == kept
    assert ("its sentence is on stderr" in life.reason) is False
    killed = started_life()
    assert killed.kill(killed.epoch, "a deadline")
    assert turn(killed, 1.0) is Act.KILL
    killed.exited(code, now_s=1.0, words=words)
    assert (killed.words, killed.reason) == ("", "a deadline")


def test_words_are_of_the_last_end_only():
    """Else they would stand in the page for a worker that is stuck, or not there."""
    life = started_life()
    life.exited(1, now_s=1.0, words="No space left on device")
    life.start_failed("Too many open files", now_s=2.0)
    assert (life.words, life.reason[-19:]) == ("", "Too many open files")
    life = started_life()
    life.exited(1, now_s=1.0, words="No space left on device")
    life.started(now_s=2.0)
    assert life.words == ""


def test_failed_start_is_tried_again():
    life = WorkerLife(LIMITS)
    life.want(now_s=0.0)
    assert turn(life, 0.0) is Act.START
    life.start_failed("Too many open files", now_s=0.0)
    assert turn(life, 0.05) is None
    assert turn(life, 0.1) is Act.START


def test_unacknowledged_handover_holds_the_start_back_without_spinning():
    life = started_life()
    life.exited(-9, now_s=1.0)
    assert turn(life, 99.0, may_start=False) is None
    assert life.due_s(may_start=False) is None
    assert turn(life, 99.0) is Act.START


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exit code 0"),
        (1, "exit code 1"),
        (-9, "killed by SIGKILL (out of memory, or by hand)"),
        (-7, "killed by SIGBUS (/dev/shm is full, or its file was cut)"),
        (-10, "killed by SIGUSR1"),
        (-99, "killed by signal 99"),
    ],
)
def test_exit_in_words(code, text):
    assert text in describe_exit(code)


class LifeMachine(RuleBasedStateMachine):
    """Any order of events: one process at most, and every one is ended or gone."""

    def __init__(self):
        super().__init__()
        self.life = WorkerLife(LIMITS)
        self.now_s = 1.0
        self.alive = False
        self.terminated = False
        self.killed_s = None
        self.wanted = False
        self.stop_by_s = None

    @rule(seconds=st.sampled_from([0.0, 0.05, 0.3, 2.0, 11.0, 70.0]))
    def time_passes(self, seconds):
        self.now_s += seconds

    @rule()
    def want(self):
        self.wanted = True
        self.stop_by_s = None
        self.life.want(now_s=self.now_s)

    @rule(grace_s=st.sampled_from([0.5, 1.0, 3.0]))
    def stop(self, grace_s):
        self.wanted = False
        by_s = self.now_s + grace_s
        self.stop_by_s = min(by_s, self.stop_by_s or by_s)
        self.life.stop(now_s=self.now_s, grace_s=grace_s)

    @rule(offset=st.integers(-1, 1))
    def kill(self, offset):
        hit = self.life.kill(self.life.epoch + offset, "asked")
        assert not (hit and offset)
        assert self.alive or not hit

    @rule(ready=st.booleans(), beats=st.booleans(), may_start=st.booleans())
    def turns(self, ready, beats, may_start):
        act = self.life.turn(
            now_s=self.now_s,
            beat_s=self.now_s if beats else 0.0,
            is_ready=ready,
            may_start=may_start,
        )
        if act is Act.START:
            assert not self.alive
            assert self.wanted
            assert may_start
            self.alive, self.terminated, self.killed_s = True, False, None
            self.life.epoch += 1
            self.life.started(now_s=self.now_s)
        elif act is not None:
            assert self.alive
            assert self.killed_s is None
            if act is Act.KILL:
                self.killed_s = self.now_s
            else:
                assert not self.terminated
                assert not self.wanted
                self.terminated = True

    @precondition(lambda self: self.alive)
    @rule(code=st.sampled_from([0, 1, 2, -9, -15]))
    def exits(self, code):
        self.alive = False
        self.life.exited(code, now_s=self.now_s)

    @invariant()
    def phase_says_whether_there_is_a_process(self):
        assert (self.life.phase is Phase.IDLE) == (not self.alive)

    @invariant()
    def settled_means_gone_or_beyond_help(self):
        if self.life.is_settled and self.alive:
            assert self.life.state is TierState.STUCK
            assert self.now_s - self.killed_s >= STUCK_AFTER_S

    @invariant()
    def nothing_overdue_is_left_undone(self):
        due_s = self.life.due_s(may_start=True)
        assert due_s is None or self.wanted or self.alive


TestLifeMachine = LifeMachine.TestCase
