"""Where we differ from vLLM on purpose: both managers, side by side.

Each test stands for a row of docs/decisions.md; it fails when vLLM comes to do what
we do, and the row can go.
"""

import pytest
from vllm_kit import (
    VLLM,
    OurTier,
    held_by_theirs,
    key,
    keys,
    make_theirs,
    number,
    numbers,
)

from shmoffload.core.manager import TieringOffloadingManager
from shmoffload.core.types import ReqContext, ScheduleEndContext


class Pair:
    """Both managers; a call goes to one of them."""

    def __init__(self, num_slots, *, wants_all=(False,)):
        self.our_tiers = [OurTier(wants) for wants in wants_all]
        self.ours = TieringOffloadingManager(num_slots, self.our_tiers, block_bytes=64)
        self.theirs, self.their_tiers = make_theirs(num_slots, wants_all, "lru")
        self.contexts = {}

    def announce(self, req_id):
        pair = ReqContext(req_id), VLLM.base.ReqContext(req_id)
        for manager, ctx in zip((self.ours, self.theirs), pair, strict=True):
            manager.on_new_request(ctx)
        return pair

    def have(self, *nums):
        for tier in self.our_tiers + self.their_tiers:
            tier.have.update(nums)

    def put(self, req_id, *nums):
        """Store and settle blocks on both sides."""
        our_ctx, their_ctx = self.announce(req_id)
        for manager, ctx in ((self.ours, our_ctx), (self.theirs, their_ctx)):
            manager.prepare_store(keys(nums), ctx)
            manager.complete_store(keys(nums), ctx)
        self.settle()
        self.ours.on_request_finished(our_ctx)
        self.theirs.on_request_finished(their_ctx)

    def end_step(self):
        self.ours.on_schedule_end(ScheduleEndContext())
        self.theirs.on_schedule_end(VLLM.base.ScheduleEndContext([], []))

    def settle(self, *, ok=True):
        self.end_step()
        for tier in self.our_tiers + self.their_tiers:
            for job_id in list(tier.jobs):
                tier.finish(job_id, ok, None)
        self.ours.advance(0.0)
        self.theirs._process_finished_jobs()

    def held_by_ours(self):
        return {number(k) for k in self.ours.table.blocks}


def scan(manager, ctx, nums):
    """Look up like a scheduler: stop at the first MISS."""
    answers = []
    for num in nums:
        answers.append(manager.lookup(key(num), ctx).name)
        if answers[-1] == "MISS":
            break
    return answers


def test_prefix_one_longer_than_the_primary_livelocks_vllm_only():
    pair = Pair(4)
    pair.have(*range(5))
    our_ctx, their_ctx = pair.announce("a")
    for _ in range(3):  # at most two rounds of promotion
        answers = scan(pair.ours, our_ctx, range(5))
        scan(pair.theirs, their_ctx, range(5))
        pair.settle()
    assert answers == ["HIT"] * 4 + ["MISS"]
    for _ in range(50):
        assert "HIT_PENDING" in scan(pair.theirs, their_ctx, range(5))
        pair.settle()


def test_hit_is_reserved_until_the_step_ends():
    pair = Pair(2)
    pair.put("old", 0, 1)
    our_ctx, their_ctx = pair.announce("a")
    assert scan(pair.ours, our_ctx, [0]) == scan(pair.theirs, their_ctx, [0]) == ["HIT"]
    our_ctx, their_ctx = pair.announce("b")
    assert pair.ours.prepare_store(keys([7, 8]), our_ctx) is None
    assert pair.theirs.prepare_store(keys([7, 8]), their_ctx) is not None
    assert 0 in pair.held_by_ours()
    assert 0 not in held_by_theirs(pair.theirs)


def test_failed_promotion_is_not_tried_again_for_the_request():
    pair = Pair(2)
    pair.have(0)
    our_ctx, their_ctx = pair.announce("a")
    scan(pair.ours, our_ctx, [0])
    scan(pair.theirs, their_ctx, [0])
    pair.settle(ok=False)
    assert scan(pair.ours, our_ctx, [0]) == ["MISS"]
    assert scan(pair.theirs, their_ctx, [0]) == ["HIT_PENDING"]


