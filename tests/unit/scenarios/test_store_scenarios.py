"""Scenarios of requests, GPU stores and cascades, by their ids.

A docstring that says "ours" names the row of docs/decisions.md, section "Where we
differ from vLLM's tiering".
"""

import pytest
from manager_kit import (
    HIT,
    MISS,
    PENDING,
    Rig,
    keys,
    make_mailbox,
    numbers,
    reply,
    sent_jobs,
)
from planner_kit import Rig as PlannerRig

from shmoffload.core.types import OffloadPolicy, ReqContext

REQUEST_LEVEL = OffloadPolicy.REQUEST_LEVEL
BLOCK_LEVEL = OffloadPolicy.BLOCK_LEVEL


def parked_rig():
    """S06: a writes key 1; b offers it too; the first tier wants all of both."""
    rig = Rig(5, 2, request_level={0})
    rig.new("a", 1)
    rig.offer("a", 1)
    rig.new("b", 1)
    assert numbers(rig.offer("b", 1).keys_to_store) == []
    return rig


def stored_rig():
    """S09: three keys written, two tiers."""
    rig = Rig(5, 2)
    rig.new("a", 1, 2, 3)
    rig.store("a", 1, 2, 3)
    return rig


def test_s01_only_tiers_that_asked_are_remembered_until_the_finish():
    rig = Rig(5, 2)
    assert rig.new("a") is BLOCK_LEVEL
    assert rig.manager._request_level_tiers == {}
    rig.finish("a")
    assert not rig.tracked()
    rig.tiers[0].policy = REQUEST_LEVEL
    assert rig.new("b") is REQUEST_LEVEL
    assert rig.manager._request_level_tiers == {"b": [rig.tiers[0]]}
    rig.finish("b")
    rig.check_quiescent()
    words = [("new", "a"), ("finished", "a"), ("new", "b"), ("finished", "b")]
    assert [tier.log for tier in rig.tiers] == [words, words]


def test_s02_present_blocks_go_at_once_and_only_to_tiers_that_asked():
    rig = Rig(5, 2)
    rig.resident(0, 1, 2)
    rig.tiers[0].policy = REQUEST_LEVEL
    rig.new("b", 0, 1, 2, 3, 4)
    granted = rig.offer("b", 0, 1, 2, 3, 4)
    assert numbers(granted.keys_to_store) == [3, 4]
    assert rig.tiers[0].said("store") == [["b", 0, 1, 2]]
    assert rig.tiers[1].said("store") == []
    assert rig.pins(0, 1, 2) == [1, 1, 1]
    rig.stored("b", 3, 4)
    assert rig.tiers[0].said("store") == [["b", 0, 1, 2], ["b", 3, 4]]
    assert rig.tiers[1].said("store") == [["b", 3, 4]]
    rig.finish("b")
    rig.settle()
    rig.check_quiescent()


def test_s04_with_the_real_manager_the_loaded_block_comes_from_the_primary():
    rig = Rig(8, 1)
    planner = PlannerRig(tokens=4, per_block=3, manager=rig.manager)
    earlier = planner.request("earlier", 12)
    planner.admit(earlier)
    planner.ack(planner.step(tokens=[(earlier, 12)]))
    planner.planner.request_finished(earlier)
    planner.step()
    rig.settle()
    rig.tiers[0].log.clear()

    rig.tiers[0].policy = REQUEST_LEVEL
    request = planner.request("b", 24)
    request.block_hashes[:3] = earlier.block_hashes
    assert planner.admit(request) == 12
    planner.ack(planner.step())
    meta = planner.step(tokens=[(request, 12)])
    (store,) = meta.stores
    assert list(store.keys) == [planner.key(request, 1, 3)]
    assert list(store.gpu_block_ids) == [7, 8, 9]
    present, new = planner.key(request, 0, 3), planner.key(request, 1, 3)
    jobs = list(rig.tiers[0].jobs.values())
    assert [list(job.keys) for job in jobs] == [[present]]
    planner.ack(meta)
    jobs = list(rig.tiers[0].jobs.values())
    assert [list(job.keys) for job in jobs] == [[present], [new]]
    planner.planner.request_finished(request)
    planner.step()
    rig.settle()
    rig.check_quiescent()


