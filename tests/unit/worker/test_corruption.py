"""F33: no corrupted byte is ever data; each one is a counted miss, read once."""

import random

import pytest
from executor_kit import Rig

from shmoffload.testing.faults.damage import blocks_of
from shmoffload.testing.tier_tests import HeapRegion, key_of
from shmoffload.wire.session import TierWord
from shmoffload.worker.tiers.fs import FsTier
from shmoffload.worker.tiers.slab import SlabTier

NUM_BAD, NUM_FINE = 1000, 24
NUM = NUM_BAD + NUM_FINE
KEYS = [key_of(i) for i in range(NUM)]
POSITIONS = dict(enumerate(KEYS))


only = {
    kind: pytest.mark.parametrize("rig", [tier], ids=[kind], indirect=True)
    for kind, tier in {"slab": SlabTier, "fs": FsTier}.items()
}


@pytest.fixture(params=[SlabTier, FsTier], ids=["slab", "fs"])
def rig(request, tmp_path):
    """A disk tier with ``NUM`` blocks, 100 bytes of padding in each."""
    region = HeapRegion(num_slots=2 * NUM, block_bytes=3996)
    made = Rig(request.param(), region, max_blocks=2 * NUM, path=tmp_path)
    with made:
        made.fill(KEYS)
        assert made.run(KEYS, range(NUM)) == ([], [], "")
        made.is_slab = request.param is SlabTier
        made.blocks = {block.key: block for block in blocks_of(tmp_path)}
        assert set(made.blocks) == set(KEYS)
        yield made


def expect_misses(rig, bad):
    """All of ``bad`` miss once as bad and then as absent; all others are right."""
    positions = [i for i, key in POSITIONS.items() if key in bad]
    fine = [i for i in POSITIONS if KEYS[i] not in bad]
    for i in range(NUM):
        rig.region.smear(NUM + i)
    failed, removed, error = rig.run(KEYS, range(NUM, 2 * NUM), load=True)
    assert not set(failed) ^ set(positions)
    assert not set(removed) ^ bad
    assert "not what was stored" in error
    assert rig.word(TierWord.BLOCKS_BAD) == len(bad)
    assert rig.word(TierWord.BLOCKS_READ) == len(fine)
    assert all(rig.region.holds(NUM + i, KEYS[i]) for i in fine)
    failed, _, _ = rig.run(KEYS, range(NUM, 2 * NUM), load=True)
    assert not set(failed) ^ set(positions)
    assert rig.word(TierWord.BLOCKS_BAD) == len(bad)
    assert rig.word(TierWord.BLOCKS_MISSED) == len(bad)
    assert rig.tier.usage().num_blocks == len(fine)
    rig.fill(KEYS)  # and all of them can be stored again
    assert rig.run(KEYS, range(NUM)) == ([], [], "")
    assert rig.run(KEYS, range(NUM, 2 * NUM), load=True) == ([], [], "")


def test_f33_a_flipped_bit_anywhere_in_a_block(rig):
    rng = random.Random(33)
    for key in KEYS[:NUM_BAD]:
        rig.blocks[key].flip(rng)
    expect_misses(rig, set(KEYS[:NUM_BAD]))


def test_f33_swapped_blocks(rig):
    keys = random.Random(34).sample(KEYS, NUM_BAD)
    for a, b in zip(keys[::2], keys[1::2], strict=True):
        rig.blocks[a].swap(rig.blocks[b])
    expect_misses(rig, set(keys))


def test_f33_a_block_under_another_keys_name(rig):
    rng = random.Random(35)
    keys = KEYS[:NUM_BAD]
    rng.shuffle(keys)
    for key in keys:
        rig.blocks[rng.choice(KEYS[NUM_BAD:])].copy_to(rig.blocks[key])
    expect_misses(rig, set(keys))


def test_f33_a_torn_block(rig):
    """The end of a block is an older one's, or was never written."""
    rng = random.Random(36)
    for key in KEYS[:NUM_BAD]:
        at = rng.randrange(rig.region.stride - 4096)  # in the payload at the latest
        end = rig.blocks[rng.choice(KEYS[NUM_BAD:])].read()[at:]
        rig.blocks[key].write(rng.choice([end, b"\0" * len(end)]), at)
    expect_misses(rig, set(KEYS[:NUM_BAD]))


def test_f33_a_truncated_file(rig):
    """A thousand files, or the last thousand blocks of a slab, end early."""
    rng = random.Random(37)
    bad = list(rig.blocks)[NUM_FINE:]
    for key in bad[:1] if rig.is_slab else bad:
        rig.blocks[key].truncate(rng)
    expect_misses(rig, set(bad))


@only["slab"]
def test_f33_a_slab_that_loses_its_end_block_by_block(rig):
    rng = random.Random(38)
    by_place = list(rig.blocks)
    for n, key in enumerate(reversed(by_place[NUM_FINE:]), start=1):
        rig.blocks[key].truncate(rng)
        failed, removed, _ = rig.run([key], [NUM], load=True)
        assert (failed, removed) == ([0], [key])
        assert rig.word(TierWord.BLOCKS_BAD) == n
    fine = by_place[:NUM_FINE]
    assert rig.run(fine, range(NUM, NUM + NUM_FINE), load=True) == ([], [], "")
    assert all(rig.region.holds(NUM + i, key) for i, key in enumerate(fine))


@only["fs"]
def test_f33_files_that_grew_or_became_something_else(rig):
    for i, key in enumerate(KEYS[:NUM_BAD]):
        if i % 2:
            rig.blocks[key].append(1 + i % 4096)
        else:
            rig.blocks[key].path.unlink()
            rig.blocks[key].path.symlink_to(rig.blocks[KEYS[-1]].path)
    expect_misses(rig, set(KEYS[:NUM_BAD]))
