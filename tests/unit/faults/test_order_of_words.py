"""Faults about who hears what, and when: announce, store, load, finished.

The ids are those of the list of faults that real systems had
(``tests/faults/test_all_fault_ids.py``); there each has its real processes.
"""

from manager_kit import (
    HIT,
    MISS,
    PENDING,
    RETRY,
    Rig,
    key,
    keys,
    land,
    numbers,
    with_tier,
)


def test_f01_key_that_is_being_written_reaches_the_tier_in_the_end():
    """By another request's store, and by a promotion."""
    rig = Rig(4, 1, request_level={0})
    rig.new("a", 1)
    rig.new("b", 1)
    rig.offer("a", 1)
    assert numbers(rig.offer("b", 1).keys_to_store) == []
    rig.finish("b")
    rig.step()
    assert rig.manager.has_pending_work()
    assert rig.tracked() == {"a", "b"}
    rig.stored("a", 1)
    rig.step()
    assert rig.tiers[0].log == [
        ("new", "a"),
        ("new", "b"),
        ("store", "a", 1),
        ("store", "b", 1),
        ("finished", "b"),
    ]

    rig = with_tier(4, 1, request_level={0})
    rig.new("a", 1)
    rig.look("a", 1)
    rig.new("b", 1)
    assert numbers(rig.offer("b", 1).keys_to_store) == []
    rig.finish("b")
    rig.step()
    assert rig.manager.has_pending_work()
    assert rig.tiers[0].said("finished") == []
    rig.tiers[0].answer()
    rig.advance()
    assert rig.tiers[0].log[-3:] == [
        ("load", "a", 1),
        ("store", "b", 1),
        ("finished", "b"),
    ]
    rig.finish("a")
    rig.settle()
    rig.check_quiescent()


def test_f02_finished_comes_after_the_store_that_was_still_running():
    rig = Rig(4, 2)
    rig.new("a", 1, 2)
    rig.offer("a", 1, 2)
    rig.finish("a")
    rig.step()
    rig.stored("a", 1, 2)
    rig.step()
    for tier in rig.tiers:
        assert tier.log == [("new", "a"), ("store", "a", 1, 2), ("finished", "a")]
        assert len(tier.jobs) == 1  # the transfer itself may still run


def test_f03_offer_after_the_finish_is_refused_and_counted():
    for num_stores_open in (0, 1):
        rig = Rig(4)
        rig.new("a", 1, 2)
        if num_stores_open:
            rig.offer("a", 1)
        rig.step()
        rig.finish("a")
        assert rig.offer("a", 2) is None
        assert rig.counters.late_offers == 1
        if num_stores_open:
            rig.stored("a", 1)
        rig.settle()
        rig.check_quiescent()


def test_f04_no_load_after_finished():
    """Ours, row "nothing after finished": the queued promotion is dropped."""
    rig = with_tier(4, 1)
    rig.new("a", 1)
    assert rig.look("a", 1) == [PENDING]
    rig.finish("a")
    rig.step()
    assert rig.tiers[0].log == [("new", "a"), ("finished", "a")]
    assert rig.manager.table.num_free == 4
    rig.check_quiescent()


def test_f09_each_key_goes_once_to_each_tier_and_request_that_asked():
    rig = Rig(4, 2, request_level={1})
    rig.new("a", 1)
    rig.store("a", 1)
    rig.new("b", 1)
    for _ in range(3):  # rewinds offer again
        rig.offer("b", 1)
        rig.offer("a", 1)
    assert rig.tiers[0].said("store") == [["a", 1]]
    assert rig.tiers[1].said("store") == [["a", 1], ["b", 1]]
    rig.finish("a")
    rig.finish("b")
    rig.settle()
    rig.check_quiescent()


def abort_at(point):
    """Abort ``a`` at a point of its life; then b asks for the same key."""
    rig = with_tier(4, 1)
    tier = rig.tiers[0]
    rig.new("a", 1, 2)
    if point == "looked, tier unsure":
        tier.verdicts[key(1)] = RETRY
        rig.look("a", 1)
    elif point != "before the first look":
        rig.look("a", 1)
    if point in ("promotion running", "promotion landed", "store running"):
        rig.step()
    if point == "promotion landed":
        tier.answer()
        rig.advance()
    if point == "store running":
        rig.offer("a", 2)
    rig.finish("a")
    tier.verdicts.clear()
    return rig


def test_f11_abort_at_any_point_leaves_nothing_and_misleads_nobody():
    for point in (
        "before the first look",
        "looked, tier unsure",
        "promotion queued",
        "promotion running",
        "promotion landed",
        "store running",
    ):
        rig = abort_at(point)
        rig.new("b", 1)
        assert rig.look("b", 1) in ([PENDING], [HIT]), point
        if point == "store running":
            rig.stored("a", 2)
        land(rig)
        assert rig.look("b", 1) == [HIT], point
        # A probe or promotion in flight is shared, not repeated.
        assert len(rig.tiers[0].said("load")) == 1, point
        rig.finish("b")
        rig.settle()
        rig.check_quiescent()


def test_f13_a_quiet_engine_sleeps_and_wakes_in_one_step():
    rig = with_tier(4, 9)
    rig.new("a", 1)
    rig.store("a", 1)
    rig.finish("a")
    rig.step()
    # The cascade runs; nothing keeps the server stepping, no word is missing.
    assert len(rig.tiers[0].jobs) == 1
    assert not rig.manager.has_pending_work()
    assert rig.tiers[0].log[-1] == ("finished", "a")
    rig.tiers[0].answer()  # long after
    rig.new("b", 9)
    assert rig.look("b", 9) == [PENDING]
    rig.advance()
    assert rig.pins(1) == [0]
    rig.step()
    assert rig.tiers[0].said("load") == [["b", 9]]


def test_f16_preempted_request_sees_its_own_running_store():
    for is_ok in (True, False):
        rig = Rig(4)
        rig.new("a", 1)
        rig.offer("a", 1)
        rig.step()  # preempted; it comes back
        assert rig.look("a", 1) == [PENDING]
        assert numbers(rig.offer("a", 1).keys_to_store) == []
        rig.stored("a", 1, ok=is_ok)
        assert rig.look("a", 1) == [HIT if is_ok else MISS]
        granted = rig.offer("a", 1)
        assert numbers(granted.keys_to_store) == ([] if is_ok else [1])
        if not is_ok:
            rig.stored("a", 1)
        rig.finish("a")
        rig.settle()
        rig.check_quiescent()


def test_f18_hand_over_that_raises_takes_nothing_along():
    """Whatever call of the tier, the first or a later one."""
    for word in ("new", "finished", "lookup", "store", "load", "poll"):
        for num_good in (0, 1, 2):
            rig = Rig(4, 2, request_level={0})
            tier = rig.tiers[0]
            tier.have.add(key(5))
            rig.new("warm", 8)
            for _ in range(num_good):
                rig.offer("warm", 8)
            tier.raises = (word,)
            rig.new("a", 1, 2, 5)
            rig.store("a", 1, 2)
            rig.offer("a", 1, 2)
            rig.look("a", 5)
            rig.step()
            rig.advance()
            rig.finish("a")
            tier.raises = ()
            if num_good:
                rig.stored("warm", 8)
            rig.finish("warm")
            rig.settle()
            assert rig.counters.tier_errors >= 1, word
            assert {*keys(1, 2)} <= rig.tiers[1].have
            rig.check_quiescent()
            rig.new("b", 6, 7)
            rig.store("b", 6, 7)
            rig.finish("b")
            rig.settle()
            assert {*keys(6, 7)} <= tier.have
            rig.check_quiescent()
