"""Damage finds live blocks, and does to them what it says."""

import random

import pytest
from executor_kit import Rig

from shmoffload.testing.faults.control import Control
from shmoffload.testing.faults.damage import Damage, blocks_of, damage
from shmoffload.testing.faults.tier import FaultyTier
from shmoffload.testing.tier_tests import HeapRegion, key_of
from shmoffload.wire.session import TierWord
from shmoffload.worker.tiers.fs import FsTier
from shmoffload.worker.tiers.slab import SlabTier

NUM = 8
KEYS = [key_of(i) for i in range(NUM)]


def faulty_fs(path):
    Control(path, inner="fs")
    return FaultyTier()


@pytest.fixture(
    params=[lambda _: SlabTier(), lambda _: FsTier(), faulty_fs],
    ids=["slab", "fs", "faulty-fs"],
)
def rig(request, tmp_path):
    with Rig(request.param(tmp_path), HeapRegion(), path=tmp_path) as made:
        made.fill(KEYS)
        made.path = tmp_path
        made.is_slab = isinstance(made.tier, SlabTier)
        yield made


def load(rig):
    failed, removed, _ = rig.run(KEYS, range(8, 16), load=True)
    assert [KEYS[i] for i in failed] == removed
    assert all(rig.region.holds(8 + i, KEYS[i]) for i in range(NUM) if i not in failed)
    return failed


@pytest.mark.parametrize("kind", list(Damage))
def test_damage_strikes_as_many_blocks_as_it_says(rig, kind):
    assert damage(rig.path, kind, random.Random(1)) == ""  # nothing is there
    assert rig.run(KEYS, range(NUM)) == ([], [], "")
    blocks = blocks_of(rig.path)
    assert {block.key for block in blocks} == set(KEYS)
    said = damage(rig.path, kind, random.Random(1))
    failed = load(rig)
    hit = [i for i in range(NUM) if KEYS[i].hex()[:12] in said]
    expected = {Damage.SWAP: 2, Damage.APPEND: 0 if rig.is_slab else 1}.get(kind, 1)
    assert len(failed) == rig.word(TierWord.BLOCKS_BAD) == expected
    assert set(failed) <= set(hit)
    assert len(hit) == 1 + (kind in (Damage.SWAP, Damage.RENAME))


def test_one_block_is_too_few_to_swap(rig):
    rig.run(KEYS[:1], [0])
    assert damage(rig.path, Damage.SWAP, random.Random(1)) == ""
    assert damage(rig.path, Damage.FLIP, random.Random(1))


def test_a_seed_says_what_is_damaged(rig):
    rig.run(KEYS, range(NUM))
    kinds = [Damage.FLIP, Damage.SWAP, Damage.RENAME]
    rng = random.Random(7)
    first = [damage(rig.path, kind, rng) for kind in kinds]
    rng = random.Random(7)
    assert [damage(rig.path, kind, rng) for kind in kinds] == first
    assert all(first)


def test_evicted_blocks_are_not_damaged(tmp_path):
    with Rig(SlabTier(), HeapRegion(), path=tmp_path, max_blocks=4) as rig:
        rig.fill(KEYS)
        rig.run(KEYS[:4], range(4))
        rig.run(KEYS[4:], range(4, 8))
        assert {block.key for block in blocks_of(tmp_path)} == set(KEYS[4:])
