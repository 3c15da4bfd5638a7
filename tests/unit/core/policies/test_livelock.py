"""A prefix one block longer than the primary, all of it in a tier (S59, INV-21)."""

import pytest
from policy_kit import Desk, HeldTier, keys

from shmoffload.core.types import LookupResult


def scan(desk, req_id, of_numbers):
    """Scan as the planner does: the hits, or None = ask again next step."""
    ctx, num, is_definite = desk.contexts[req_id], 0, True
    for k in keys(*of_numbers):
        result = desk.manager.lookup(k, ctx)
        if result is LookupResult.MISS:
            break
        num += 1
        is_definite = is_definite and result is LookupResult.HIT
    return num if is_definite else None


@pytest.mark.parametrize("policy", ["lru", "arc", "arc2", "auto"])
@pytest.mark.parametrize("num_slots", [2, 8, 64])
@pytest.mark.parametrize("was_full", [False, True])
def test_a_prefix_longer_than_the_primary_ends(policy, num_slots, was_full):
    prompt = range(num_slots + 1)
    tier = HeldTier(keys(*prompt))
    desk = Desk(policy, num_slots, [tier])
    if was_full:  # also with blocks that the shadows of auto hold
        for i in range(3):
            desk.new(f"seed{i}", *range(1000, 1000 + num_slots))
            desk.store(f"seed{i}", *range(1000, 1000 + num_slots))
            desk.finish(f"seed{i}")
            desk.step()
    desk.new("a", *prompt)
    rounds, hits = 0, None
    while hits is None:
        before = tier.blocks_read
        hits = scan(desk, "a", prompt)
        desk.step()
        rounds += tier.blocks_read > before
        assert rounds <= 2
    assert hits == num_slots
    assert tier.blocks_read == num_slots
    desk.load("a", *prompt[:hits])
    desk.finish("a")
    desk.manager.check_integrity()
