"""pin, priority and ttl_s of a request: what goes earlier or later, and how far."""

import pytest
from manager_kit import HIT, PENDING, Rig, keys, numbers

from shmoffload.core.request_policy import Verdict
from shmoffload.core.retention import LOOK_AHEAD, PIN_AFTER_FINISH_S


def ours(**words):
    return {"shmoffload": words}


def filled(num_slots, **words):
    """Request a with words has 1..4, b without 5..8, all idle; b is the younger."""
    rig = Rig(num_slots, 0)
    rig.new("a", 1, 2, 3, 4, params=ours(**words))
    rig.store("a", 1, 2, 3, 4)
    rig.finish("a")
    rig.new("b", 5, 6, 7, 8)
    rig.store("b", 5, 6, 7, 8)
    rig.finish("b")
    rig.step()
    return rig


def evicted_by(rig, *new):
    rig.new(f"n{new[0]}", *new)
    return numbers(rig.offer(f"n{new[0]}", *new).evicted_keys)


def test_without_words_the_older_request_goes_first_and_nothing_is_marked():
    rig = filled(8)
    assert rig.manager._retention.marks == {}
    assert evicted_by(rig, 9, 10, 11, 12) == [4, 3, 2, 1]


def test_pinned_blocks_stay_within_a_quarter_and_the_rest_is_told():
    rig = filled(8, pin=True)  # may hold 2: the first ones, so the head
    assert evicted_by(rig, 9, 10, 11, 12, 13, 14) == [4, 3, 8, 7, 6, 5]
    assert rig.offer("n9", 20, 21, 22) is None  # not even under pressure
    rig.manager.check_integrity()


def test_the_answer_says_how_many_were_not_pinned():
    rig = Rig(8, 0)
    rig.new("a", 1, 2, 3, 4, params=ours(pin=True))
    assert rig.manager.request_answer("a").notes["shmoffload.pin"].verdict is (
        Verdict.ACCEPTED
    )
    rig.store("a", 1, 2, 3, 4)
    note = rig.manager.request_answer("a").notes["shmoffload.pin"]
    assert (note.verdict, note.why[:2]) == (Verdict.CLIPPED, "2 ")


@pytest.mark.parametrize(("ttl_s", "holds_s"), [(None, PIN_AFTER_FINISH_S), (40, 40)])
def test_a_pin_ends(ttl_s, holds_s):
    rig = filled(8, pin=True, **({} if ttl_s is None else {"ttl_s": ttl_s}))
    rig.advance(holds_s - 1)
    rig.step()
    assert rig.manager._retention.num_held == 2
    rig.advance(1)
    rig.step()
    assert rig.manager._retention.num_held == 0
    assert sorted(evicted_by(rig, 9, 10, 11, 12)) == [1, 2, 3, 4]


def test_a_pin_of_a_live_request_does_not_end():
    rig = Rig(8, 0)
    rig.new("a", 1, params=ours(pin=True))
    rig.store("a", 1)
    rig.advance(10 * PIN_AFTER_FINISH_S)
    rig.step()
    assert rig.manager._retention.num_held == 1


def test_two_requests_pin_one_block_and_it_counts_once():
    rig = filled(8, pin=True, ttl_s=10)
    rig.new("c", 1, params=ours(pin=True, ttl_s=20))
    assert rig.look("c", 1) == [HIT]
    rig.load("c", 1)
    rig.loaded("c", 1)
    rig.manager.check_integrity()
    assert rig.manager._retention.num_held == 2
    rig.advance(11)
    rig.step()
    assert rig.manager._retention.num_held == 1
    rig.advance(10)
    rig.step()
    assert rig.manager._retention.num_held == 0


def test_higher_priority_goes_later():
    rig = filled(8, priority=1)
    assert evicted_by(rig, 9, 10, 11, 12, 13) == [8, 7, 6, 5, 4]


def test_priority_is_that_of_the_last_user():
    rig = filled(8, priority=1)
    rig.new("c", 1, 2)
    assert rig.look("c", 1, 2) == [HIT, HIT]
    rig.load("c", 1, 2)
    rig.loaded("c", 1, 2)
    rig.finish("c")
    rig.step()
    # 1 and 2 are the youngest now, but 3 and 4 alone have a priority.
    assert evicted_by(rig, *range(9, 16)) == [8, 7, 6, 5, 2, 1, 4]


