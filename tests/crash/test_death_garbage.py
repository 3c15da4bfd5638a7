"""A worker answers garbage, at every stage: then goes on, dies of it, or hangs up.

What cannot be decoded, speaks of another incarnation or of no open job is counted,
and is an answer to nothing: the job stays open until its true answer or its worker's
proven death, and its slots stay where they are.
"""

import enum

import death_kit as dk
import msgspec
import pytest
from supervisor_kit import names_of
from test_death_matrix import CAUSES

from shmoffload.engine import Engine
from shmoffload.testing.faults.control import Call
from shmoffload.testing.faults.deaths import Death, strike, wait_gone, worker_pid
from shmoffload.testing.frames import FrameFuzzer, seed
from shmoffload.testing.leaks import new_session_name
from shmoffload.testing.poll import wait_until
from shmoffload.wire.messages import (
    Hello,
    JobDone,
    Resident,
    decode_from_worker,
    encode_frame,
)
from shmoffload.wire.session import TierWord

NUM_RANDOM, MAX_RANDOM_BYTES = 30, 600
"""All of it has to fit into a queue that nobody reads."""
NEVER_STORED = dk.kit.keys_of(70_000, 3)

pytestmark = pytest.mark.timeout(300)


class Then(enum.StrEnum):
    """What the worker does after its garbage."""

    GOES_ON = "goes on"
    DIES = "dies"
    HANGS_UP = "hangs up"
    """An end of file, which is no proof of a death: the worker lives on."""


@pytest.fixture
def control(tmp_path):
    made = dk.make_control(tmp_path, inner="slab")
    yield made
    made.clear()


class Garbage:
    """Datagrams of a worker that are no answer; how they are counted."""

    def __init__(self, session, control, then):
        self.session, self.control, self.then = session, control, then
        self.fuzzer = FrameFuzzer(seed())
        self.num_frames = self.num_late = 0

    def draw(self, engine):
        """Return garbage around every honest answer that could be given now."""
        tier = engine.tiers[0]
        epochs = engine._epoch, engine.page.get_tier(0, TierWord.WORKER_EPOCH)
        job_ids = [*tier._open, 10**6]
        late = [
            encode_frame([JobDone(*epochs_then, job_id)])
            for epochs_then in (
                (epochs[0], epochs[1] + 1),
                (epochs[0], epochs[1] - 1),
                (epochs[0] - 1, epochs[1]),
                (epochs[0] + 1, epochs[1]),
            )
            for job_id in job_ids
        ]
        late.append(encode_frame([JobDone(*epochs, 10**6)]))
        honest = encode_frame([JobDone(*epochs, job_ids[0])])
        frames = [honest[:end] for end in range(1, len(honest))]
        frames += [honest + b"\0", honest + honest]
        if self.then is Then.GOES_ON:  # of the dead it reads as their end
            frames.append(b"")
        frames.append(encode_frame([Hello(epochs[1] + 1)]))
        frames.append(encode_frame([Hello(epochs[1], capacity_bytes=-1)]))
        frames.append(encode_frame([Resident(epochs[1] - 1, NEVER_STORED, [])]))
        frames.append(encode_frame([Resident(epochs[1], [b""], [])]))
        frames.append(
            encode_frame([JobDone(*epochs, job_ids[0], removed=[b"x" * 999])])
        )
        frames += [self.random(honest) for _ in range(NUM_RANDOM)]
        self.num_frames += len(frames)
        self.num_late += len(late)
        both = frames + late
        self.fuzzer.rng.shuffle(both)
        return both

    def random(self, honest):
        """Return bytes that are no frame of ours."""
        while True:
            data = self.fuzzer.any_of(
                self.fuzzer.garbage, lambda: self.fuzzer.mutated(honest)
            )
            if 0 < len(data) <= MAX_RANDOM_BYTES:
                try:
                    decode_from_worker(data)
                except msgspec.DecodeError:
                    return data

    def speak(self, engine):
        """Have the worker say it all; the engine does not listen yet."""
        datagrams = self.draw(engine)
        before = self.control.num_struck("say")
        self.control.say(*datagrams)
        wait_until(
            lambda: self.control.num_struck("say") == before + len(datagrams),
            timeout_s=dk.WAIT_S,
            what="the worker to say its garbage",
        )
        pid = worker_pid(self.session)
        if self.then is Then.HANGS_UP:
            self.hang_up()
        if self.then is Then.DIES:
            assert strike(pid, Death.SIGKILL)
            wait_gone(pid)
        return pid

    def hang_up(self):
        before = self.control.num_struck("hang_up")
        self.control.hang_up()
        wait_until(
            lambda: self.control.num_struck("hang_up") > before,
            timeout_s=dk.WAIT_S,
            what="the worker to hang up",
        )

    def check_counts(self, engine):
        assert engine._links[0].garbage_frames == self.num_frames
        assert engine.tiers[0].late_replies == self.num_late


