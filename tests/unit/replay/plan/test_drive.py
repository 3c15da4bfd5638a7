"""One policy at one capacity, by hand; what every run has to obey."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_kit import paths, returning_paths, traffic_of

from shmoffload.core.policies.lru import LruPolicy
from shmoffload.core.types import WITHHOLD_ALL, OffloadPolicy
from shmoffload.replay.plan.drive import drive
from shmoffload.replay.plan.virtual_tier import TierPlan


def run(*requests, num_slots, tiers=()):
    return drive(
        traffic_of(*requests), policy=LruPolicy(), num_slots=num_slots, tiers=tiers
    )


def test_hits_are_what_the_last_requests_left():
    driven = run((1, 2), (1, 3), (4, 5), (1, 3), num_slots=4)
    # r1 finds 1; r2 pushes out 1-2 and nothing else; r3 finds 1 and 1-3.
    assert (driven.prefix_hits, driven.stores) == (3, 2 + 1 + 2)
    assert driven.hits_by_source == {"primary": 3}


def test_tails_go_before_heads():
    assert run((1, 2, 3), (7, 8), (1, 2, 3), num_slots=3).prefix_hits == 1


def test_of_a_request_larger_than_the_primary_the_head_stays():
    driven = run((1, 2, 3, 4, 5), (1, 2, 3, 4, 5), num_slots=3)
    assert driven.prefix_hits == 3
    assert driven.stores_refused == 0


def test_what_the_primary_forgets_comes_from_the_tier():
    driven = run((1, 2), (3, 4), (1, 2), num_slots=2, tiers=[TierPlan("disk", 99)])
    assert driven.hits_by_source == {"primary": 0, "disk": 2}
    (disk,) = driven.tiers
    assert (disk.num_written, disk.num_read, disk.num_evicted) == (4, 2, 0)
    assert disk.num_never_read == 2


def test_a_tier_is_bounded_and_forgets_tails_first():
    requests = (1, 2, 3), (4,), (1, 2, 3)
    driven = run(*requests, num_slots=1, tiers=[TierPlan("disk", 3)])
    # Only the head of each request is stored: 1 and 4. Then 1 is promoted.
    assert driven.hits_by_source == {"primary": 0, "disk": 1}
    driven = run(*requests, num_slots=3, tiers=[TierPlan("disk", 3)])
    (disk,) = driven.tiers
    # 1-2-3 had to go for 4; the primary has kept 1 and 1-2.
    assert (disk.num_evicted, driven.prefix_hits) == (2, 2)
    assert driven.hits_by_source == {"primary": 2, "disk": 0}


def test_a_read_is_a_use_and_what_was_read_is_not_wasted():
    driven = run((1,), (2,), (1,), (3,), (1,), num_slots=1, tiers=[TierPlan("d", 2)])
    (disk,) = driven.tiers
    # The read of 1 lets 2 go for 3; so 1 is there a second time.
    assert driven.hits_by_source == {"primary": 0, "d": 2}
    assert (disk.num_evicted, disk.num_never_read) == (1, 2)  # 2, and 3 so far
    driven = run((1,), (2,), (1,), (3,), (4,), num_slots=1, tiers=[TierPlan("d", 2)])
    (disk,) = driven.tiers
    assert (disk.num_evicted, disk.num_never_read) == (2, 3)  # not the read 1


def test_a_block_that_is_there_is_not_written_again_but_used():
    whole = TierPlan("d", 2, OffloadPolicy.REQUEST_LEVEL)
    requests = (1,), (2,), (1,), (3,)
    (disk,) = run(*requests, num_slots=9, tiers=[whole]).tiers
    one, two, _, three = (keys[0] for keys in traffic_of(*requests).keys)
    assert disk.num_written == 3
    assert [key in disk for key in (one, two, three)] == [True, False, True]


def test_admission_is_the_managers():
    tiers = [
        TierPlan("second", 99, withheld=WITHHOLD_ALL),
        TierPlan("tail", 99, withheld=1),
    ]
    driven = run((1, 2, 3), (1, 2, 4), num_slots=9, tiers=tiers)
    second, tail = driven.tiers
    assert second.num_written == 2  # 1 and 1-2 were used again
    assert tail.num_written == 2  # neither 1-2-3 nor 1-2-4


@pytest.mark.parametrize("num_slots", [2, 8, 64])
def test_a_prefix_longer_than_the_primary_is_read_once(num_slots):
    """The livelock of vLLM: N slots, N + 1 blocks in a tier only."""
    prefix = tuple(range(num_slots + 1))
    # Two requests bring the whole prefix to the tier, a third empties the primary.
    others = tuple((-1 - i,) for i in range(num_slots))
    driven = run(
        prefix[:-1],
        prefix,
        *others,
        prefix,
        num_slots=num_slots,
        tiers=[TierPlan("disk", 9 * num_slots)],
    )
    assert driven.hits_by_source["disk"] == num_slots
    assert driven.tiers[0].num_read == num_slots


def test_a_request_level_tier_gets_hits_too():
    tiers = [
        TierPlan("near", 99),
        TierPlan("all", 99, OffloadPolicy.REQUEST_LEVEL),
    ]
    driven = run((1, 2), (1, 2), num_slots=4, tiers=tiers)
    assert [tier.num_written for tier in driven.tiers] == [2, 2]


@given(returning_paths(max_requests=40, max_paths=9, max_length=8), st.integers(1, 12))
def test_lru_keeps_no_block_without_its_prefix(requests, num_slots):
    driven = run(*requests, num_slots=num_slots)
    assert driven.block_hits == driven.prefix_hits


@given(paths(max_requests=25, max_length=6), st.integers(1, 12))
def test_with_an_unbounded_tier_every_block_is_written_once(requests, num_slots):
    traffic = traffic_of(*requests)
    driven = run(*requests, num_slots=num_slots, tiers=[TierPlan("disk", 999)])
    (disk,) = driven.tiers
    assert disk.num_evicted == 0
    assert disk.num_written <= traffic.num_distinct
    if num_slots >= 6:  # no prompt is cut
        assert disk.num_written == traffic.num_distinct
        assert driven.prefix_hits == traffic.attainable_hits