def test_priority_looks_ahead_no_further_than_it_says():
    num = LOOK_AHEAD + 8
    rig = Rig(num, 0)
    rig.new("a", *range(LOOK_AHEAD), params=ours(priority=3))
    rig.store("a", *range(LOOK_AHEAD))
    rig.finish("a")
    rig.new("b", *range(100, 108))
    rig.store("b", *range(100, 108))
    rig.finish("b")
    rig.step()
    # All of the first window have a priority, so its oldest goes; then b comes in.
    assert evicted_by(rig, 200, 201) == [LOOK_AHEAD - 1, 107]


def test_a_block_told_to_somebody_does_not_go_although_it_was_next():
    """A promotion's walk is carried on, and has looked ahead by then."""
    rig = Rig(3)
    rig.new("old", 1, 2, 3, params=ours(priority=1))
    rig.store("old", 1, 2, 3)
    rig.settle()
    rig.finish("old")
    rig.tiers[0].have.update(keys(7, 8, 9))
    rig.new("a", 7, 8, 9)
    assert rig.look("a", 7) == [PENDING]  # takes 3; 2 and 1 are ahead
    rig.new("b", 2)
    assert rig.look("b", 2) == [HIT]
    assert rig.look("a", 8) == [PENDING]  # takes 1
    assert rig.look("b", 2) == [HIT]
    rig.manager.check_integrity()


def test_expired_blocks_go_first_and_can_be_read_until_then():
    rig = Rig(8, 0)
    rig.new("old", 5, 6, 7, 8)
    rig.store("old", 5, 6, 7, 8)
    rig.finish("old")
    rig.new("a", 1, 2, 3, 4, params=ours(ttl_s=10))
    rig.store("a", 1, 2, 3, 4)
    rig.finish("a")
    rig.advance(9)
    rig.step()
    assert evicted_by(rig, 9) == [8]
    rig.advance(1)
    rig.step()
    rig.new("reader", 4)
    assert rig.look("reader", 4) == [HIT]
    assert sorted(evicted_by(rig, 10, 11, 12)) == [1, 2, 3]  # 4 is told to somebody
    rig.step()
    assert evicted_by(rig, 13) == [4]
    rig.manager.check_integrity()


@pytest.mark.parametrize(
    ("ttl_s", "after_s", "first"),
    [(None, 11, [8]), (30, 11, [8]), (1, 11, [4]), (1, 9, [8])],
)
def test_a_use_prolongs_a_lifetime_and_never_shortens_it(ttl_s, after_s, first):
    rig = Rig(8, 0)
    rig.new("old", 5, 6, 7, 8)
    rig.store("old", 5, 6, 7, 8)
    rig.finish("old")
    rig.new("a", 4, params=ours(ttl_s=10))
    rig.store("a", 4)
    rig.finish("a")
    rig.new("more", 1, 2, 3)
    rig.store("more", 1, 2, 3)
    rig.new("c", 4, params=None if ttl_s is None else ours(ttl_s=ttl_s))
    assert rig.look("c", 4) == [HIT]
    rig.load("c", 4)
    rig.loaded("c", 4)
    rig.advance(after_s)
    rig.step()
    assert evicted_by(rig, 9) == first


def test_expired_blocks_are_not_cascaded():
    rig = Rig(4)
    rig.new("a", 1, 2, params=ours(ttl_s=10))
    rig.offer("a", 1)
    rig.advance(11)
    rig.stored("a", 1)
    rig.offer("a", 2)
    rig.stored("a", 2)
    assert rig.tiers[0].said("store") == [["a", 2]]
    assert rig.counters.cascade_blocks_withheld == [1]


def test_marks_die_with_their_blocks():
    words = ours(pin=True, priority=1, ttl_s=5)
    rig = Rig(4)
    rig.new("a", 1, 2, params=words)
    rig.offer("a", 1)
    rig.stored("a", 1, ok=False)
    assert rig.manager._retention.marks == {}
    rig.store("a", 2)
    rig.manager.reset_cache()
    rig.manager.check_integrity()
    assert rig.manager._retention.marks == {}
    rig.finish("a")
    rig.settle()
    rig.advance(1000)
    rig.step()
    rig.check_quiescent()


def test_ends_of_dead_blocks_do_not_pile_up():
    rig = Rig(4, 0)
    for i in range(400):
        rig.new(f"r{i}", i, params=ours(ttl_s=1000))
        rig.store(f"r{i}", i)
        rig.finish(f"r{i}")
        rig.step()
    assert len(rig.manager._retention._ends) <= 4 * 4 + 64
