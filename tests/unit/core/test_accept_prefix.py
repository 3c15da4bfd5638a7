"""``accept_prefix``: the part of an offer that finds room, and the planner's rest."""

from manager_kit import HIT, ManualTier, Rig, numbers
from planner_kit import Rig as PlannerRig

from shmoffload.core.manager import TieringOffloadingManager


def test_a_prefix_is_accepted_only_if_configured():
    for accept_prefix, stored in ((False, None), (True, [1, 2, 3])):
        rig = Rig(3, 0, accept_prefix=accept_prefix)
        rig.new("a", 1, 2, 3, 4)
        granted = rig.offer("a", 1, 2, 3, 4)
        assert (granted and numbers(granted.keys_to_store)) == stored
        if granted:
            assert numbers(granted.left_out) == [4]
            assert len(granted.slots) == 3
            assert rig.counters.stores_shortened == 1
        rig.manager.check_integrity()


def test_a_prefix_evicts_what_may_go_and_nothing_of_the_offer():
    rig = Rig(4, 0, accept_prefix=True)
    rig.resident(1, 2, 3, 4)
    rig.new("a", 1, 5, 6, 7, 8)
    granted = rig.offer("a", 1, 5, 6, 7, 8)
    assert numbers(granted.keys_to_store) == [5, 6, 7]
    assert numbers(granted.evicted_keys) == [4, 3, 2]
    assert numbers(granted.left_out) == [8]
    rig.stored("a", 5, 6, 7)
    rig.step()
    assert rig.offer("a", 8) is None  # its own head is not in the way of its tail
    assert rig.look("a", 1, 5, 6, 7) == [HIT] * 4


def test_blocks_behind_what_is_left_out_are_offered_again_and_not_cascaded_yet():
    rig = Rig(3, request_level=(0,), accept_prefix=True)
    rig.resident(9)
    rig.new("a", 1, 2, 3, 9)
    granted = rig.offer("a", 1, 2, 3, 9)
    assert numbers(granted.keys_to_store) == [1, 2]
    assert numbers(granted.left_out) == [3]
    assert rig.tiers[0].said("store") == []


def test_the_planner_offers_the_rest_again():
    tier = ManualTier()
    manager = TieringOffloadingManager(2, [tier], block_bytes=64, accept_prefix=True)
    rig = PlannerRig(manager=manager)
    request = rig.request("a", 60)
    rig.admit(request)
    stored = []
    for num_tokens in (60, 0, 0, 0):
        meta = rig.step(tokens=[(request, num_tokens)])
        stored.append([key for job in meta.stores for key in job.keys])
        rig.ack(meta)
        tier.answer()
        manager.advance(0.0)
    every = [rig.key(request, i) for i in range(5)]
    assert stored == [every[:2], every[2:4], every[4:], []]


def test_the_planner_counts_what_never_found_room():
    tier = ManualTier()  # answers nothing: what was stored stays pinned
    manager = TieringOffloadingManager(2, [tier], block_bytes=64, accept_prefix=True)
    rig = PlannerRig(manager=manager)
    request = rig.request("a", 60)
    rig.admit(request)
    rig.ack(rig.step(tokens=[(request, 60)]))
    rig.planner.request_finished(request)
    rig.step()
    assert rig.planner.counters.blocks_never_stored == 3