def test_s06_key_that_another_request_writes_is_parked():
    rig = parked_rig()
    assert rig.tiers[0].said("store") == []
    assert rig.pins(1) == [0]
    rig.finish("b")
    rig.step()
    assert rig.manager.has_pending_work()
    assert [tier.said("finished") for tier in rig.tiers] == [[], []]


def test_s07_parked_key_goes_when_its_write_ends():
    """Ours, row "sent once": without waiting for a step end."""
    rig = parked_rig()
    rig.finish("b")
    rig.stored("a", 1)
    rig.step()
    assert rig.tiers[0].said("store") == [["a", 1], ["b", 1]]
    assert rig.tiers[1].said("store") == [["a", 1]]
    for tier in rig.tiers:
        assert tier.log[-1] == ("finished", "b")
    rig.finish("a")
    rig.settle()
    rig.check_quiescent()


def test_s08_parked_key_is_dropped_when_its_write_fails():
    rig = parked_rig()
    rig.finish("b")
    rig.stored("a", 1, ok=False)
    rig.step()
    for tier in rig.tiers:
        assert tier.said("store") == []
        assert tier.said("finished") == [["b"]]
    assert rig.counters.parked_dropped == 1
    assert not rig.manager.has_pending_work()


def test_s09_complete_store_makes_one_job_per_tier():
    rig = stored_rig()
    assert [t.said("store") for t in rig.tiers] == [[["a", 1, 2, 3]]] * 2
    assert rig.pins(1, 2, 3) == [2, 2, 2]


def test_s10_each_job_holds_one_pin():
    rig = stored_rig()
    rig.tiers[0].answer()
    rig.advance()
    assert rig.pins(1, 2, 3) == [1, 1, 1]
    rig.tiers[1].answer()
    rig.advance()
    assert rig.pins(1, 2, 3) == [0, 0, 0]


def test_s11_failed_store_leaves_no_block_and_no_job():
    rig = Rig(5, 2)
    rig.new("a", 1, 2)
    rig.offer("a", 1, 2)
    assert rig.look("a", 1) == [PENDING]
    rig.stored("a", 1, 2, ok=False)
    assert rig.look("a", 1, 2) == [MISS, MISS]
    assert rig.manager.table.num_free == 5
    assert [tier.said("store") for tier in rig.tiers] == [[], []]


def test_s12_failed_cascade_releases_its_pins_and_is_not_repeated():
    rig = Rig(5, 1)
    rig.new("a", 1)
    rig.store("a", 1)
    rig.tiers[0].answer(ok=False)
    rig.advance()
    rig.step()
    assert rig.pins(1) == [0]
    assert rig.counters.cascade_blocks_failed == [1]
    assert rig.tiers[0].said("store") == [["a", 1]]
    assert rig.look("a", 1) == [HIT]


def test_s27_victims_are_never_keys_of_the_offer():
    rig = Rig(2)
    rig.resident(0, 5)
    rig.new("a", 0, 9)
    granted = rig.offer("a", 0, 9)
    assert numbers(granted.keys_to_store) == [9]
    assert numbers(granted.evicted_keys) == [5]


def test_s28_refusal_changes_nothing():
    """Two victims would be there, but both are of the offer."""
    rig = Rig(2)
    rig.resident(0, 1)
    rig.new("a", 0, 1, 7, 8)
    before = [rig.slot(0), rig.slot(1), rig.order(), rig.manager.table.num_free]
    assert rig.offer("a", 0, 1, 7, 8) is None
    assert [rig.slot(0), rig.slot(1), rig.order(), rig.manager.table.num_free] == before
    assert rig.tiers[0].said("store") == []
    rig.finish("a")
    rig.check_quiescent()


def test_s29_offer_larger_than_the_primary_is_refused_for_ever():
    """Row "longest prefix that fits": an option of ours, off by default."""
    rig = Rig(3)
    rig.new("a", 0, 1, 2, 3)
    for _ in range(5):
        assert rig.offer("a", 0, 1, 2, 3) is None
        rig.step()
    assert rig.counters.stores_refused == 5
    assert rig.manager.table.num_free == 3


