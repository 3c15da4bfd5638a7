"""Load or recompute: what a tier would bring too late is a MISS, and lands later.

And deadlines of jobs, as the manager makes them of what it has seen.
"""

import pytest
from manager_kit import (
    HIT,
    MISS,
    PENDING,
    RETRY,
    Rig,
    key,
    keys,
    make_mailbox,
    numbers,
    reply,
    sent_jobs,
    with_tier,
)

from shmoffload.core.tier_speed import HALVED_EVERY_S, MIN_SAMPLES, SpeedRule
from shmoffload.core.types import TierDown, TierUp

PREFILL_S = 0.01
RULE = SpeedRule(deadline_min_s=5.0, prefill_s_per_block=PREFILL_S)
TAUGHT = range(1000, 1200)
"""Blocks by which a tier's speed is learned; a request of a test has others."""


def load(rig, req_id, of_keys, *, seconds, tier=0):
    """One promotion from lookup to answer, seen by looks that are close."""
    rig.new(req_id, *of_keys)
    assert rig.look(req_id, *of_keys) == [PENDING] * len(of_keys)
    rig.step()
    rig.advance(seconds)
    rig.tiers[tier].answer()
    rig.advance()
    rig.finish(req_id)
    rig.step()


def teach(rig, s_per_block, *, latency_s=0.0, tier=0):
    """Let a tier show its speed by loads of several sizes; the primary forgets."""
    have = rig.tiers[tier].have
    for i in range(MIN_SAMPLES):  # with more it would be declined itself
        some = TAUGHT[: 1 + i]
        have.update(keys(*some))
        seconds = latency_s + len(some) * s_per_block
        load(rig, f"teach-{tier}-{i}", some, seconds=seconds, tier=tier)
        rig.manager.reset_cache()
    have.difference_update(keys(*TAUGHT))
    rig.tiers[tier].log.clear()


def rig_of(*in_tier, s_per_block, num_slots=64, latency_s=0.0, rule=RULE, **settings):
    rig = with_tier(num_slots, *in_tier, speed=rule, **settings)
    teach(rig, s_per_block, latency_s=latency_s)
    return rig


def test_a_slow_tier_is_a_miss_that_lands_and_is_a_hit_later():
    rig = rig_of(*range(8), s_per_block=0.1)
    rig.new("a", *range(8))
    assert rig.look("a", 0) == [MISS]
    assert rig.counters.promotions_declined == [8]
    assert rig.counters.misses == 1
    rig.step()
    assert rig.tiers[0].said("load") == [["a", *range(8)]]
    assert rig.look("a", 0) == [MISS], "it would wait after all"
    rig.step()
    rig.tiers[0].answer()
    rig.advance(0.8)
    rig.finish("a")
    rig.new("b", *range(8))
    assert rig.look("b", *range(8)) == [HIT] * 8
    rig.load("b", *range(8))
    rig.loaded("b", *range(8))
    rig.finish("b")
    rig.settle()
    rig.check_quiescent()


def test_a_quick_tier_is_as_ever():
    rig = rig_of(*range(8), s_per_block=0.001)
    rig.new("a", *range(8))
    assert rig.look("a", *range(8)) == [PENDING] * 8
    assert rig.counters.promotions_declined == [0]


def test_without_a_prefill_rate_the_slowest_tier_is_asked():
    rig = rig_of(*range(8), s_per_block=5.0, rule=SpeedRule(deadline_min_s=5.0))
    rig.new("a", *range(8))
    assert rig.look("a", *range(8)) == [PENDING] * 8


def test_latency_alone_does_not_decline_the_first_of_many():
    """0.2 s before the first byte: too late for 10 blocks, not for 40."""
    rig = rig_of(*range(40), s_per_block=0.001, latency_s=0.2)
    rig.new("short", *range(10))
    rig.new("long", *range(40))
    assert rig.look("short", 0) == [MISS]
    rig = rig_of(*range(40), s_per_block=0.001, latency_s=0.2)
    rig.new("long", *range(40))
    assert rig.look("long", *range(40)) == [PENDING] * 40


def test_only_what_the_tier_has_and_the_primary_has_not_counts():
    rig = rig_of(*range(10), s_per_block=0.001, latency_s=0.2)
    rig.new("a", *range(40))  # thirty of them are nowhere
    assert rig.look("a", 0) == [MISS]
    assert rig.counters.promotions_declined == [10]


def test_a_request_of_unknown_length_is_judged_by_time_per_block():
    rig = rig_of(*range(9), s_per_block=0.001, latency_s=9.0)
    rig.new("a")
    assert rig.look("a", 0, 1) == [PENDING] * 2  # who knows how many follow
    rig = rig_of(*range(9), s_per_block=0.02)
    rig.new("a")
    assert rig.look("a", 0) == [MISS]  # no number of them is worth while
    rig.step()
    assert rig.tiers[0].said("load") == [["a", 0]]


def test_before_anything_is_known_everything_is_worth_while():
    rig = with_tier(8, *range(4), speed=RULE)
    rig.new("a", *range(4))
    assert rig.look("a", *range(4)) == [PENDING] * 4


