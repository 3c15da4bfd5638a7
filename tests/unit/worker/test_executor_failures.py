"""Every job is answered once: deadlines, broken tiers, stops, full queues."""

import array
import errno
import threading
import time

import pytest
from executor_kit import TIMEOUT_S, Rig

from shmoffload.errors import TierError
from shmoffload.testing.poll import wait_until
from shmoffload.testing.tier_tests import HeapRegion, key_of
from shmoffload.wire.messages import JobDone
from shmoffload.wire.session import TierWord
from shmoffload.worker import executor as executor_module
from shmoffload.worker.intake import Job
from shmoffload.worker.jobs import JobQueues
from shmoffload.worker.tier import BlockStatus
from shmoffload.worker.tiers.memory import MemoryTier


class Scripted(MemoryTier):
    """A memory tier with a hook before each put and get."""

    def __init__(self):
        super().__init__()
        self.before = lambda what, keys: None

    def put(self, keys, slots, deadline_s):
        self.before("put", keys)
        return super().put(keys, slots, deadline_s)

    def get(self, keys, slots, deadline_s):
        self.before("get", keys)
        return super().get(keys, slots, deadline_s)


@pytest.fixture
def scripted():
    with Rig(Scripted(), HeapRegion(num_slots=32), max_blocks=32) as made:
        yield made


def test_a_job_past_its_deadline_is_answered_without_io(scripted):
    calls = []
    scripted.tier.before = lambda what, keys: calls.append(what)
    for load in (False, True):
        job = scripted.run([key_of(0), key_of(1)], [0, 1], load=load, deadline_s=0.0)
        assert job[0] == [0, 1]
        assert "deadline" in job[2]
    assert calls == []


def test_a_deadline_in_the_middle_keeps_what_was_done(scripted, monkeypatch):
    scripted.executor._piece = 1
    real = time.monotonic

    def late(what, keys):
        if keys == [key_of(1)]:
            monkeypatch.setattr(
                executor_module.time, "monotonic", lambda: real() + 10_000
            )

    scripted.tier.before = late
    keys = [key_of(i) for i in range(4)]
    scripted.fill(keys)
    failed, _, error = scripted.run(keys, range(4))
    monkeypatch.undo()
    assert failed == [2, 3]
    assert "deadline" in error


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EIO, "Input/output error"), TierError("no"), RuntimeError("bug")],
)
def test_whatever_a_tier_raises_the_job_is_answered(scripted, error):
    def broken(what, keys):
        raise error

    scripted.tier.before = broken
    for load in (False, True):
        failed, removed, words = scripted.run([key_of(0)], [0], load=load)
        assert (failed, removed) == ([0], [])
        assert str(error) in words
    assert scripted.word(TierWord.BLOCKS_FAILED) == 2


def test_a_tier_that_answers_for_other_blocks_fails_the_job(scripted, monkeypatch):
    monkeypatch.setattr(scripted.tier, "get", lambda *_: [BlockStatus.OK])
    failed, _, error = scripted.run([key_of(0), key_of(1)], [0, 1], load=True)
    assert failed == [0, 1]
    assert "other blocks" in error


def test_failing_stores_back_off_and_recover(scripted):
    calls = []

    def broken(what, keys):
        calls.append(what)
        raise OSError(errno.ENOSPC, "No space left on device")

    scripted.tier.before = broken
    answers = [scripted.run([key_of(0)], [0]) for _ in range(6)]
    assert all(failed == [0] for failed, _, _ in answers)
    assert "No space left" in answers[0][2]
    assert "backing off" in answers[3][2]
    assert len(calls) < 6
    scripted.tier.before = lambda what, keys: None
    wait_until(
        lambda: scripted.run([key_of(0)], [0])[0] == [],
        timeout_s=TIMEOUT_S,
        what="the probe store",
    )


def test_a_load_passes_a_store_between_its_pieces(scripted):
    scripted.executor._piece = 1
    order = []
    load_id = []

    def note(what, keys):
        order.append(what)
        if len(order) == 2:  # in the middle of the store
            load_id.append(scripted.submit([key_of(99)], [31], load=True))

    scripted.tier.before = note
    keys = [key_of(i) for i in range(20)]
    scripted.fill(keys)
    store_id = scripted.submit(keys, range(20))
    scripted.answer(store_id)
    scripted.answer(load_id[0])
    done = [m.job_id for m in scripted.heard if isinstance(m, JobDone)]
    assert done == [load_id[0], store_id]
    assert order.index("get") <= 4


def test_stores_go_on_under_endless_loads(scripted):
    scripted.executor._piece = 1
    stop = threading.Event()

    def slow(what, keys):
        if what == "get":
            stop.wait(0.01)

    scripted.tier.before = slow
    for _ in range(3000):
        scripted.submit([key_of(99)], [31], load=True)
    keys = [key_of(i) for i in range(3)]
    scripted.fill(keys)
    assert scripted.run(keys, range(3))[0] == []
    assert len(scripted.queues) > 0  # loads still wait
    stop.set()


def test_stop_answers_all_that_waits_and_abandon_nothing(scripted):
    scripted.executor._piece = 1
    inside, go_on = threading.Event(), threading.Event()

    def hold(what, keys):
        inside.set()
        go_on.wait(TIMEOUT_S)

    scripted.tier.before = hold
    keys = [key_of(i) for i in range(3)]
    scripted.fill(keys)
    ids = [scripted.submit(keys, range(3)) for _ in range(3)]
    assert inside.wait(TIMEOUT_S)
    scripted.queues.stop(abandon=False)
    go_on.set()
    answers = [scripted.answer(job_id) for job_id in ids]
    failed = [list(array.array("i", a.failed_idx)) for a in answers]
    assert failed == [[1, 2], [0, 1, 2], [0, 1, 2]]
    assert all("stopping" in a.error for a in answers)
    assert scripted.executor.join(timeout_s=TIMEOUT_S)


def test_many_evicted_keys_leave_in_frames_of_bounded_size(scripted):
    job = scripted.job([key_of(0)], [0])
    removed = [key_of(i) for i in range(2500)]
    scripted.replies.answer(job, [], removed, "", give_up=lambda: True)
    told = scripted.receive()
    assert [len(m.removed) for m in told] == [1000, 1000, 500]
    assert isinstance(told[-1], JobDone)
    assert [k for m in told for k in m.removed] == removed
    assert scripted.word(TierWord.COMPLETIONS) == 3
    scripted.replies.answer(job, range(40_000), [], "", give_up=lambda: True)
    assert array.array("i", scripted.receive()[-1].failed_idx).tolist() == [-1]


def test_an_engine_that_does_not_listen_is_waited_for(scripted):
    keys = [key_of(i) for i in range(16)]
    scripted.fill(keys)
    for _ in range(120):  # 120 answers of 36 KB: more than the socket takes
        job = scripted.job(keys, range(16), load=True)
        job.num_keys = 9000
        job.error = "made large"
        assert scripted.queues.put(job)
    last = scripted.next_id
    wait_until(
        lambda: not scripted.replies.try_send(JobDone(1, 2, 777)),
        timeout_s=TIMEOUT_S,
        what="a full queue",
    )
    scripted.answer(last)
    ids = [m.job_id for m in scripted.heard if isinstance(m, JobDone)]
    assert sorted(i for i in ids if i != 777) == list(range(1, last + 1))


def test_a_full_job_queue_is_a_result():
    queues = JobQueues()
    job = Job(1, False, 0.0)
    assert all(queues.put(job) for _ in range(4096))
    assert not queues.put(job)
    assert queues.put(Job(2, True, 0.0))
