"""Deaths hit the process that is named; answers come late, twice or not at all."""

import array
import os
import signal
import subprocess
import sys

import pytest

from shmoffload.core.types import JobReply, TierDown
from shmoffload.engine.tier_link import TierLink
from shmoffload.testing.faults.control import Control, Orders
from shmoffload.testing.faults.deaths import (
    Death,
    resume,
    strike,
    supervisor_pid,
    wait_gone,
    worker_pid,
)
from shmoffload.testing.faults.link import FaultyLink
from shmoffload.testing.faults.worker_queue import WorkerQueue
from shmoffload.testing.poll import wait_until
from shmoffload.wire.channel import ChannelClosedError, channel_pair
from shmoffload.wire.config import from_dict
from shmoffload.wire.messages import JobDone, Resident, encode_frame
from shmoffload.wire.session import SessionPage, TierWord, Word

TIMEOUT_S = 60


@pytest.fixture
def process():
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as started:
        started.stdout.readline()
        yield started
        started.kill()


def state_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("death", [d for d in Death if d is not Death.HANG])
def test_a_death_is_the_one_that_was_asked_for(process, death):
    number = signal.SIGTERM if death is Death.EXIT else signal.Signals[death.value]
    assert strike(process.pid, death)
    wait_gone(process.pid)  # not reaped yet
    assert state_of(process.pid) == "Z"
    assert process.wait(TIMEOUT_S) == -number
    wait_gone(process.pid)
    assert not strike(process.pid, death)
    assert not resume(process.pid)


def test_a_hang_lasts_until_it_is_resumed(process):
    assert strike(process.pid, Death.HANG)
    wait_until(
        lambda: state_of(process.pid) == "T", timeout_s=TIMEOUT_S, what="the stop"
    )
    process.stdin.write(b"\n")
    process.stdin.flush()
    with pytest.raises(AssertionError, match="still runs after"):
        wait_gone(process.pid, timeout_s=0.05)
    assert resume(process.pid)
    assert process.wait(TIMEOUT_S) == 0


def test_nobody_is_struck_without_a_pid():
    with pytest.raises(AssertionError):
        strike(0, Death.SIGKILL)


def test_the_page_names_the_processes(session_name):
    assert worker_pid(session_name) == supervisor_pid(session_name) == 0
    page = SessionPage.open_or_create(
        from_dict(
            {
                "session": {"name": session_name, "namespace": "n"},
                "primary": {"block_bytes": 4096, "slots": 2},
                "tier": [
                    {"type": "memory", "name": "a"},
                    {"type": "memory", "name": "b"},
                ],
            }
        )
    )
    try:
        page.set_tier(1, TierWord.WORKER_PID, 77)
        page.set(Word.SUPERVISOR_PID, 78)
        num_fds = len(os.listdir("/proc/self/fd"))
        assert worker_pid(session_name) == 0
        assert worker_pid(session_name, 1) == 77
        assert supervisor_pid(session_name) == 78
        assert len(os.listdir("/proc/self/fd")) == num_fds
    finally:
        page.unlink(session_name)
        page.close()


@pytest.fixture
def pair(process):
    """A link, and its worker's end of the queue."""
    link = TierLink(engine_epoch=1)
    ours, theirs = channel_pair()
    link.connect(ours, os.pidfd_open(process.pid), worker_epoch=1)
    yield link, theirs
    link.close()
    theirs.close()


def say(theirs, *job_ids):
    for job_id in job_ids:
        done = JobDone(1, 1, job_id, array.array("i").tobytes(), [])
        assert theirs.send(encode_frame([done]))


def heard(link):
    return [item.job_id for item in link.receive() if isinstance(item, JobReply)]


def test_without_orders_the_link_is_as_it_was(pair):
    link, theirs = pair
    with FaultyLink(link):
        say(theirs, 1, 2)
        assert heard(link) == [1, 2]
    assert "receive" not in vars(link)
    say(theirs, 3)
    assert heard(link) == [3]


def test_held_answers_come_late_and_nothing_else_does(pair, process):
    link, theirs = pair
    with FaultyLink(link) as faulty:
        faulty.hold()
        say(theirs, 1, 2)
        assert theirs.send(encode_frame([Resident(1, [b"k" * 36])]))
        assert [item.added for item in link.receive()] == [[b"k" * 36]]
        assert (faulty.num_kept, faulty.num_struck("hold")) == (2, 2)
        process.kill()
        wait_gone(process.pid)
        assert TierDown(1, dead=True) in link.receive()
        faulty.release()
        assert heard(link) == [1, 2]  # after the death: as late as can be
        assert faulty.num_kept == 0
        assert heard(link) == []


def test_so_many_answers_come_twice_and_so_many_never(pair):
    link, theirs = pair
    with FaultyLink(link) as faulty:
        faulty.duplicate(times=2)
        say(theirs, 1, 2, 3)
        assert heard(link) == [1, 1, 2, 2, 3]
        faulty.lose()
        say(theirs, 4, 5)
        assert heard(link) == [5]
        assert [faulty.num_struck(kind) for kind in ("duplicate", "lose")] == [2, 1]
        faulty.duplicate()
        faulty.lose()
        faulty.hold()
        faulty.clear()
        say(theirs, 6)
        assert heard(link) == [6]


def test_a_worker_says_what_it_is_told_and_hangs_up(tmp_path, monkeypatch):
    ours, theirs = channel_pair()
    monkeypatch.setattr(sys, "argv", ["worker", f"--jobs-fd={theirs.fileno()}"])
    control, queue = Control(tmp_path), WorkerQueue()
    orders = Orders(tmp_path, is_over=lambda: False)
    control.say(b"one", b"", b"three")
    orders.obey(queue)
    assert [ours.receive() for _ in range(4)] == [b"one", b"", b"three", None]
    control.narrow(32 << 10)
    control.say(*[bytes([n]) * 40_000 for n in range(4)])
    for num_said in (5, 7):
        orders.obey(queue)
        assert control.num_struck("say") == num_said  # two fill it: the rest waits
        assert {ours.receive() is None for _ in range(2)} == {False}
    assert ours.receive() is None
    control.hang_up()
    orders.obey(queue)
    with pytest.raises(ChannelClosedError):
        ours.receive()
    control.say(b"lost")
    orders.obey(queue)
    assert [control.num_struck(k) for k in ("say", "narrow", "hang_up")] == [8, 1, 1]
    ours.close()
    theirs.close()


def test_who_has_no_queue_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytest"])
    control = Control(tmp_path)
    control.say(b"one")
    control.narrow(1)
    control.hang_up()
    Orders(tmp_path, is_over=lambda: False).obey(WorkerQueue())
    assert [control.num_struck(k) for k in ("say", "narrow", "hang_up")] == [1, 1, 1]
