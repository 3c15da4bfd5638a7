"""A request's tail goes before its head: without the head the tail is of no use."""

import pytest
from executor_kit import Rig
from slab_kit import OK, store

from shmoffload.testing.tier_tests import HeapRegion, deadline, key_of
from shmoffload.wire.config import TierConfig
from shmoffload.worker.tiers.fs import FsTier
from shmoffload.worker.tiers.memory import MemoryTier
from shmoffload.worker.tiers.slab import SlabTier

TIERS = {"slab": SlabTier, "fs": FsTier, "memory": MemoryTier}


def open_tier(kind, path, region, max_blocks):
    tier = TIERS[kind]()
    config = TierConfig(
        type=kind,
        name="t",
        path=str(path),
        max_bytes=max_blocks * region.stride,
        min_free=0,
    )
    tier.open(config, region, region.namespace)
    return tier


def request(salt, num_blocks=4):
    return [key_of(i, salt) for i in range(num_blocks)]


@pytest.fixture(params=TIERS)
def kind(request):
    return request.param


def test_a_new_request_takes_the_tail_of_the_oldest(tmp_path, kind):
    region = HeapRegion()
    tier = open_tier(kind, tmp_path, region, 8)
    first, second = request("a"), request("b")
    store(tier, region, first)
    store(tier, region, second)
    assert store(tier, region, request("c", 3)) == [OK] * 3
    assert tier.take_evicted() == first[:0:-1]
    tier.close()


@pytest.mark.parametrize("use", ["exists", "get", "put"])
def test_a_use_keeps_the_head_longest(tmp_path, kind, use):
    region = HeapRegion()
    tier = open_tier(kind, tmp_path, region, 8)
    first, second = request("a"), request("b")
    store(tier, region, first)
    store(tier, region, second)
    if use == "exists":
        tier.exists(first, deadline())
    elif use == "get":
        tier.get(first, range(8, 12), deadline())
    else:
        store(tier, region, first)
    assert store(tier, region, request("c", 6)) == [OK] * 6
    assert tier.take_evicted() == [*reversed(second), *first[:1:-1]]
    tier.close()


def test_a_request_larger_than_the_tier_leaves_its_head(tmp_path, kind):
    region = HeapRegion()
    tier = open_tier(kind, tmp_path, region, 4)
    keys = request("a", 6)
    store(tier, region, keys)
    assert tier.exists(keys, deadline()) == [True] * 4 + [False] * 2
    tier.close()


@pytest.mark.parametrize("kind", ["slab", "fs"])
def test_the_order_outlives_a_kill(tmp_path, kind):
    region = HeapRegion()
    tier = open_tier(kind, tmp_path, region, 8)
    first, second = request("a"), request("b")
    store(tier, region, first)
    store(tier, region, second)
    tier._place.close()  # the lock is all that a dead worker gives back
    again = open_tier(kind, tmp_path, region, 8)
    assert store(again, region, request("c", 2)) == [OK] * 2
    assert again.take_evicted() == first[:1:-1]
    again.close()


@pytest.mark.parametrize("use", ["store", "load"])
def test_a_job_in_pieces_is_one_request(use):
    region = HeapRegion()
    with Rig(MemoryTier(), region, max_blocks=8) as rig:
        rig.executor._piece = 2
        first, second = request("a"), request("b")
        rig.run(first, range(4))
        rig.run(second, range(4))
        if use == "load":
            rig.run(first, range(8, 12), load=True)
            order = [*reversed(second), *reversed(first)]
        else:
            order = [*reversed(first), *reversed(second)]
        assert list(rig.tier._lru) == order
