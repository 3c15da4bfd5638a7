"""F33: no corrupted byte is ever data; each one is a counted miss, read once."""

import os
import random

import pytest
from executor_kit import Rig

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
        made.disk = Disk(made, tmp_path)
        yield made


class Disk:
    """The stored blocks as bytes of files."""

    def __init__(self, rig, path):
        self.stride = rig.region.stride
        self.folder = path / rig.region.namespace.hex()
        self.is_slab = isinstance(rig.tier, SlabTier)
        if self.is_slab:
            self.slots = dict(rig.tier._table.lru.items())

    def place(self, key):
        if self.is_slab:
            return self.folder / "slab.bin", self.slots[key] * self.stride
        name = key.hex()
        return self.folder / name[:2] / name, 0

    def read(self, key):
        path, at = self.place(key)
        with path.open("rb") as file:
            file.seek(at)
            return file.read(self.stride)

    def write(self, key, data, offset=0):
        path, at = self.place(key)
        with path.open("r+b") as file:
            file.seek(at + offset)
            file.write(data)

    def keys_by_place(self):
        return sorted(KEYS, key=lambda key: self.place(key)[1])


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
        offset = rng.randrange(rig.disk.stride)
        byte = rig.disk.read(key)[offset]
        rig.disk.write(key, bytes([byte ^ 1 << rng.randrange(8)]), offset)
    expect_misses(rig, set(KEYS[:NUM_BAD]))


def test_f33_swapped_blocks(rig):
    rng = random.Random(34)
    keys = rng.sample(KEYS, NUM_BAD)
    for a, b in zip(keys[::2], keys[1::2], strict=True):
        data_a, data_b = rig.disk.read(a), rig.disk.read(b)
        rig.disk.write(a, data_b)
        rig.disk.write(b, data_a)
    expect_misses(rig, set(keys))


def test_f33_a_block_under_another_keys_name(rig):
    rng = random.Random(35)
    keys = KEYS[:NUM_BAD]
    rng.shuffle(keys)
    for key in keys:
        rig.disk.write(key, rig.disk.read(rng.choice(KEYS[NUM_BAD:])))
    expect_misses(rig, set(keys))


def test_f33_a_torn_block(rig):
    """The end of a block is an older one's, or was never written."""
    rng = random.Random(36)
    for key in KEYS[:NUM_BAD]:
        at = rng.randrange(rig.disk.stride - 4096)  # in the payload at the latest
        end = rig.disk.read(rng.choice(KEYS[NUM_BAD:]))[at:]
        rig.disk.write(key, rng.choice([end, b"\0" * len(end)]), at)
    expect_misses(rig, set(KEYS[:NUM_BAD]))


def test_f33_a_truncated_file(rig):
    """A thousand files, or the last thousand blocks of a slab, end early."""
    rng = random.Random(37)
    by_place = rig.disk.keys_by_place()
    bad = by_place[NUM_FINE:]
    for key in bad[:1] if rig.disk.is_slab else bad:
        path, at = rig.disk.place(key)
        os.truncate(path, at + rng.choice([0, 1, rng.randrange(rig.disk.stride)]))
    expect_misses(rig, set(bad))


@only["slab"]
def test_f33_a_slab_that_loses_its_end_block_by_block(rig):
    rng = random.Random(38)
    by_place = rig.disk.keys_by_place()
    path, _ = rig.disk.place(by_place[0])
    for n, key in enumerate(reversed(by_place[NUM_FINE:]), start=1):
        _, at = rig.disk.place(key)
        os.truncate(path, at + rng.randrange(rig.disk.stride))
        failed, removed, _ = rig.run([key], [NUM], load=True)
        assert (failed, removed) == ([0], [key])
        assert rig.word(TierWord.BLOCKS_BAD) == n
    fine = by_place[:NUM_FINE]
    assert rig.run(fine, range(NUM, NUM + NUM_FINE), load=True) == ([], [], "")
    assert all(rig.region.holds(NUM + i, key) for i, key in enumerate(fine))


@only["fs"]
def test_f33_files_that_grew_or_became_something_else(rig):
    for i, key in enumerate(KEYS[:NUM_BAD]):
        path, _ = rig.disk.place(key)
        if i % 2:
            with path.open("ab") as file:
                file.write(b"\0" * (1 + i % 4096))
        else:
            path.unlink()
            path.symlink_to(rig.disk.place(KEYS[-1])[0])
    expect_misses(rig, set(KEYS[:NUM_BAD]))
