"""A request of several jobs is one use, its head the last to go; within bounds."""

import itertools

import pytest
from executor_kit import Rig
from hypothesis import given
from hypothesis import strategies as st

from shmoffload.testing.poll import wait_until
from shmoffload.testing.tier_tests import HeapRegion, key_of
from shmoffload.wire.session import TierWord
from shmoffload.worker import executor, jobs
from shmoffload.worker.intake import Job
from shmoffload.worker.jobs import JobQueues
from shmoffload.worker.tiers.memory import MemoryTier
from shmoffload.worker.uses import Uses, in_order

STORE, LOAD = False, True


def job(keys, *, load=False, req_id="a"):
    made = [key_of(i) for i in keys]
    return Job(1, load, 0.0, made, num_keys=len(made), req_id=req_id)


def used(use):
    """The numbers of a use's keys."""
    names = {key_of(i): i for i in range(64)}
    return [names[key] for key in use.keys]


def order(*of_jobs):
    numbers = [([b"%d" % n for n in keys], is_load) for is_load, keys in of_jobs]
    return [int(key) for key in in_order(numbers)]


# The order of several jobs -----------------------------------------------------------


@pytest.mark.parametrize(
    "of_jobs",
    [
        [(STORE, [1, 2]), (STORE, [3, 4]), (STORE, [5, 6])],
        [(LOAD, [1, 2]), (LOAD, [3, 4]), (STORE, [5, 6])],
        # Preempted; some of it is found in the tier, some in the primary.
        [(STORE, [1, 2, 3]), (STORE, [4, 5, 6]), (LOAD, [4, 5, 6])],
        [(STORE, [1, 2, 3, 4]), (LOAD, [3, 4, 5]), (STORE, [6])],
        # The head was in the primary at first, so that no job brought it.
        [(STORE, [5, 6]), (LOAD, [1, 2, 3, 4])],
        [(STORE, [5, 6]), (LOAD, [1, 2, 3, 4, 5, 6])],
        [(LOAD, [1, 2]), (STORE, [5, 6]), (LOAD, [1, 2, 3, 4, 5, 6])],
        [(LOAD, [1, 2]), (STORE, [5, 6]), (STORE, [3, 4, 5, 6])],
    ],
)
def test_the_head_of_a_request_comes_first(of_jobs):
    assert order(*of_jobs) == [1, 2, 3, 4, 5, 6]


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), unique=True))))
def test_every_key_comes_once(of_jobs):
    assert sorted(order(*of_jobs)) == sorted({n for _, keys in of_jobs for n in keys})


@given(st.integers(0, 12), st.lists(st.integers(0, 12)), st.integers(0, 12))
def test_chunks_of_a_prefix_come_in_its_order(num_loaded, cuts, again):
    """A loaded head, a rest in chunks, then a part of it all a second time."""
    ends = sorted({num_loaded, *(cut for cut in cuts if cut > num_loaded), 13})
    chunks = [(STORE, range(*pair)) for pair in itertools.pairwise(ends)]
    of_jobs = [(LOAD, range(num_loaded)), *chunks, (LOAD, range(again, 13))]
    assert order(*of_jobs) == list(range(13))


# What is remembered ------------------------------------------------------------------


def test_a_request_of_one_job_is_in_order_already():
    uses = Uses()
    uses.announce("a")
    uses.note(job([1, 2]))
    assert uses.finish("a") is None
    assert uses.finish("a") is None
    assert uses.num_keys == len(uses) == 0


def test_requests_are_kept_apart_and_end():
    uses = Uses()
    for name in "ab":
        uses.announce(name)
    uses.note(job([1, 2]))
    uses.note(job([7], req_id="b"))
    uses.note(job([3, 4]))
    uses.note(job([8], req_id="b"))
    uses.note(job([0], load=True, req_id="nobody announced it"))
    assert uses.num_keys == 6
    use = uses.finish("a")
    assert used(use) == [1, 2, 3, 4]
    assert use.is_use
    assert not use.is_promotion
    assert used(uses.finish("b")) == [7, 8]
    assert uses.num_keys == len(uses) == 0


