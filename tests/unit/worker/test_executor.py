"""What comes back is what was stored, or a miss: the framework around a tier."""

import pytest
from executor_kit import Rig

from shmoffload.testing.tier_tests import HeapRegion, deadline, key_of
from shmoffload.wire import layout
from shmoffload.wire.session import TierWord
from shmoffload.worker.tiers.fs import FsTier
from shmoffload.worker.tiers.memory import MemoryTier
from shmoffload.worker.tiers.slab import SlabTier


@pytest.fixture(params=[SlabTier, FsTier, MemoryTier], ids=["slab", "fs", "memory"])
def rig(request, tmp_path):
    with Rig(request.param(), HeapRegion(), path=tmp_path) as made:
        yield made


def test_store_and_load_with_headers_made_by_the_worker(rig):
    keys = [key_of(i) for i in range(5)]
    rig.fill(keys)
    assert rig.run(keys, range(5)) == ([], [], "")
    assert rig.run(keys, range(8, 13), load=True) == ([], [], "")
    assert all(rig.region.holds(8 + i, key) for i, key in enumerate(keys))
    assert rig.word(TierWord.BLOCKS_WRITTEN) == rig.word(TierWord.BLOCKS_READ) == 5
    assert rig.word(TierWord.BYTES_WRITTEN) == 5 * rig.region.stride
    assert rig.word(TierWord.RESIDENT_BLOCKS) == 5
    rig.wait_for(TierWord.COMPLETIONS, 2)
    rig.wait_for(TierWord.JOBS_DONE, 2)


def test_a_known_block_is_success_without_a_write(rig):
    keys = [key_of(0), key_of(1)]
    rig.fill(keys)
    rig.run(keys[:1], [0])
    first, second = rig.submit(keys, [0, 1]), rig.submit(keys, [0, 1])
    assert rig.answer(first).failed_idx == rig.answer(second).failed_idx == b""
    assert rig.word(TierWord.BLOCKS_WRITTEN) == 2
    assert rig.word(TierWord.BLOCKS_SKIPPED) == 3


def test_a_miss_among_hits_fails_alone(rig):
    rig.fill([key_of(0), key_of(1)])
    rig.run([key_of(0), key_of(1)], [0, 1])
    keys = [key_of(0), key_of(9), key_of(1)]
    failed, removed, _ = rig.run(keys, [8, 9, 10], load=True)
    assert (failed, removed) == ([1], [key_of(9)])
    assert rig.word(TierWord.BLOCKS_MISSED) == 1


def test_evicted_keys_are_told_and_own_keys_are_kept(tmp_path):
    region = HeapRegion()
    with Rig(SlabTier(), region, path=tmp_path, max_blocks=4) as rig:
        rig.executor._piece = 1
        old = [key_of(i) for i in range(4)]
        rig.fill(old)
        rig.run(old, range(4))
        # The job's own old[3] is the least recently used, yet not its victim.
        keys = [key_of(8), key_of(9), old[3]]
        rig.fill(keys, slots=[4, 5, 6])
        assert rig.run(keys, [4, 5, 6]) == ([], [old[2], old[1]], "")
        assert rig.word(TierWord.BLOCKS_EVICTED) == 2


def test_a_job_larger_than_the_tier_says_what_did_not_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "PIECE_BYTES", 1)
    region = HeapRegion()
    with Rig(SlabTier(), region, path=tmp_path, max_blocks=3) as rig:
        keys = [key_of(i) for i in range(5)]
        rig.fill(keys)
        failed, removed, error = rig.run(keys, range(5))
        assert sorted(failed) == [0, 1]
        assert removed == keys[:2]
        assert "smaller than the job" in error
        assert rig.tier.exists(keys, deadline()) == [False, False, True, True, True]


# Wrong bytes are never success -------------------------------------------------------


def stored_bytes(path, region, num):
    """Return (file, offset) of each stored stride of the tier under ``path``."""
    slab = path / region.namespace.hex() / "slab.bin"
    if slab.exists():
        return [(slab, i * region.stride) for i in range(num)]
    folder = path / region.namespace.hex()
    return [(folder / k[:2] / k, 0) for k in (key_of(i).hex() for i in range(num))]


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.fixture(params=[SlabTier, FsTier], ids=["slab", "fs"])
def disk_rig(request, tmp_path):
    with Rig(request.param(), HeapRegion(), path=tmp_path) as made:
        keys = [key_of(i) for i in range(4)]
        made.fill(keys)
        assert made.run(keys, range(4)) == ([], [], "")
        made.places = stored_bytes(tmp_path, made.region, 4)
        yield made


def expect_bad(rig, bad):
    keys = [key_of(i) for i in range(4)]
    failed, removed, error = rig.run(keys, range(8, 12), load=True)
    assert sorted(failed) == bad
    assert sorted(removed) == sorted(keys[i] for i in bad)
    assert "not what was stored" in error
    assert rig.word(TierWord.BLOCKS_BAD) == len(bad)
    assert rig.word(TierWord.BLOCKS_READ) == 4 - len(bad)
    there = rig.tier.exists(keys, deadline())
    assert there == [i not in bad for i in range(4)]
    assert all(rig.region.holds(8 + i, keys[i]) for i in range(4) if i not in bad)


@pytest.mark.parametrize("part", ["payload", "key", "checksum", "magic"])
def test_one_flipped_bit_is_a_miss(disk_rig, part):
    stride = disk_rig.region.stride
    header = stride - 4096
    at = {"payload": 4999, "key": header + 45, "checksum": header + 81, "magic": header}
    path, offset = disk_rig.places[2]
    flip(path, offset + at[part])
    expect_bad(disk_rig, [2])


def test_swapped_blocks_are_two_misses(disk_rig):
    stride = disk_rig.region.stride
    (path_a, at_a), (path_b, at_b) = disk_rig.places[:2]
    whole_a = path_a.read_bytes()[at_a : at_a + stride]
    whole_b = path_b.read_bytes()[at_b : at_b + stride]
    for path, at, data in ((path_a, at_a, whole_b), (path_b, at_b, whole_a)):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(data)
    expect_bad(disk_rig, [0, 1])


def test_a_block_under_another_name_is_a_miss(disk_rig):
    stride = disk_rig.region.stride
    (path_a, at_a), (path_b, at_b) = disk_rig.places[1], disk_rig.places[3]
    data = path_a.read_bytes()[at_a : at_a + stride]
    with path_b.open("r+b") as file:
        file.seek(at_b)
        file.write(data)
    expect_bad(disk_rig, [3])