def test_loads_of_others_are_in_front():
    rig = rig_of(*range(8), *range(20, 60), s_per_block=0.005)
    rig.new("a", *range(20, 60))
    assert rig.look("a", *range(20, 60)) == [PENDING] * 40
    rig.new("b", *range(8))
    assert rig.look("b", 0) == [MISS]  # 0.2 s of others and 0.04 s, for 0.08 s
    rig.step()
    assert rig.tiers[0].said("load") == [["a", *range(20, 60)]], "it is busy"


def test_own_loads_are_not_in_front():
    """What it waits for in any case does not speak against the rest."""
    rig = rig_of(*range(60), s_per_block=0.005)
    rig.new("a", *range(60))
    assert rig.look("a", *range(40)) == [PENDING] * 40
    rig.step()
    assert rig.look("a", 40) == [PENDING]


def test_the_answer_stands_for_the_whole_step():
    rig = rig_of(*range(30, 38), *range(20, 28), s_per_block=0.1, num_slots=8)
    rig.resident(*range(20, 28))  # no free slot: nothing lands
    rig.tiers[0].have.update(keys(*range(30, 38)))
    rig.new("a", *range(30, 38))
    assert rig.look("a", 30) == [MISS]
    rig.advance(20 * HALVED_EVERY_S)  # worth a try by now, but not in this step
    assert rig.look("a", 30, 31, 37) == [MISS] * 3
    assert rig.counters.promotions_declined == [8]
    rig.step()
    assert not rig.tiers[0].said("load")
    assert rig.look("a", 30) == [PENDING]


def test_asking_again_counts_once():
    rig = rig_of(*range(8), s_per_block=0.1, num_slots=4)
    rig.resident(*range(20, 24))
    rig.tiers[0].have.update(keys(*range(8)))
    rig.new("a", *range(8))
    for _ in range(5):
        assert rig.look("a", 0) == [MISS]
        rig.step()
    assert rig.counters.promotions_declined == [8]
    assert rig.counters.evictions == 0
    assert not rig.tiers[0].said("load"), "nothing is evicted for what nobody wants"


def test_a_quicker_tier_behind_a_slow_one_serves():
    rig = Rig(64, 2, speed=RULE)
    teach(rig, 0.1, tier=0)
    teach(rig, 0.001, tier=1)
    for tier in rig.tiers:
        tier.have.update(keys(*range(4)))
    rig.new("a", *range(4))
    assert rig.look("a", *range(4)) == [PENDING] * 4
    rig.step()
    assert rig.tiers[1].said("load") == [["a", *range(4)]]
    assert not rig.tiers[0].said("load")


def test_a_tier_that_does_not_know_yet_makes_it_wait():
    rig = Rig(16, 2, speed=RULE)
    teach(rig, 0.1, tier=0)
    rig.tiers[0].have.add(key(0))
    rig.tiers[1].verdicts[key(0)] = RETRY
    rig.new("a", 0)
    assert rig.look("a", 0) == [RETRY]
    rig.step()
    assert not rig.tiers[0].said("load"), "it would be told MISS while it waits"
    rig.tiers[1].have.add(key(0))
    rig.tiers[1].verdicts.clear()
    assert rig.look("a", 0) == [PENDING]
    rig.step()
    assert rig.tiers[1].said("load") == [["a", 0]]


def test_what_is_stored_meanwhile_does_not_land():
    rig = rig_of(*range(4), s_per_block=0.1)
    rig.new("a", *range(4))
    assert rig.look("a", 0) == [MISS]
    assert rig.offer("a", 0, 1) is not None
    rig.step()
    assert rig.tiers[0].said("load") == [["a", 2, 3]]


def test_nothing_lands_after_a_reset_in_the_same_step():
    rig = rig_of(*range(4), s_per_block=0.1)
    rig.new("a", *range(4))
    assert rig.look("a", 0) == [MISS]
    rig.manager.reset_cache()
    rig.step()
    assert not rig.tiers[0].said("load")


def test_half_of_the_free_slots_and_a_second_are_the_most_that_lands():
    rig = rig_of(*range(60), s_per_block=0.02, num_slots=40)
    rig.new("a", *range(60))
    assert rig.look("a", 0) == [MISS]
    rig.step()
    assert rig.tiers[0].said("load") == [["a", *range(20)]]
    rig = rig_of(*range(60), s_per_block=0.2, num_slots=40)
    rig.new("a", *range(60))
    assert rig.look("a", 0) == [MISS]
    rig.step()
    ((_, *landing),) = rig.tiers[0].said("load")
    assert landing in ([*range(4)], [*range(5)])  # 0.2 s is no exact number


def test_nobody_waits_for_what_is_landing_and_its_failure_is_a_miss():
    rig = rig_of(*range(4), s_per_block=0.1)
    rig.new("a", *range(4))
    assert rig.look("a", 0) == [MISS]
    rig.new("b", *range(4))
    assert rig.look("b", 0, 1) == [MISS, MISS]
    rig.step()
    rig.finish("a")
    assert rig.look("b", 0) == [MISS]
    rig.step()
    rig.tiers[0].answer(ok=False, only=keys(1))
    rig.advance(0.4)
    assert rig.holds(0, 1, 2, 3) == [False, True, False, False]
    assert rig.look("b", 1) == [HIT]
    rig.finish("b")
    rig.settle()
    rig.check_quiescent()


