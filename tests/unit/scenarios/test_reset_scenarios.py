"""Scenarios of reset, by their ids.

A docstring that says "ours" names the row of docs/decisions.md, section "Where we
differ from vLLM's tiering".
"""

from manager_kit import HIT, MISS, PENDING, Rig, key, with_tier
from planner_kit import Rig as PlannerRig


def storing_rig(num_slots):
    """A planner over a real manager; the GPU store of ``a`` is open."""
    rig = with_tier(num_slots)
    planner = PlannerRig(manager=rig.manager)
    a = planner.request("a", 12)
    planner.admit(a)
    meta = planner.step(tokens=[(a, 12)])
    assert len(meta.stores) == 1
    return rig, planner, a, meta


def test_s38_reset_with_everything_open():
    """Ours, rows "reset_cache never waits", "quarantine": no job is waited for."""
    rig = Rig(6, 1, request_level={0})
    rig.tiers[0].have.add(key(9))
    rig.new("a", 1, 2, 3)
    rig.new("b", 2, 3)
    rig.store("a", 1)  # a cascade is open
    rig.load("a", 1)  # and a load
    rig.offer("a", 2)  # and a store
    rig.look("a", 9)
    rig.step()  # and a promotion
    rig.offer("b", 2)  # parked
    rig.finish("b")
    rig.manager.reset_cache()
    assert rig.tiers[0].said("finished") == [["b"]]
    assert not rig.manager.table.blocks
    assert not rig.manager.has_pending_work()
    assert rig.tracked() == {"a"}
    assert (rig.manager.table.num_quarantined, rig.manager.table.num_free) == (3, 3)
    rig.manager.check_integrity()
    # Answers of before the reset only let go of the slots.
    rig.stored("a", 2)
    rig.loaded("a", 1)
    rig.tiers[0].answer()
    rig.advance()
    assert rig.manager.table.num_free == 6
    assert rig.counters.late_replies == 2
    assert rig.look("a", 2, 9) == [MISS, PENDING]
    rig.store("a", 2, 3)
    assert rig.look("a", 2, 3) == [HIT, HIT]
    rig.finish("a")
    rig.settle()
    rig.check_quiescent()


def test_s39_queued_promotion_is_never_sent_after_a_reset():
    rig = with_tier(5, 1)
    rig.new("a", 1)
    rig.look("a", 1)
    rig.manager.reset_cache()
    rig.step()
    assert rig.tiers[0].said("load") == []
    assert rig.manager.table.num_free == 5


def test_s40_lookup_after_a_reset_with_a_gpu_store_in_flight():
    """Ours, row "quarantine": no hold; MISS only while there is no other slot."""
    for num_slots, answer in ((2, PENDING), (1, MISS)):
        rig, planner, _, meta = storing_rig(num_slots)
        rig.tiers[0].have.add(key(5))
        held = {slot for job in meta.stores for slot in job.slots.tolist()}
        planner.planner.reset_cache()
        rig.new("b", 5)
        assert rig.look("b", 5) == [answer]
        if answer is PENDING:
            assert rig.slot(5) not in held
        rig.step()
        planner.ack(meta)  # the last writer has stopped
        assert rig.manager.table.num_quarantined == 0
        assert rig.look("b", 5) == [PENDING]


def test_s41_reset_with_nothing_in_flight():
    rig = with_tier(2, 5)
    rig.new("a", 1)
    rig.store("a", 1)
    rig.settle()
    rig.manager.reset_cache()
    assert rig.manager.table.num_free == 2
    assert rig.look("a", 5) == [PENDING]


def test_s42_old_ack_after_a_reset_only_lets_go_of_the_slot():
    """Ours, row "quarantine": what vLLM calls the fence is the slot's own state."""
    rig, planner, a, meta = storing_rig(2)
    planner.planner.reset_cache()
    again = planner.step(tokens=[(a, 0)])
    assert again.jobs_to_flush >= {meta.stores[0].job_id}
    assert [list(job.keys) for job in again.stores] == [list(meta.stores[0].keys)]
    planner.ack(meta)
    block = rig.manager.table.blocks[planner.key(a, 0)]
    assert block.slot == again.stores[0].slots[0]
    assert rig.tiers[0].said("store") == []  # the old bytes are nobody's
    assert rig.manager.table.num_quarantined == 0
    planner.ack(again)
    assert len(rig.tiers[0].said("store")) == 1


def test_flush_frees_what_gpu_copies_held_without_their_answers():
    rig = Rig(2)
    rig.new("a", 1)
    rig.offer("a", 1)
    rig.manager.reset_cache()
    assert rig.manager.table.num_quarantined == 1
    rig.manager.on_reset_flushed()
    assert rig.manager.table.num_free == 2
    rig.stored("a", 1)
    assert rig.look("a", 1) == [MISS]
    rig.finish("a")
    rig.settle()
    rig.check_quiescent()
