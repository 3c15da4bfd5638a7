"""Requests, stores and cascades of the manager, beside the scenarios."""

from manager_kit import HIT, Rig, numbers

from shmoffload.core.types import OffloadPolicy


def test_a_granted_offer_covers_exactly_its_absent_keys():
    """Ours grants all or none; what is left out is what the primary has."""
    rig = Rig(5)
    rig.resident(1)
    rig.new("a", 0, 1, 2)
    assert numbers(rig.offer("a", 0, 1, 2).keys_to_store) == [0, 2]


def test_announcing_a_live_request_again_changes_nothing():
    rig = Rig(5, request_level={0})
    rig.new("a", 1)
    rig.offer("a", 1)
    assert rig.manager.on_new_request(rig.contexts["a"]).policy is (
        OffloadPolicy.REQUEST_LEVEL
    )
    assert rig.tiers[0].said("new") == [["a"]]
    assert rig.counters.late_calls == 1
    rig.stored("a", 1)
    rig.finish("a")
    rig.settle()
    rig.check_quiescent()


def test_id_that_comes_again_before_its_stores_end():
    """Tiers see finished before the new announcement; the old bytes still count."""
    rig = Rig(5)
    rig.new("a", 1)
    rig.offer("a", 1)
    rig.finish("a")
    rig.new("a", 2)
    assert rig.tiers[0].log == [("new", "a"), ("finished", "a"), ("new", "a")]
    rig.stored("a", 1)
    assert rig.look("a", 1) == [HIT]
    assert rig.tiers[0].said("store") == []
    rig.finish("a")
    rig.check_quiescent()


def test_cascade_without_credit_is_dropped_counted_and_sent_with_a_later_offer():
    rig = Rig(4, 2, request_level={0})
    rig.tiers[0].credit = False
    rig.new("a", 1, 2)
    rig.store("a", 1, 2)
    assert rig.counters.cascade_blocks_dropped == [2, 0]
    assert rig.pins(1, 2) == [1, 1]
    rig.tiers[0].credit = True
    rig.offer("a", 1, 2)
    assert rig.tiers[0].said("store") == [["a", 1, 2]]


def test_duplicate_keys_of_an_offer_count_once():
    """INV-15."""
    rig = Rig(4)
    rig.new("a", 1, 2)
    assert numbers(rig.offer("a", 1, 2, 1, 1).keys_to_store) == [1, 2]
    assert rig.manager.table.num_pending == 2
