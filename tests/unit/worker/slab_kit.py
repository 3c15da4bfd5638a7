"""Opening and filling a slab, for the tests of the slab tier."""

from shmoffload.testing.tier_tests import deadline
from shmoffload.wire.config import TierConfig
from shmoffload.worker.tier import BlockStatus
from shmoffload.worker.tiers.slab import SlabTier

OK, MISS, BAD, FAIL = BlockStatus


def open_slab(path, region, *, max_blocks=16, min_free=0):
    bound = None if max_blocks is None else max_blocks * region.stride
    tier = SlabTier()
    config = TierConfig(
        type="slab", name="s", path=str(path), max_bytes=bound, min_free=min_free
    )
    try:
        tier.open(config, region, region.namespace)
    except BaseException:
        tier.close()
        raise
    return tier


def store(tier, region, keys, first_slot=0):
    for i, key in enumerate(keys):
        region.fill(first_slot + i, key)
    return tier.put(keys, range(first_slot, first_slot + len(keys)), deadline())


def folder_of(path, region):
    return path / region.namespace.hex()
