"""The same offers to vLLM's primary and to ours, with a store threshold.

vLLM has the threshold without tiers only, so there are none here. Nothing is evicted
(``test_vllm_differential`` compares that); resets make room, and forget no count.
"""

import random

import pytest
from vllm_kit import VLLM, key, keys, numbers

from shmoffload.core.manager import TieringOffloadingManager
from shmoffload.core.offers import OfferRule
from shmoffload.core.types import ReqContext

NUM_KEYS, NUM_OFFERS = 14, 150


@pytest.mark.parametrize("seed", range(20))
def test_same_stores_same_skips(seed):
    rng = random.Random(seed)
    threshold, size = rng.choice([2, 3]), rng.choice([2, 5, 50])
    ours = TieringOffloadingManager(
        NUM_KEYS, [], block_bytes=64, offer_rule=OfferRule(threshold, size)
    )
    theirs = VLLM.primary.CPUOffloadingManager(
        num_chunks=NUM_KEYS, store_threshold=threshold, max_tracker_size=size
    )
    num_stored = their_skipped = 0
    for i in range(NUM_OFFERS):
        if i % 12 == 11:
            ours.reset_cache()
            theirs.reset_cache()
        positions = {key(n): n for n in range(NUM_KEYS)}
        our_ctx = ReqContext(f"r{i}", key_positions=positions)
        their_ctx = VLLM.base.ReqContext(f"r{i}")
        for of_key, position in positions.items():
            their_ctx.set_offload_key_position(of_key, position)
        ours.on_new_request(our_ctx)
        theirs.on_new_request(their_ctx)
        start = rng.randrange(NUM_KEYS)
        offered = keys(range(start, min(NUM_KEYS, start + rng.randint(1, 8))))
        mine = ours.prepare_store(offered, our_ctx)
        yours = theirs.prepare_store(offered, their_ctx)
        assert (mine is None) is (yours is None)
        if mine is not None:
            assert numbers(mine.keys_to_store) == numbers(yours.keys_to_store)
            assert mine.evicted_keys == yours.evicted_keys == []
            num_stored += len(mine.keys_to_store)
            ours.complete_store(mine.keys_to_store, our_ctx)
            theirs.complete_store(yours.keys_to_store, their_ctx)
        their_skipped += theirs.stores_skipped_in_current_batch
        theirs.stores_skipped_in_current_batch = 0
        assert ours.counters.stores_skipped == their_skipped
        ours.on_request_finished(our_ctx)
        theirs.on_request_finished(their_ctx)
    assert num_stored > 10
    assert their_skipped > 10