def check_nothing_was_answered(engine, garbage, num_jobs, num_pinned):
    """The engine has read it all; whatever was open is."""
    wait_until(
        lambda: (
            dk.kit.step(engine) or engine._links[0].garbage_frames >= garbage.num_frames
        ),
        timeout_s=dk.WAIT_S,
        what="the engine to have read the garbage",
    )
    dk.kit.step(engine)
    garbage.check_counts(engine)
    tier, table = engine.tiers[0], engine.manager.table
    assert tier.num_open_jobs == num_jobs
    assert (table.num_pinned, table.num_pending) == num_pinned
    assert not engine.is_broken
    ctx = dk.kit.request(engine, "garbage")
    assert dk.kit.scan(engine, ctx, NEVER_STORED) == 0
    engine.on_request_finished(ctx)
    dk.kit.step(engine)


def speak_and_check(engine, garbage, stage, caplog):
    control, session = garbage.control, garbage.session
    others = worker_pid(session, 1)
    dk.reach(stage, engine, control)
    tier, table = engine.tiers[0], engine.manager.table
    num_jobs, num_lost = tier.num_open_jobs, tier.jobs_lost
    assert num_jobs == (stage != "idle")
    caplog.clear()
    pid = garbage.speak(engine)
    if garbage.then is Then.GOES_ON:
        num_pinned = table.num_pinned, table.num_pending
        check_nothing_was_answered(engine, garbage, num_jobs, num_pinned)
        assert control.is_held(Call.PUT) or control.is_held(Call.GET) or not num_jobs
    if garbage.then is Then.GOES_ON:
        control.release()
    else:
        step = dk.fenced(engine, pid)
        wait_until(
            lambda: step() or worker_pid(session) not in (0, pid),
            timeout_s=dk.WAIT_S,
            what="the next worker",
        )
        control.release()
    dk.settle(engine)
    garbage.check_counts(engine)
    assert tier.jobs_lost - num_lost == (garbage.then is not Then.GOES_ON) * num_jobs
    dk.check_quiet(engine, late_replies=garbage.num_late)
    dk.check_serves(engine, [stage], late_replies=garbage.num_late)
    assert worker_pid(session, 1) == others
    assert (worker_pid(session) == pid) == (garbage.then is Then.GOES_ON)
    if garbage.then is Then.DIES:
        said = [r.getMessage() for r in caplog.records]
        cause = CAUSES[Death.SIGKILL].replace("\\", "")
        assert [
            f"tier faulty: worker {pid} {cause}; {num_jobs} of its jobs failed"
            == text.rpartition(";")[0]
            for text in said
        ] == [True]


@pytest.mark.parametrize("then", list(Then))
def test_garbage_for_an_answer(session_name, tmp_path, control, caplog, then):
    """At each stage in turn, in one engine's life; the start is the next test's."""
    garbage = Garbage(session_name, control, then)
    config = dk.make_config(session_name, tmp_path)
    with dk.Neighbour(new_session_name()), dk.watch(Engine(config)) as engine:
        for stage in ("idle", "mid-load", "mid-store"):
            speak_and_check(engine, garbage, stage, caplog)
        dk.reach("draining", engine, control)
        num_lost = engine.tiers[0].jobs_lost
        garbage.speak(engine)
        control.release()
        engine.close()
        garbage.check_counts(engine)
        table = engine.manager.table
        assert table.num_pinned == table.num_quarantined == 0
        num_more = engine.tiers[0].jobs_lost - num_lost
        assert num_more == (then is not Then.GOES_ON)
        assert engine.tiers[0].num_open_jobs == 0
    assert names_of(session_name) == []
    with Engine(config) as fresh:
        dk.check_serves(fresh, dk.STAGES[1:])
    dk.check_storage(control)


@pytest.mark.parametrize("then", [Then.GOES_ON, Then.DIES])
def test_garbage_for_a_first_word(session_name, tmp_path, control, then):
    """Before Hello, while the next worker opens its tier."""
    garbage = Garbage(session_name, control, then)
    config = dk.make_config(session_name, tmp_path)
    with dk.Neighbour(new_session_name()), dk.watch(Engine(config)) as engine:
        dk.reach("starting", engine, control)
        control.hold(Call.OPEN)
        first = worker_pid(session_name)
        assert strike(first, Death.SIGKILL)
        wait_gone(first)
        control.wait_held(Call.OPEN, meanwhile=lambda: dk.kit.step(engine))
        assert not engine.tiers[0].is_up
        garbage.speak(engine)
        for _ in range(3):
            dk.kit.step(engine)
        assert not engine.tiers[0].is_up
        control.release()
        dk.settle(engine)
        garbage.check_counts(engine)
        dk.check_quiet(engine, late_replies=garbage.num_late)
        dk.check_serves(engine, ["starting"], late_replies=garbage.num_late)
        assert engine.tiers[0].worker_epoch == (2 if then is Then.GOES_ON else 3)
