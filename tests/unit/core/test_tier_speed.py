"""Deadlines and expectations from measured speed: bounds, order, no surprise."""

import math

from hypothesis import given
from hypothesis import strategies as st

from shmoffload.core.tier_speed import (
    HALVED_EVERY_S,
    MAX_UNSEEN_S,
    MIN_SAMPLES,
    PATIENCE,
    UNKNOWN_SIZE,
    SpeedRule,
    TierSpeed,
)

MIN_S, MAX_S, PIECE = 5.0, 30.0, 8
RULE = SpeedRule(deadline_min_s=MIN_S, piece_blocks=PIECE)

sizes = st.integers(1, 4000)
times = st.floats(0.0, 100.0) | st.floats(0.0, 0.1)
samples = st.lists(st.tuples(sizes, times, times), max_size=100)
loads = st.booleans()


def speed_of(of_loads=(), of_stores=(), *, rule=RULE, max_s=MAX_S):
    """(blocks, one time, another) each; the order of the two does not matter."""
    speed = TierSpeed(rule, deadline_max_s=max_s)
    for pace, seen in ((speed.loads, of_loads), (speed.stores, of_stores)):
        for now_s, (num, a, b) in enumerate(seen):
            pace.note(num, min(a, b), max(a, b), now_s=float(now_s))
    return speed


def steady(num_blocks, seconds, times=10):
    return [(num_blocks, seconds, seconds)] * times


@given(samples, samples, sizes, st.integers(0, 4000), st.integers(0, 4000), loads)
def test_a_deadline_is_within_its_bounds(a, b, num, in_loads, in_stores, load):
    speed = speed_of(a, b)
    speed.loads.open_blocks, speed.stores.open_blocks = in_loads, in_stores
    assert MIN_S <= speed.patience_s(num, is_promotion=load) <= MAX_S


@given(samples, samples, sizes, sizes, st.integers(0, 500), loads, loads)
def test_more_work_in_front_means_no_less_time(a, b, num, more, open_, load, front):
    speed = speed_of(a, b)
    speed.loads.open_blocks = speed.stores.open_blocks = open_
    before = speed.patience_s(num, is_promotion=load)
    assert speed.patience_s(num + more, is_promotion=load) >= before
    speed.pace(is_promotion=front).open_blocks += more
    assert speed.patience_s(num, is_promotion=load) >= before


@given(samples, sizes, loads)
def test_a_job_has_the_time_that_one_of_its_size_has_taken(seen, more, load):
    """Also when a hundred quick ones came since."""
    speed = speed_of(seen, seen)
    for num, a, b in seen:
        if abs(a - b) <= MAX_UNSEEN_S:
            patience_s = speed.patience_s(num + more, is_promotion=load)
            assert patience_s >= min(max(a, b), MAX_S)


@given(samples, sizes, sizes, st.integers(0, 100))
def test_a_larger_load_never_takes_less(seen, num, more, ahead):
    pace = speed_of(seen).loads
    now_s = float(len(seen))
    small = num * pace.quickest_s_per(num, ahead=ahead, now_s=now_s)
    total = num + more
    large = total * pace.quickest_s_per(total, ahead=ahead, now_s=now_s)
    assert 0 <= small <= large * (1 + 1e-9) + 1e-12
    behind = total * pace.quickest_s_per(total, ahead=ahead + more, now_s=now_s)
    assert behind >= large * (1 - 1e-9) - 1e-12


@given(samples, st.sampled_from([0.0, -1.0, math.nan, math.inf, -math.inf]), sizes)
def test_nonsense_changes_nothing(seen, bad, num):
    speed, pace = (made := speed_of(seen, seen)), made.loads
    before = speed.patience_s(num, is_promotion=True)
    pace.note(0, 1.0, 1.0, now_s=0.0)
    if bad:
        pace.note(num, 0.0, bad, now_s=0.0)
        pace.note(num, bad, bad, now_s=0.0)
    assert speed.patience_s(num, is_promotion=True) == before


def test_the_maximum_until_enough_is_known():
    for num_seen in range(MIN_SAMPLES):
        speed = speed_of(steady(10, 0.01, num_seen))
        assert speed.patience_s(10, is_promotion=True) == MAX_S
    speed = speed_of(steady(10, 0.01, MIN_SAMPLES))
    assert speed.patience_s(10, is_promotion=True) == MIN_S
    assert speed.patience_s(10, is_promotion=False) == MAX_S  # stores are not known


def test_a_hang_of_a_quick_tier_is_found_in_seconds():
    speed = speed_of(steady(100, 0.05))
    assert speed.patience_s(100, is_promotion=True) == MIN_S


def test_a_slow_tier_has_patience_times_what_it_takes():
    speed = speed_of(steady(100, 0.5), max_s=1000.0)
    assert math.isclose(speed.patience_s(100, is_promotion=True), PATIENCE * 0.5)
    assert math.isclose(speed.patience_s(400, is_promotion=True), PATIENCE * 2.0)
    speed.loads.open_blocks = 900
    assert math.isclose(speed.patience_s(100, is_promotion=True), PATIENCE * 5.0)