def test_s34_finish_waits_for_the_prepared_store():
    rig = Rig(5, 2)
    rig.new("a", 1, 2)
    rig.offer("a", 1, 2)
    rig.finish("a")
    rig.step()
    assert [tier.log for tier in rig.tiers] == [[("new", "a")]] * 2
    assert rig.manager.has_pending_work()
    rig.stored("a", 1, 2)
    for tier in rig.tiers:
        assert tier.log == [("new", "a"), ("store", "a", 1, 2), ("finished", "a")]


def test_s35_finish_without_stores_is_told_at_once():
    rig = Rig(5, 2)
    rig.new("a")
    rig.finish("a")
    for tier in rig.tiers:
        assert tier.log == [("new", "a"), ("finished", "a")]


def test_s37_unknown_repeated_and_late_calls_only_count():
    """Ours, row "late calls": vLLM raises KeyError."""
    rig = Rig(5)
    rig.new("a", 1)
    rig.store("a", 1)
    rig.settle()
    rig.finish("a")
    for late in (
        lambda: rig.finish("a"),
        lambda: rig.stored("a", 1),
        lambda: rig.loaded("a", 1),
        lambda: rig.manager.on_request_finished(ReqContext("stranger")),
        lambda: rig.manager.complete_store(keys(4), ReqContext("stranger")),
    ):
        before = rig.counters.late_calls
        late()
        assert rig.counters.late_calls == before + 1
    assert rig.offer("a", 2) is None
    assert rig.counters.late_offers == 1
    assert rig.look("a", 1) == [MISS]
    with pytest.raises(KeyError):
        rig.manager.prepare_load(keys(1), ReqContext("stranger"))
    assert rig.tiers[0].said("finished") == [["a"]]
    rig.check_quiescent()


def test_s56_prepare_store_sees_what_ended_since_the_lookup():
    """Ours, row "collect replies": whenever they come, not once per step."""
    tier = make_mailbox()
    rig = Rig(tiers=[tier], num_slots=2)
    rig.new("a", 1, 2)
    rig.store("a", 1, 2)
    (job,) = sent_jobs(tier)
    rig.new("b", 3, 4)
    assert rig.look("b", 3) == [MISS]
    assert rig.offer("b", 3, 4) is None
    tier.feed([reply(job.job_id)])
    rig.advance()
    assert numbers(rig.offer("b", 3, 4).keys_to_store) == [3, 4]


def test_s62_two_cascades_of_one_key_to_one_tier_are_both_answered():
    """Ours, row "sent once": a and b are two requests, so the tier gets it twice."""
    rig = parked_rig()
    rig.stored("a", 1)
    jobs = list(rig.tiers[0].jobs.values())
    assert [list(job.keys) for job in jobs] == [keys(1), keys(1)]
    assert len({tuple(job.slots.tolist()) for job in jobs}) == 1  # so equal bytes
    assert rig.pins(1) == [3]
    for job in reversed(jobs):
        rig.tiers[0].answer_job(job)
    rig.advance()
    assert rig.pins(1) == [1]  # of the other tier
    assert rig.counters.late_replies == 0


def test_s57_events_replay_to_what_is_readable():
    """Half a drain replays nothing; a failed store is only a clean-up."""
    rig = Rig(2, 1, events=True)
    rig.new("a", 1, 2)
    rig.offer("a", 1)
    assert list(rig.manager.take_events()) == []
    rig.stored("a", 1)
    rig.offer("a", 2)
    rig.stored("a", 2, ok=False)
    stored, failed = rig.manager.take_events()
    assert (numbers(stored.keys), stored.is_removed) == ([1], False)
    assert (numbers(failed.keys), failed.metadata_only) == ([2], True)
    rig.settle()
    rig.store("a", 2)
    rig.settle()
    rig.new("b", 3, 4)
    rig.store("b", 3, 4)
    half_read = iter(rig.manager.take_events())
    next(half_read)
    assert list(rig.manager.take_events()) == []  # detached, not replayed
    rest = list(half_read)
    assert [(numbers(e.keys), e.is_removed, e.metadata_only) for e in rest] == [
        ([2, 1], True, False),
        ([3, 4], False, False),
    ]
    rig.manager.reset_cache()  # the server announces that as a whole
    assert list(rig.manager.take_events()) == []


def test_manager_without_events_keeps_none():
    rig = Rig(2)
    rig.new("a", 1)
    rig.store("a", 1)
    assert list(rig.manager.take_events()) == []
