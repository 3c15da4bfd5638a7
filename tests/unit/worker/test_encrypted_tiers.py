"""Encrypted tiers: right bytes or a miss, and nothing readable on the medium."""

import json
import mmap
import os
import random
import threading

import pytest
from executor_kit import Rig

from shmoffload.cli.verify import verify_command
from shmoffload.testing.tier_tests import HeapRegion, key_of
from shmoffload.wire import layout
from shmoffload.wire.config import TierConfig
from shmoffload.wire.layout import HEADER_BYTES, PAGE_BYTES, PIECE_BYTES
from shmoffload.wire.session import TierWord
from shmoffload.worker.bounce import BounceRegion, CipherSealer
from shmoffload.worker.crypt import Cipher
from shmoffload.worker.seal import Sealer, sealer_of
from shmoffload.worker.tiers.fs import FsTier
from shmoffload.worker.tiers.memory import MemoryTier
from shmoffload.worker.tiers.slab import SlabTier

NUM = 40
KEYS = [key_of(i) for i in range(NUM)]
KEY, OTHER_KEY = random.Random(1).randbytes(32), random.Random(2).randbytes(32)
TIERS = {"slab": SlabTier, "fs": FsTier, "memory": MemoryTier}
DISKS = ["slab", "fs"]


def make(kind, path, *, key=KEY, region=None, block_bytes=5000, threads=1):
    """A rig over a tier with a key; None is without."""
    region = region or HeapRegion(2 * NUM, block_bytes)
    sealer = Sealer(region)
    if key is not None:
        cipher = Cipher(key, region.namespace)
        sealer = CipherSealer(region, cipher, num_threads=1 + threads)
    return Rig(
        TIERS[kind](),
        region,
        max_blocks=2 * NUM,
        path=path,
        sealer=sealer,
        threads=threads,
    )


def store_all(rig):
    rig.fill(KEYS)
    assert rig.run(KEYS, range(NUM)) == ([], [], "")


def load_all(rig):
    for i in range(NUM):
        rig.region.smear(NUM + i)
    return rig.run(KEYS, range(NUM, 2 * NUM), load=True)


def assert_right(rig, positions=range(NUM)):
    """Payload and header, as adopting the region needs them."""
    assert all(rig.region.holds(NUM + i, KEYS[i]) for i in positions)


def on_disk(path):
    files = [file for file in path.rglob("*") if file.is_file()]
    return {file: file.read_bytes() for file in files}


class Disk:
    """The stored blocks as bytes of files."""

    def __init__(self, rig, path):
        self.stride = rig.region.stride
        self.folder = path / rig.sealer.region.namespace.hex()
        self.slots = None
        if isinstance(rig.tier, SlabTier):
            self.slots = dict(rig.tier._table.lru.items())

    def place(self, key):
        if self.slots is not None:
            return self.folder / "slab.bin", self.slots[key] * self.stride
        return self.folder / key.hex()[:2] / key.hex(), 0

    def read(self, key):
        path, at = self.place(key)
        return path.read_bytes()[at : at + self.stride]

    def write(self, key, data, offset=0):
        path, at = self.place(key)
        with path.open("r+b") as file:
            file.seek(at + offset)
            file.write(data)

    def flip(self, key, at, bit=0):
        self.write(key, bytes([self.read(key)[at] ^ 1 << bit]), at)


# Bytes ---------------------------------------------------------------------------


@pytest.mark.parametrize("block_bytes", [1, 4080, 4096, 5000, 8192])
@pytest.mark.parametrize("kind", TIERS)
def test_round_trip(kind, tmp_path, block_bytes):
    """The tag's room is padding, or the header page where there is no padding."""
    with make(kind, tmp_path, block_bytes=block_bytes) as rig:
        store_all(rig)
        before = bytes(rig.region._view[: NUM * rig.region.stride])
        assert load_all(rig) == ([], [], "")
        assert_right(rig)
        assert bytes(rig.region._view[: NUM * rig.region.stride]) == before
        assert rig.word(TierWord.BLOCKS_BAD) == 0
        num_bytes = NUM * rig.region.stride
        assert rig.word(TierWord.BYTES_WRITTEN) == num_bytes
        assert rig.word(TierWord.BYTES_READ) == num_bytes