@pytest.mark.parametrize("bound", ["max_keys", "max_keys_per_request"])
def test_a_request_that_is_too_much_is_not_ordered_by_half(bound):
    uses = Uses(**{bound: 4})
    uses.announce("a")
    uses.note(job([1, 2]))
    uses.note(job([3, 4, 5]))
    uses.note(job([6]))
    assert uses.num_keys == 0
    uses.announce("b")
    uses.note(job([7, 8], req_id="b"))
    uses.note(job([9], req_id="b"))
    assert uses.finish("a") is None
    assert used(uses.finish("b")) == [7, 8, 9]
    assert uses.num_keys == len(uses) == 0


def test_more_requests_than_the_bound_are_not_ordered():
    uses = Uses(max_requests=1)
    for name in "ab":
        uses.announce(name)
        uses.note(job([1], req_id=name))
        uses.note(job([2], req_id=name))
    assert uses.finish("b") is None
    assert used(uses.finish("a")) == [1, 2]


# Among the jobs ----------------------------------------------------------------------


def use_of(keys):
    return Job(0, False, 0.0, list(keys), num_keys=len(keys), is_use=True)


def test_a_use_waits_its_turn_and_is_no_job(monkeypatch):
    monkeypatch.setattr(jobs, "MAX_JOBS", 2)
    monkeypatch.setattr(jobs, "MAX_USE_KEYS", 4)
    queues = JobQueues()
    first, use, second = job([1]), use_of([key_of(1)] * 3), job([2])
    assert all(queues.put(item) for item in (first, use, second))
    assert not queues.put(use_of([key_of(1)] * 2))
    assert not queues.put(job([3]))
    assert queues.put(job([3], load=True))
    assert len(queues) == 3
    assert queues.take(is_promotion=False) is first
    queues.done()
    assert queues.take(is_promotion=False) is use
    assert len(queues) == 2
    assert queues.put(use_of([key_of(1)] * 4))
    queues.stop(abandon=True)
    assert len(queues) == 0
    assert queues.take(is_promotion=False) is None


def test_a_use_orders_the_tier_and_is_not_answered(monkeypatch):
    monkeypatch.setattr(executor, "_KEYS_A_USE", 3)
    with Rig(MemoryTier(), HeapRegion(), max_blocks=16) as rig:
        a, b = ([key_of(i, name) for i in range(8)] for name in "ab")
        rig.run(a[:4], range(4))
        rig.run(b, range(8))
        rig.run(a[4:], range(4))
        assert rig.queues.put(use_of([*a, key_of(99)]))
        rig.run(b[:1], [0])
        assert list(rig.tier._lru) == [*b[:0:-1], *a[::-1], b[0]]
        rig.wait_for(TierWord.JOBS_DONE, 4)
        assert rig.word(TierWord.COMPLETIONS) == 4
        assert rig.word(TierWord.JOBS_QUEUED) == 0


def test_a_use_that_breaks_costs_nothing_else():
    class Grim(MemoryTier):
        def exists(self, keys, deadline_s):
            if len(keys) > 1:
                raise OSError("grim")
            return super().exists(keys, deadline_s)

    with Rig(Grim(), HeapRegion()) as rig:
        assert rig.queues.put(use_of([key_of(0), key_of(1)]))
        assert rig.run([key_of(0)], [0]) == ([], [], "")


def test_a_worker_that_leaves_orders_nothing():
    with Rig(MemoryTier(), HeapRegion()) as rig:
        keys = [key_of(i) for i in range(4)]
        rig.run(keys, range(4))
        rig.queues.stopping = True
        assert rig.queues.put(use_of(keys[::-1]))
        wait_until(lambda: rig.executor.has_stopped, timeout_s=60, what="the end")
        assert list(rig.tier._lru) == keys[::-1]