def test_who_finishes_before_it_leaves_takes_it_along():
    rig = rig_of(*range(4), s_per_block=0.1)
    rig.new("a", *range(4))
    assert rig.look("a", 0) == [MISS]
    rig.finish("a")
    rig.step()
    assert not rig.tiers[0].said("load")
    rig.check_quiescent()


def test_a_reset_forgets_what_is_landing():
    rig = rig_of(*range(4), s_per_block=0.1)
    rig.new("a", *range(4))
    assert rig.look("a", 0) == [MISS]
    rig.step()
    rig.manager.reset_cache()
    rig.store("a", 0)  # the key is here again, by the GPU
    assert rig.look("a", 0) == [HIT]
    rig.tiers[0].answer()
    rig.advance()
    assert rig.look("a", 0) == [HIT]


def test_what_lands_too_late_is_given_up_as_any_load():
    rig = rig_of(*range(4), s_per_block=0.1, job_deadline_s=30.0)
    rig.new("a", *range(4))
    assert rig.look("a", 0) == [MISS]
    rig.step()
    rig.advance(30.0)
    assert rig.manager.take_overdue_tiers() == [0]
    assert rig.manager.table.num_quarantined == 4
    rig.tiers[0].answer()
    rig.advance()
    rig.finish("a")
    rig.settle()
    rig.check_quiescent()


# Deadlines -----------------------------------------------------------------------


def is_overdue_after(rig, seconds):
    rig.advance(seconds)
    return rig.manager.take_overdue_tiers() == [0]


def test_a_quick_tier_that_hangs_is_found_after_the_minimum():
    rig = rig_of(*range(4), s_per_block=0.001)
    rig.new("a", *range(4))
    rig.look("a", *range(4))
    rig.step()
    assert not is_overdue_after(rig, 4.9)
    assert is_overdue_after(rig, 0.2)


def test_a_slow_tier_gets_the_time_that_it_needs():
    rig = rig_of(*range(4), s_per_block=0.2, rule=SpeedRule(deadline_min_s=5.0))
    rig.new("a", *range(4))
    rig.look("a", *range(4))
    rig.step()
    assert not is_overdue_after(rig, 12.0)  # 16 times 0.8 s
    assert is_overdue_after(rig, 1.0)


def test_the_shorter_deadline_of_a_later_job_counts():
    rig = Rig(64, 2, speed=RULE)
    teach(rig, 0.001, tier=1)
    rig.tiers[0].have.add(key(0))  # not known yet: the maximum
    rig.tiers[1].have.add(key(1))
    rig.new("a", 0, 1)
    assert rig.look("a", 0) == [PENDING]
    rig.step()
    assert rig.look("a", 1) == [PENDING]
    rig.step()
    dues = [[job.deadline_s for job in tier.jobs.values()] for tier in rig.tiers]
    now_s = pytest.approx(rig.now_s)
    assert [[due - 30.0 for due in dues[0]], [due - 5.0 for due in dues[1]]] == [
        [now_s],
        [now_s],
    ]
    rig.advance(5.1)
    assert rig.manager.take_overdue_tiers() == [1]
    rig.advance(25.0)
    assert rig.manager.take_overdue_tiers() == [0]


def test_jobs_of_a_tier_that_answers_leave_nothing_behind():
    rig = rig_of(s_per_block=0.001)
    rig.tiers[0].have.update(keys(*TAUGHT))
    for i in range(300):
        load(rig, f"a{i}", TAUGHT[:1], seconds=0.001)
        rig.manager.reset_cache()
    assert len(rig.manager._desk._due) < 100
    assert rig.manager._desk._speeds[0].loads.open_blocks == 0
    assert rig.manager._desk._speeds[0].stores.open_blocks == 0


def feed(tier, job_id, *, epoch=1):
    tier.feed([reply(job_id, worker=epoch)])


def test_a_new_worker_is_measured_anew():
    tier = make_mailbox()
    rig = Rig(64, tiers=[tier], speed=RULE)
    rig.new("a", *range(64))
    for i in range(8):
        rig.store("a", i)
        (job,) = sent_jobs(tier)
        rig.advance(0.001)
        feed(tier, job.job_id)
        rig.advance()
    rig.store("a", 40)
    (job,) = sent_jobs(tier)
    assert job.deadline_s == pytest.approx(job.submitted_s + 5.0)
    tier.feed([TierDown(1, dead=True)])
    rig.advance()
    tier.feed([TierUp(2)])
    rig.store("a", 41)
    (job,) = sent_jobs(tier)
    assert numbers(job.keys) == [41]
    assert job.deadline_s == pytest.approx(job.submitted_s + 30.0)
    feed(tier, job.job_id, epoch=2)
    rig.advance()
    rig.finish("a")
    rig.step()
    assert rig.manager._desk._speeds[0].stores.open_blocks == 0
    rig.check_quiescent()
