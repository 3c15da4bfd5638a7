"""Prefix hits on recorded traffic, as integers (policies.md 2 and 4).

The anchors come from simulators that share no code with us and that agree with
vLLM's own manager; ``auto`` is held to a naive model of itself (``test_auto``) and to
the better of vLLM's two policies here.
"""

import pytest
from drive import SHARES, cells_of, drive, requests_of

CONVERSATION, SYNTHETIC = "mooncake_conversation", "mooncake_synthetic"
ANCHOR = {"lru": "lru", "arc": "arc_vllm", "arc2": "arc_ghost4"}
EXACT = [(SYNTHETIC, share, policy) for share in SHARES for policy in ANCHOR] + [
    (CONVERSATION, "0.05", "lru"),
    (CONVERSATION, "0.25", "lru"),
    (CONVERSATION, "0.01", "arc"),
    (CONVERSATION, "0.05", "arc"),
    (CONVERSATION, "0.01", "arc2"),
    (CONVERSATION, "0.1", "arc2"),
]
AUTO = {
    (SYNTHETIC, "0.01"): 5118,
    (SYNTHETIC, "0.05"): 19269,
    (SYNTHETIC, "0.1"): 32200,
    (SYNTHETIC, "0.25"): 54601,
    (CONVERSATION, "0.01"): 29359,
    (CONVERSATION, "0.05"): 60360,
    (CONVERSATION, "0.1"): 83015,
    (CONVERSATION, "0.25"): 101818,
}
CONVERSATION_RATES = {"0.01": 0.085, "0.05": 0.215, "0.1": 0.298, "0.25": 0.367}


@pytest.mark.data
@pytest.mark.parametrize(("trace", "share", "policy"), EXACT)
def test_hits_are_the_anchor(trace, share, policy):
    cell = cells_of(trace)[share]
    hits = drive(policy, cell["capacity"], requests_of(trace))
    assert hits == cell[ANCHOR[policy]]["prefix_hits"]


@pytest.mark.data
@pytest.mark.parametrize(("trace", "share"), AUTO)
def test_auto_is_as_good_as_the_better_one(trace, share):
    cell, requests = cells_of(trace)[share], requests_of(trace)
    hits = drive("auto", cell["capacity"], requests)
    best = max(cell[name]["prefix_hits"] for name in ("lru", "arc_vllm"))
    assert hits >= 0.99 * best
    if trace == CONVERSATION:
        assert hits / sum(map(len, requests)) >= CONVERSATION_RATES[share]
    assert hits == AUTO[trace, share]


@pytest.mark.data
@pytest.mark.parametrize("share", ["0.01", "0.05"])
def test_offers_in_parts_cost_auto_little(share):
    """A live engine offers a long prompt 16 blocks at a time."""
    capacity, requests = cells_of(SYNTHETIC)[share]["capacity"], requests_of(SYNTHETIC)
    assert drive("auto", capacity, requests, part=16) >= 0.98 * AUTO[SYNTHETIC, share]
