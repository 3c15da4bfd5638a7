"""The optimum: against a search of everything, and as a bound of every policy."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st
from plan_kit import returning_paths, traffic_of

from shmoffload.core.policies.registry import BUILT_IN, make_policy
from shmoffload.core.types import OffloadPolicy
from shmoffload.replay.plan.drive import drive
from shmoffload.replay.plan.optimum import optimum
from shmoffload.replay.plan.virtual_tier import TierPlan


def best_of_all(traffic, num_slots):
    """Most prefix and most block hits over every choice of what to keep."""
    reached = {frozenset(): (0, 0)}
    for ids in traffic.ids:
        after = {}
        for held, (prefix, block) in reached.items():
            run = next((n for n, i in enumerate(ids) if i not in held), len(ids))
            hits = (prefix + run, block + len(held & set(ids)))
            pool = sorted(held | set(ids))
            for size in range(min(num_slots, len(pool)) + 1):
                for kept in map(frozenset, combinations(pool, size)):
                    old = after.get(kept, (0, 0))
                    after[kept] = tuple(map(max, old, hits))
        reached = after
    return max(p for p, _ in reached.values()), max(b for _, b in reached.values())


@given(returning_paths(max_requests=10, max_paths=4, max_length=3), st.integers(1, 5))
def test_nothing_is_better(requests, num_slots):
    traffic = traffic_of(*requests)
    best = optimum(traffic, num_slots)
    assert (best.prefix_hits, best.block_hits) == best_of_all(traffic, num_slots)


@given(
    returning_paths(max_requests=40, max_paths=8, max_length=6),
    st.integers(1, 12),
    st.sampled_from(sorted(BUILT_IN)),
    st.lists(st.tuples(st.integers(1, 20), st.sampled_from(OffloadPolicy)), max_size=2),
)
def test_no_policy_beats_it(requests, num_slots, policy, behind):
    traffic = traffic_of(*requests)
    tiers = [TierPlan(f"t{i}", size, wants) for i, (size, wants) in enumerate(behind)]
    best = optimum(
        traffic, num_slots + sum(tier.max_blocks for tier in tiers)
    ).prefix_hits
    driven = drive(
        traffic,
        policy=make_policy(policy, num_slots),
        num_slots=num_slots,
        tiers=tiers,
    )
    assert driven.prefix_hits <= driven.block_hits <= best <= traffic.attainable_hits
    assert sum(driven.hits_by_source.values()) == driven.prefix_hits


def test_with_room_for_all_it_is_what_was_seen_before():
    traffic = traffic_of((1, 2, 3), (1, 2, 4), (1, 2, 3))
    best = optimum(traffic, 99)
    assert best.prefix_hits == traffic.attainable_hits == 2 + 3
    assert best.stores == 3  # the fourth block is never used again


def test_of_blocks_that_are_due_at_once_the_deepest_goes():
    assert optimum(traffic_of((1, 2, 3), (9,), (1, 2, 3)), 2).prefix_hits == 2


def test_no_request_has_a_block():
    assert optimum(traffic_of((), ()), 3).prefix_hits == 0