@pytest.mark.parametrize("kind", DISKS)
def test_blocks_are_found_again_by_the_next_worker(kind, tmp_path):
    with make(kind, tmp_path) as rig:
        store_all(rig)
    with make(kind, tmp_path) as rig:
        assert sorted(rig.tier.resident()) == sorted(KEYS)
        assert load_all(rig) == ([], [], "")
        assert all(
            bytes(rig.region.slot_view(NUM + i)) == random.Random(key).randbytes(5000)
            for i, key in enumerate(KEYS)
        )


def test_a_slab_without_its_index_is_read_by_headers(tmp_path):
    with make("slab", tmp_path) as rig:
        store_all(rig)
        folder = Disk(rig, tmp_path).folder
    for file in folder.glob("index.sqlite*"):
        file.unlink()
    with make("slab", tmp_path) as rig:
        assert load_all(rig) == ([], [], "")
        assert_right(rig)


@pytest.mark.parametrize("kind", DISKS)
def test_nothing_of_a_payload_is_on_the_disk(kind, tmp_path):
    """Plain tiers are searched the same way, so that the search is known to find."""
    samples = [
        random.Random(key).randbytes(5000)[at : at + 16]
        for key in KEYS
        for at in (0, 2000, 4984)
    ]
    for name, key in (("plain", None), ("secret", KEY)):
        path = tmp_path / name
        with make(kind, path, key=key) as rig:
            store_all(rig)
        everything = b"".join(on_disk(path).values())
        found = sum(sample in everything for sample in samples)
        assert found == (0 if key else len(samples))
        assert KEY not in everything


def test_nothing_of_a_payload_is_in_a_tiers_own_memory(tmp_path):
    with make("memory", tmp_path) as rig:
        store_all(rig)
        kept = b"".join(entry for _, entry in rig.tier._lru.items())
        assert len(kept) == NUM * rig.region.stride
        for key in KEYS:
            assert random.Random(key).randbytes(5000)[:16] not in kept


def test_equal_payloads_look_unlike(tmp_path):
    with make("fs", tmp_path) as rig:
        for i, key in enumerate(KEYS):
            rig.region.fill(i, KEYS[0])
            rig.region.header_view(i)[:HEADER_BYTES] = bytes(HEADER_BYTES)
            assert rig.run([key], [i]) == ([], [], "")
        disk = Disk(rig, tmp_path)
        assert len({disk.read(key)[:5000] for key in KEYS}) == NUM


# What is not right ---------------------------------------------------------------


@pytest.mark.parametrize("kind", DISKS)
def test_another_key_is_another_namespace_and_a_miss(kind, tmp_path):
    with make(kind, tmp_path) as rig:
        store_all(rig)
    before = on_disk(tmp_path)
    for key in (OTHER_KEY, None):
        with make(kind, tmp_path, key=key) as rig:
            assert list(rig.tier.resident()) == []
            failed, _, _ = load_all(rig)
            assert sorted(failed) == list(range(NUM))
            assert rig.word(TierWord.BLOCKS_MISSED) == NUM
            store_all(rig)
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 3
    with make(kind, tmp_path) as rig:  # and the first one's are as they were
        for path, data in before.items():
            if path.name != "lock" and "index" not in path.name:
                assert path.read_bytes() == data
        assert load_all(rig) == ([], [], "")
        assert_right(rig)


@pytest.mark.parametrize("kind", DISKS)
def test_wrong_key_in_the_right_namespace_is_bad(kind, tmp_path):
    """Nobody can do that by configuration; the tag is what stands behind it."""
    with make(kind, tmp_path) as rig:
        store_all(rig)
    region = HeapRegion(2 * NUM)
    wrong = Cipher(OTHER_KEY, region.namespace)
    wrong.namespace = Cipher(KEY, region.namespace).namespace
    sealer = CipherSealer(region, wrong, num_threads=2)
    with Rig(
        TIERS[kind](), region, max_blocks=2 * NUM, path=tmp_path, sealer=sealer
    ) as rig:
        failed, removed, error = load_all(rig)
        assert sorted(failed) == list(range(NUM))
        assert sorted(removed) == sorted(KEYS)
        assert "not what was stored" in error
        assert rig.word(TierWord.BLOCKS_BAD) == NUM


