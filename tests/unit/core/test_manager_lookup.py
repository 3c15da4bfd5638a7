"""Lookups, promotions and deadlines of the manager, beside the scenarios."""

import numpy as np
import pytest
from manager_kit import HIT, MISS, PENDING, Rig, key, keys, land, with_tier


def test_answer_from_the_wrong_tier_or_twice_is_late():
    rig = with_tier(5, 1, num_tiers=2)
    rig.new("a", 1)
    rig.look("a", 1)
    rig.step()
    job = next(iter(rig.tiers[0].jobs.values()))
    rig.tiers[0].answer()
    wrong = list(rig.tiers[0].done)
    rig.tiers[0].done, rig.tiers[1].done = [], list(wrong)
    rig.advance()
    assert rig.counters.late_replies == 1
    assert rig.look("a", 1) == [PENDING]
    rig.tiers[0].done = wrong * 2
    rig.advance()
    assert rig.counters.late_replies == 2
    assert rig.look("a", 1) == [HIT]
    assert job.slots.dtype == np.int32


def test_finish_with_a_key_parked_on_an_own_queued_promotion():
    rig = with_tier(5, 1, request_level={0})
    rig.new("a", 1)
    rig.look("a", 1)
    rig.offer("a", 1)
    rig.finish("a")
    assert rig.tiers[0].log == [("new", "a"), ("finished", "a")]
    assert rig.counters.parked_dropped == 1
    rig.check_quiescent()


def test_prepare_load_is_atomic_and_in_key_order():
    """INV-11, INV-14."""
    rig = Rig(5)
    rig.new("a", 1, 2, 3)
    rig.store("a", 1, 2)
    rig.settle()
    rig.offer("a", 3)
    for bad in (3, 9):
        with pytest.raises(KeyError):
            rig.load("a", 1, 2, bad)
        assert rig.pins(1, 2) == [0, 0]
    slots = rig.load("a", 2, 1, 2)
    blocks = rig.manager.table.blocks
    assert list(slots) == [blocks[key(n)].slot for n in (2, 1, 2)]
    assert rig.pins(1, 2) == [1, 2]
    rig.loaded("a", 2, 1, 2)
    assert rig.pins(1, 2) == [0, 0]


def test_load_source_is_the_tier_until_the_first_load():
    rig = with_tier(5, 1)
    rig.new("a", 1)
    rig.look("a", 1)
    land(rig)
    assert rig.manager.load_source(key(1)) == 0
    rig.load("a", 1)
    assert rig.manager.load_source(key(1)) == -1
    rig.load("a", 1)
    assert (rig.counters.loads_tier, rig.counters.loads_primary) == ([1], 1)


def test_deadline_of_a_promotion():
    """S60's core, F20, INV-34: MISS at once; the slot waits for the answer."""
    rig = with_tier(2, 1, 2, num_tiers=2, job_deadline_s=30.0)
    rig.tiers[1].have.update(keys(1, 3))
    rig.new("a", 1, 2)
    rig.new("b", 1, 3)
    rig.look("a", 1)
    rig.step()
    rig.advance(29.9)
    assert rig.look("a", 1) == [PENDING]
    assert rig.manager.take_overdue_tiers() == []
    rig.advance(0.2)
    assert rig.manager.take_overdue_tiers() == [0]
    assert rig.manager.take_overdue_tiers() == []
    assert rig.look("a", 1, 2) == [MISS, MISS]  # 2: the tier answers MISS now
    assert not rig.manager.has_pending_work()
    assert rig.manager.table.num_quarantined == 1
    rig.step()
    assert rig.look("a", 1, 2) == [MISS, MISS]
    rig.step()
    assert rig.look("b", 1, 3) == [PENDING, MISS]  # one slot is left
    rig.tiers[0].answer()
    rig.advance()
    assert rig.manager.table.num_quarantined == 0
    assert rig.look("a", 2) == [PENDING]  # back, with the slot that came back


def test_deadline_of_a_cascade_keeps_its_pins():
    rig = Rig(2, job_deadline_s=30.0)
    rig.new("a", 1, 2)
    rig.store("a", 1)
    rig.advance(31.0)
    assert rig.manager.take_overdue_tiers() == [0]
    assert rig.pins(1) == [1]
    assert rig.look("a", 1) == [HIT]
    rig.store("a", 2)
    assert rig.counters.cascade_blocks_dropped == [1]
    rig.tiers[0].answer(ok=False)
    rig.advance()
    assert rig.pins(1) == [0]
