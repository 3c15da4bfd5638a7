"""Scenarios of lookups and promotions, by their ids.

A docstring that says "ours" names the row of docs/decisions.md, section "Where we
differ from vLLM's tiering".
"""

from manager_kit import HIT, MISS, PENDING, RETRY, Rig, key, keys, land, with_tier


def verdict(upper, lower):
    """One lookup of a key about which two tiers say this."""
    rig = Rig(5, 2)
    rig.tiers[0].verdicts[key(1)] = upper
    rig.tiers[1].verdicts[key(1)] = lower
    rig.new("a", 1)
    (answer,) = rig.look("a", 1)
    rig.step()
    return answer, [tier.said("load") for tier in rig.tiers]


def promoting(*of_keys, num_slots=5):
    """A load job for these keys is open."""
    rig = with_tier(num_slots, *of_keys)
    rig.new("a", *of_keys)
    assert rig.look("a", *of_keys) == [PENDING] * len(of_keys)
    rig.step()
    return rig


def test_s13_key_in_a_tier_is_pending_and_no_tier_is_called_before_step_end():
    rig = with_tier(5, 1)
    rig.new("a", 1)
    assert rig.look("a", 1) == [PENDING]
    assert rig.look("a", 1) == [PENDING]
    assert rig.tiers[0].log == [("new", "a")]
    assert rig.manager.has_pending_work()


def test_s14_one_load_job_then_a_hit():
    rig = promoting(1)
    assert rig.tiers[0].said("load") == [["a", 1]]
    rig.tiers[0].answer()
    rig.advance()
    rig.step()
    assert rig.look("a", 1) == [HIT]
    assert rig.tiers[0].said("load") == [["a", 1]]
    assert not rig.manager.has_pending_work()


def test_s15_one_load_job_per_request_in_lookup_order():
    rig = with_tier(8, 1, 2, 3, 4)
    rig.new("a", 1, 2)
    rig.new("b", 3, 4)
    for req_id, of_key in (("a", 2), ("b", 4), ("a", 1), ("b", 3)):
        rig.look(req_id, of_key)
    rig.step()
    assert rig.tiers[0].said("load") == [["a", 2, 1], ["b", 4, 3]]


def test_s16_two_requests_cause_one_promotion_owned_by_the_first():
    rig = with_tier(5, 1)
    rig.new("a", 1)
    rig.new("b", 1)
    assert rig.look("a", 1) + rig.look("b", 1) == [PENDING, PENDING]
    rig.step()
    assert rig.tiers[0].said("load") == [["a", 1]]


def test_s17_upper_tier_loads_and_lower_is_not_asked():
    rig = with_tier(5, 1, num_tiers=2)
    rig.tiers[1].have.add(key(1))
    rig.tiers[1].raises = ("lookup",)
    rig.new("a", 1)
    rig.look("a", 1)
    rig.step()
    assert [tier.said("load") for tier in rig.tiers] == [[["a", 1]], []]
    assert rig.counters.tier_errors == 0


def test_s18_lower_hit_beats_upper_retry():
    assert verdict(RETRY, HIT) == (PENDING, [[], [["a", 1]]])


def test_s19_retry_beats_miss():
    assert verdict(RETRY, MISS) == (RETRY, [[], []])


def test_s20_pending_from_a_tier_is_a_miss():
    assert verdict(PENDING, MISS) == (MISS, [[], []])


def test_s21_no_room_among_pending_stores_is_a_miss():
    rig = with_tier(2, 7)
    rig.new("a", 1, 2)
    rig.offer("a", 1, 2)
    rig.new("b", 7)
    assert rig.look("b", 7) == [MISS]
    assert rig.counters.allocation_failures == 1


def test_s22_partial_promotion_keeps_exactly_the_reported_keys():
    """Ours, row "one try": another request may promote key 1 again, not the same."""
    rig = promoting(0, 1, 2)
    rig.tiers[0].answer(ok=False, only=keys(0, 2))
    rig.advance()
    rig.new("b", 0, 1, 2)
    assert rig.holds(0, 1, 2) == [True, False, True]
    assert rig.look("a", 0, 1, 2) == [HIT, MISS, HIT]
    rig.step()
    assert rig.look("b", 0, 1, 2) == [HIT, PENDING, HIT]


def test_s23_failed_promotion_without_a_list_leaves_nothing():
    rig = promoting(0, 1)
    rig.tiers[0].answer(ok=False)
    rig.advance()
    assert rig.holds(0, 1) == [False, False]
    assert rig.look("a", 0, 1) == [MISS, MISS]
    assert rig.manager.table.num_free == 5


def test_s24_foreign_key_in_an_answer_fails_the_job():
    """Ours, row "late and foreign": counted; vLLM stops the engine."""
    rig = promoting(0, 1)
    rig.tiers[0].answer(ok=False, only=keys(0, 9))
    rig.advance()
    assert rig.look("a", 0, 1) == [MISS, MISS]
    assert rig.holds(9) == [False]
    assert rig.counters.foreign_keys == 1
    assert rig.counters.promotion_jobs_failed == [1]


def test_s36_queued_promotion_of_a_finished_request_is_never_sent():
    """Ours, row "nothing after finished"; vLLM submits it."""
    rig = with_tier(5, 1, 2)
    rig.new("a", 1, 2)
    rig.new("b", 2)
    rig.look("a", 1, 2)
    rig.look("b", 2)
    rig.finish("a")
    assert rig.holds(1, 2) == [False, True]  # 2: handed to b, who asked as well
    rig.step()
    assert rig.tiers[0].log[-2:] == [("finished", "a"), ("load", "b", 2)]
    assert rig.manager.table.num_free == 4
    rig.finish("b")
    rig.settle()
    rig.check_quiescent()


def test_s59_prefix_longer_than_the_primary_becomes_definite():
    """Ours, row "no self-eviction": vLLM 0.32 and 0.33 never answer."""
    for num_slots in (2, 8, 64):
        prefix = range(num_slots + 1)
        rig = with_tier(num_slots, *prefix)
        rig.new("a", *prefix)
        rounds = 0
        while (hits := rig.scan("a", *prefix)) is None:
            rounds += 1
            assert rounds <= 2
            land(rig)
        assert hits == num_slots
        reads = sum(len(job) - 1 for job in rig.tiers[0].said("load"))
        assert reads == num_slots
        assert len(rig.load("a", *range(num_slots))) == num_slots