@pytest.mark.parametrize("kind", DISKS)
@pytest.mark.parametrize("block_bytes", [3996, 4096])
def test_flipped_bit_anywhere_is_a_counted_miss(kind, tmp_path, block_bytes):
    """Ciphertext, padding, header, nonce, tag, and what is behind them."""
    rng = random.Random(33)
    with make(kind, tmp_path, block_bytes=block_bytes) as rig:
        store_all(rig)
        disk = Disk(rig, tmp_path)
        record = disk.stride - PAGE_BYTES + HEADER_BYTES
        places = [*range(disk.stride - PAGE_BYTES, record + 50)]
        for n in range(1, 201):
            key = KEYS[n % NUM]
            at = rng.choice([rng.randrange(disk.stride), rng.choice(places)])
            right = disk.read(key)
            disk.flip(key, at, rng.randrange(8))
            failed, removed, _ = rig.run([key], [NUM], load=True)
            assert (failed, removed) == ([0], [key]), at
            assert rig.word(TierWord.BLOCKS_BAD) == n
            rig.fill([key], [NUM])
            assert rig.run([key], [NUM]) == ([], [], "")
            if disk.slots is not None:
                disk = Disk(rig, tmp_path)
            assert disk.read(key) != right  # a nonce of its own


@pytest.mark.parametrize("kind", DISKS)
def test_swapped_and_copied_blocks_are_misses(kind, tmp_path):
    with make(kind, tmp_path) as rig:
        store_all(rig)
        disk = Disk(rig, tmp_path)
        a, b, c = (disk.read(key) for key in KEYS[:3])
        disk.write(KEYS[0], b)
        disk.write(KEYS[1], a)
        # Somebody who knows the format puts the right header before foreign bytes.
        forged = bytearray(c)
        forged[: rig.region.block_bytes] = a[: rig.region.block_bytes]
        disk.write(KEYS[2], bytes(forged))
        failed, removed, _ = load_all(rig)
        assert sorted(failed) == [0, 1, 2]
        assert sorted(removed) == sorted(KEYS[:3])
        assert rig.word(TierWord.BLOCKS_BAD) == 3
        assert_right(rig, range(3, NUM))


@pytest.mark.parametrize("kind", DISKS)
def test_forged_block_with_right_checksums_is_a_miss(kind, tmp_path):
    """Checksums anybody can compute; the tag only who has the key."""
    with make(kind, tmp_path) as rig:
        store_all(rig)
        disk = Disk(rig, tmp_path)
        forger = HeapRegion(1, namespace=rig.sealer.region.namespace)
        forger.fill(0, KEYS[0])
        record = disk.read(KEYS[0])[-PAGE_BYTES + HEADER_BYTES :]
        for tail in (record, bytes(PAGE_BYTES - HEADER_BYTES)):
            forger.header_view(0)[HEADER_BYTES:] = tail
            disk.write(KEYS[0], bytes(forger.stride_view(0)))
            assert rig.run(KEYS[:1], [NUM], load=True)[0] == [0]
            store_all(rig)
            disk = Disk(rig, tmp_path)
        assert rig.word(TierWord.BLOCKS_BAD) == 2


@pytest.mark.parametrize("kind", DISKS)
def test_older_ciphertext_of_the_same_block_is_right(kind, tmp_path):
    """A key names its content: what was the block is the block. No promise more."""
    with make(kind, tmp_path) as rig:
        store_all(rig)
        disk = Disk(rig, tmp_path)
        old = disk.read(KEYS[0])
        rig.tier.delete(KEYS[:1], float("inf"))
        store_all(rig)
        disk = Disk(rig, tmp_path)
        assert disk.read(KEYS[0]) != old
        disk.write(KEYS[0], old)
        assert load_all(rig) == ([], [], "")
        assert_right(rig)