def test_no_load_after_the_tier_heard_finished():
    pair = Pair(2)
    pair.have(0)
    our_ctx, their_ctx = pair.announce("a")
    scan(pair.ours, our_ctx, [0])
    scan(pair.theirs, their_ctx, [0])
    pair.ours.on_request_finished(our_ctx)
    pair.theirs.on_request_finished(their_ctx)
    pair.end_step()
    assert pair.our_tiers[0].told == [("finished", "a")]
    assert pair.their_tiers[0].told == [("finished", "a"), ("job", "a")]


def test_key_goes_once_to_a_tier_that_wants_all():
    pair = Pair(2, wants_all=(True,))
    pair.put("old", 0)
    our_ctx, their_ctx = pair.announce("a")
    for _ in range(2):  # offered again, as after a preemption
        pair.ours.prepare_store(keys([0]), our_ctx)
        pair.theirs.prepare_store(keys([0]), their_ctx)
    assert pair.our_tiers[0].told.count(("job", "a")) == 1
    assert pair.their_tiers[0].told.count(("job", "a")) == 2


def test_key_twice_in_an_offer_is_one_key():
    pair = Pair(2)
    our_ctx, their_ctx = pair.announce("a")
    ours = pair.ours.prepare_store(keys([0, 0]), our_ctx)
    theirs = pair.theirs.prepare_store(keys([0, 0]), their_ctx)
    assert numbers(ours.keys_to_store) == [0]
    assert numbers(theirs.keys_to_store) == [0, 0]  # one slot is lost for ever


def test_offer_of_a_stranger_changes_nothing():
    pair = Pair(2)
    stranger = VLLM.base.ReqContext("x")
    assert pair.ours.prepare_store(keys([0]), ReqContext("x")) is None
    with pytest.raises(KeyError):
        pair.theirs.prepare_store(keys([0]), stranger)
    assert not pair.held_by_ours()
    assert held_by_theirs(pair.theirs) == {0: "pending"}


def test_cascade_does_not_keep_an_idle_engine_stepping():
    pair = Pair(2)
    our_ctx, their_ctx = pair.announce("a")
    for manager, ctx in ((pair.ours, our_ctx), (pair.theirs, their_ctx)):
        manager.prepare_store(keys([0]), ctx)
        manager.complete_store(keys([0]), ctx)
        manager.on_request_finished(ctx)
    assert not pair.ours.has_pending_work()
    assert pair.theirs.has_pending_work()


def test_reset_does_not_wait_for_open_jobs():
    pair = Pair(2)
    our_ctx, their_ctx = pair.announce("a")
    for manager, ctx in ((pair.ours, our_ctx), (pair.theirs, their_ctx)):
        manager.prepare_store(keys([0]), ctx)
        manager.complete_store(keys([0]), ctx)
    pair.ours.reset_cache()
    assert pair.ours.table.num_quarantined == 1
    with pytest.raises(AssertionError):  # its tier was not drained
        pair.theirs.reset_cache()


def test_refused_offer_is_no_use_of_its_blocks():
    pair = Pair(3)
    pair.put("old", 0, 1)
    pair.put("new", 2)
    our_ctx, their_ctx = pair.announce("a")
    offer = keys([0, 7, 8, 9])  # more than can be had
    assert pair.ours.prepare_store(offer, our_ctx) is None
    assert pair.theirs.prepare_store(offer, their_ctx) is None
    pair.ours.on_request_finished(our_ctx)
    pair.theirs.on_request_finished(their_ctx)
    pair.end_step()
    our_ctx, their_ctx = pair.announce("b")
    ours = pair.ours.prepare_store(keys([5, 6]), our_ctx)
    theirs = pair.theirs.prepare_store(keys([5, 6]), their_ctx)
    assert set(numbers(ours.evicted_keys)) == {0, 1}
    assert set(numbers(theirs.evicted_keys)) == {1, 2}