def test_a_stall_is_remembered_for_a_hundred_jobs():
    speed = speed_of(steady(10, 0.01) + steady(10, 25.0, 1) + steady(10, 0.01, 100))
    assert speed.patience_s(10, is_promotion=True) >= 25.0


def test_loads_wait_for_a_piece_of_a_store_and_stores_for_all_loads():
    speed = speed_of(steady(10, 0.5), steady(10, 1.0), max_s=1000.0)
    speed.stores.open_blocks = 1000
    piece_s = PIECE * 0.1
    load_s = speed.patience_s(10, is_promotion=True)
    assert math.isclose(load_s, PATIENCE * (0.5 + max(piece_s, 1.0)))
    speed.stores.open_blocks, speed.loads.open_blocks = 0, 100
    store_s = speed.patience_s(10, is_promotion=False)
    assert math.isclose(store_s, PATIENCE * (1.0 + 5.0))


def test_what_is_not_known_in_front_means_the_maximum():
    speed = speed_of(steady(10, 0.01))
    speed.stores.open_blocks = 1
    assert speed.patience_s(10, is_promotion=True) == MAX_S


def test_failures_do_not_make_a_tier_quick():
    """They may come at once; only what has arrived tells how long it takes."""
    speed = speed_of(steady(10, 1.0), max_s=1000.0)
    before = speed.patience_s(10, is_promotion=True)
    for now_s in range(100, 200):
        speed.loads.answered(10, now_s - 0.001, seen_s=now_s, now_s=now_s, ok=False)
    assert speed.patience_s(10, is_promotion=True) == before


def test_work_stands_in_line():
    """Three loads sent at once and answered one by one: each took a second."""
    speed = TierSpeed(RULE, deadline_max_s=1000.0)
    for at in range(1, 10):
        now_s = float(at)
        speed.loads.answered(5, 0.0, seen_s=now_s, now_s=now_s, ok=True)
    assert math.isclose(speed.patience_s(5, is_promotion=True), PATIENCE * 1.0)


def test_an_answer_that_lay_unread_says_nothing_of_the_tier():
    """An idle server looks once a minute; its quick tier is no slow one."""
    speed = TierSpeed(RULE, deadline_max_s=1000.0)
    for at in range(10):
        sent_s = 60.0 * at
        speed.stores.answered(5, sent_s, seen_s=sent_s, now_s=sent_s + 60, ok=True)
    assert speed.patience_s(5, is_promotion=False) == MIN_S


def test_a_new_worker_starts_with_the_maximum():
    speed = speed_of(steady(10, 0.01), steady(10, 0.01))
    speed.loads.open_blocks = 7
    speed.forget()
    assert speed.patience_s(10, is_promotion=True) == MAX_S
    assert speed.loads.open_blocks == 7  # not answered, whoever died


def test_a_minimum_above_the_maximum_is_the_maximum():
    rule = SpeedRule(deadline_min_s=600.0)
    speed = speed_of(steady(1, 0.001), rule=rule, max_s=1.0)
    assert speed.patience_s(1, is_promotion=True) == 1.0


# What a load takes at least ------------------------------------------------------


def quickest_s(pace, num, *, ahead=0, now_s=9.0):
    return num * pace.quickest_s_per(num, ahead=ahead, now_s=now_s)


def test_jobs_of_many_sizes_tell_latency_from_time_per_block():
    seen = [(num, 0.1 + 0.01 * num, 0.1 + 0.01 * num) for num in (1, 50, 100, 7, 200)]
    pace = speed_of(seen * 2).loads
    assert math.isclose(quickest_s(pace, 1000), 10.1, rel_tol=1e-6)
    assert math.isclose(quickest_s(pace, 100, ahead=100), 2.1, rel_tol=1e-6)
    endless = pace.quickest_s_per(UNKNOWN_SIZE, ahead=0, now_s=9.0)
    assert math.isclose(endless, 0.01, rel_tol=1e-3)


def test_jobs_of_one_size_tell_nothing_of_larger_ones():
    """They may be all latency: 200 blocks need not take 200 times as long as one."""
    pace = speed_of(steady(1, 0.02)).loads
    assert math.isclose(quickest_s(pace, 1), 0.02)
    assert math.isclose(quickest_s(pace, 200), 0.02)
    assert math.isclose(quickest_s(pace, 200, ahead=500), 0.02)
    assert pace.quickest_s_per(UNKNOWN_SIZE, ahead=0, now_s=9.0) < 1e-9


def test_the_line_has_no_latency_below_nothing():
    """Of noise: twice the size took for ever, so a third size takes its part."""
    pace = speed_of([(10, 0.0, 0.0), (20, 1.0, 1.0)] * 10).loads
    assert 0 < quickest_s(pace, 40) < 2.0
    assert 0 < quickest_s(pace, 1) < quickest_s(pace, 10)


def test_a_tier_that_is_asked_no_more_becomes_worth_a_try():
    pace = speed_of(steady(10, 8.0)).loads
    assert math.isclose(quickest_s(pace, 10, now_s=9.0), 8.0)
    later_s = 9.0 + HALVED_EVERY_S
    assert math.isclose(quickest_s(pace, 10, now_s=later_s), 4.0)
    pace.note(10, 8.0, 8.0, now_s=later_s)
    assert math.isclose(quickest_s(pace, 10, now_s=later_s), 8.0)