# Tools ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DISKS)
def test_verify_needs_no_key(kind, tmp_path, capsys):
    with make(kind, tmp_path) as rig:
        store_all(rig)
        disk = Disk(rig, tmp_path)
    assert verify_command([str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["directories"]
    assert (found["blocks"], found["bad_blocks"]) == (NUM, 0)
    rng = random.Random(7)
    for _ in range(60):
        key, at = rng.choice(KEYS), rng.randrange(disk.stride)
        if rng.random() < 0.5:
            at = disk.stride - PAGE_BYTES + rng.randrange(HEADER_BYTES + 60)
        disk.flip(key, at)
        assert verify_command([str(tmp_path), "--json"]) == 1, at
        (found,) = json.loads(capsys.readouterr().out)["directories"]
        assert found["bad_blocks"] == 1
        disk.flip(key, at)
    disk.flip(KEYS[0], 0)
    assert verify_command([str(tmp_path), "--repair"]) == 1
    assert verify_command([str(tmp_path)]) == 0
    with make(kind, tmp_path) as rig:
        assert load_all(rig)[0] == [0]
        assert_right(rig, range(1, NUM))


# Memory --------------------------------------------------------------------------


def test_memory_is_a_piece_a_thread():
    region = HeapRegion(2, block_bytes=(1 << 20) - PAGE_BYTES)
    cipher = Cipher(KEY, region.namespace)
    sealer = CipherSealer(region, cipher, num_threads=3)
    assert sealer.region.num_slots * region.stride == 3 * PIECE_BYTES
    large = HeapRegion(1, block_bytes=2 * PIECE_BYTES)
    assert CipherSealer(large, cipher, num_threads=3).region.num_slots == 3


def test_region_is_aligned_bounded_and_like_the_primary():
    like = HeapRegion()
    region = BounceRegion(3, like, bytes(16))
    assert (region.stride, region.block_bytes) == (like.stride, like.block_bytes)
    assert region.address(0) % mmap.PAGESIZE == 0
    assert region.address(2) - region.address(0) == 2 * region.stride
    for view, size in (
        (region.stride_view, region.stride),
        (region.slot_view, region.block_bytes),
        (region.header_view, PAGE_BYTES),
        (region.sealed_view, region.block_bytes + 16),
    ):
        assert len(view(2)) == size
        for slot in (-1, 3):
            with pytest.raises(IndexError):
                view(slot)


def test_threads_never_share_a_slot():
    region = HeapRegion(4)
    sealer = CipherSealer(region, Cipher(KEY, region.namespace), num_threads=9)
    seen = [sealer.incoming([0, 1])]

    def work():
        mine = sealer.incoming([0, 1])
        assert mine == sealer.incoming([2, 3])
        seen.append(mine)

    for _ in range(8):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len({slot for pair in seen for slot in pair}) == 18


@pytest.mark.parametrize("kind", DISKS)
def test_many_threads_many_pieces(kind, tmp_path, monkeypatch):
    """Loads and stores side by side, each job in several pieces."""
    monkeypatch.setattr(layout, "PIECE_BYTES", 3 * 12288)
    region = HeapRegion(4 * NUM)
    with make(kind, tmp_path, region=region, threads=4) as rig:
        assert rig.sealer.region.num_slots == 15
        rig.fill(KEYS)
        more = [key_of(i, "more") for i in range(NUM)]
        assert rig.run(KEYS, range(NUM)) == ([], [], "")
        rig.fill(more, range(3 * NUM, 4 * NUM))
        jobs = [rig.submit(more, range(3 * NUM, 4 * NUM))]
        jobs += [
            rig.submit(KEYS[i::8], range(NUM + i, 2 * NUM, 8), load=True)
            for i in range(8)
        ]
        for job in jobs:
            done = rig.answer(job)
            assert (done.failed_idx, done.error) == (b"", "")
        assert_right(rig)
        assert rig.run(more, range(2 * NUM, 3 * NUM), load=True) == ([], [], "")
        assert all(region.holds(2 * NUM + i, key) for i, key in enumerate(more))


# Choosing ------------------------------------------------------------------------


def test_without_a_key_the_tier_sees_the_primary():
    region = HeapRegion()
    sealer = sealer_of(TierConfig(type="slab"), region, max_threads=8)
    assert sealer.region is region
    assert sealer.words == ""


def test_with_a_key_each_thread_has_its_memory(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(KEY)
    path.chmod(0o600)
    config = TierConfig(type="slab", key_file=str(path), threads=4)
    region = HeapRegion()
    a_thread = PIECE_BYTES // region.stride
    for max_threads, num_threads in ((8, 5), (1, 2)):
        sealer = sealer_of(config, region, max_threads=max_threads)
        assert sealer.region.num_slots == num_threads * a_thread
    assert sealer.region.namespace != region.namespace
    assert sealer.words.startswith(", encrypted with key ")
    assert os.fsencode(KEY.hex()) not in sealer.words.encode()
