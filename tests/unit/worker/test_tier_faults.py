"""F29, F21: refusals of the system are told apart, backed off from, and forgotten."""

import contextlib
import errno
import itertools
import os
import sqlite3
import subprocess
import threading

import pytest
from executor_kit import TIMEOUT_S, Rig

from shmoffload.errors import TierError
from shmoffload.testing.poll import wait_until
from shmoffload.testing.tier_tests import HeapRegion, deadline, key_of
from shmoffload.wire.session import Fault, TierWord
from shmoffload.worker.faults import NoSpaceError, fault_of
from shmoffload.worker.tier import BlockStatus
from shmoffload.worker.tiers.fs import FsTier
from shmoffload.worker.tiers.slab import SlabTier
from shmoffload.worker.tiers.slab_file import SlabFile

CODES = {
    errno.ENOSPC: Fault.NO_SPACE,
    errno.EDQUOT: Fault.NO_SPACE,
    errno.EIO: Fault.IO,
    errno.EMFILE: Fault.NO_FILES,
    errno.ENFILE: Fault.NO_FILES,
    errno.EACCES: Fault.NO_ACCESS,
    errno.EPERM: Fault.NO_ACCESS,
    errno.EROFS: Fault.READ_ONLY,
    errno.EFBIG: Fault.OTHER,
}
NAMED = {code: fault for code, fault in CODES.items() if fault is not Fault.OTHER}
WRITERS = {"slab": (SlabFile, "write"), "fs": (FsTier, "_write")}
READERS = {"slab": (SlabFile, "read"), "fs": (FsTier, "_read")}


@pytest.fixture(params=[SlabTier, FsTier], ids=["slab", "fs"])
def rig(request, tmp_path):
    with Rig(request.param(), HeapRegion(num_slots=32), path=tmp_path) as made:
        made.kind = {SlabTier: "slab", FsTier: "fs"}[request.param]
        yield made


def refusing(code):
    def refuse(*_args):
        raise OSError(code, os.strerror(code))

    return refuse


def faults_of(rig):
    return {fault: n for fault in Fault if (n := rig.word(fault.word))}


def stores(rig, key):
    rig.fill([key])
    return rig.run([key], [0])[0] == []


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_f29_each_refusal_of_a_store_has_its_counter(rig, monkeypatch, code):
    monkeypatch.setattr(*WRITERS[rig.kind], refusing(code))
    keys = [key_of(i) for i in range(5)]
    rig.fill(keys)
    failed, _, words = rig.run(keys, range(5))
    assert sorted(failed) == list(range(5))
    assert os.strerror(code) in words
    assert faults_of(rig) == {CODES[code]: 5}
    assert rig.word(TierWord.BLOCKS_FAILED) == 5
    assert rig.word(TierWord.BACKING_OFF) == 0
    assert rig.tier.usage().num_blocks == 0


@pytest.mark.parametrize("code", NAMED, ids=errno.errorcode.get)
def test_f21_a_refused_read_leaves_the_block(rig, monkeypatch, code):
    keys = [key_of(i) for i in range(4)]
    rig.fill(keys)
    assert rig.run(keys, range(4)) == ([], [], "")
    with monkeypatch.context() as patch:
        patch.setattr(*READERS[rig.kind], refusing(code))
        failed, removed, words = rig.run(keys, range(8, 12), load=True)
    assert (sorted(failed), removed) == ([0, 1, 2, 3], [])
    assert os.strerror(code) in words
    assert faults_of(rig) == {NAMED[code]: 4}
    assert rig.word(TierWord.BACKING_OFF) == 0  # of stores
    assert rig.run(keys, range(8, 12), load=True) == ([], [], "")
    assert all(rig.region.holds(8 + i, key) for i, key in enumerate(keys))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_f29_after_three_failures_stores_are_probes_until_one_works(
    rig, monkeypatch, caplog, code
):
    calls = []

    def refuse(*_args):
        calls.append(1)
        raise OSError(code, os.strerror(code))

    old = key_of(99)
    assert stores(rig, old)
    with monkeypatch.context() as patch:
        patch.setattr(*WRITERS[rig.kind], refuse)
        for i in range(3):
            assert rig.word(TierWord.BACKING_OFF) == 0
            assert not stores(rig, key_of(i))
        assert rig.word(TierWord.BACKING_OFF) == CODES[code]
        for i in range(40):  # at full speed; one or two may be probes
            assert not stores(rig, key_of(i))
        assert len(calls) < 6
        assert rig.run([old], [8], load=True) == ([], [], "")  # loads go on
    wait_until(
        lambda: stores(rig, key_of(0)), timeout_s=TIMEOUT_S, what="the probe store"
    )
    assert rig.word(TierWord.BACKING_OFF) == 0
    assert [r.message for r in caplog.records if "stores" in r.message] == [
        f"stores fail again and again: [Errno {code}] {os.strerror(code)}; backing off",
        "stores work again",
    ]


def test_one_unreadable_block_of_a_run_costs_one_block(rig, monkeypatch):
    """F22, a bad sector: the neighbours come back all the same."""
    keys = [key_of(i) for i in range(8)]
    rig.fill(keys)
    assert rig.run(keys, range(8)) == ([], [], "")
    place, name = READERS[rig.kind]
    real = getattr(place, name)
    slots = dict(rig.tier._table.lru.items()) if rig.kind == "slab" else {}

    def read(self, what, at):
        if what == keys[3]:  # fs
            raise OSError(errno.EIO, "Input/output error")
        if slots and at <= slots[keys[3]] < at + len(what):
            raise OSError(errno.EIO, "Input/output error")
        return real(self, what, at)

    monkeypatch.setattr(place, name, read)
    failed, removed, _ = rig.run(keys, range(8, 16), load=True)
    assert (failed, removed) == ([3], [])
    assert faults_of(rig) == {Fault.IO: 1}
    good = [i for i in range(8) if i != 3]
    assert all(rig.region.holds(8 + i, keys[i]) for i in good)


def test_causes_are_looked_for_behind_our_own_errors():
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    read_only = sqlite3.OperationalError("attempt to write a readonly database")
    read_only.sqlite_errorcode = sqlite3.SQLITE_READONLY | 5 << 8
    caused = TierError("the slab's index refused")
    caused.__cause__ = full
    circle = TierError("a")
    circle.__cause__ = circle
    assert fault_of(caused) is Fault.NO_SPACE
    assert fault_of(read_only) is Fault.READ_ONLY
    assert fault_of(NoSpaceError("min_free")) is Fault.NO_SPACE
    assert fault_of(circle) is fault_of(ValueError("x")) is Fault.OTHER
    assert [fault.word.name for fault in Fault] == [
        f"FAILED_{fault.name}" for fault in Fault
    ]


def test_what_a_plug_in_raises_or_only_calls_failed_is_counted_too(tmp_path):
    class Mute(FsTier):
        def put(self, keys, slots, deadline_s):
            if keys[0] == key_of(0):
                return [BlockStatus.FAIL] * len(keys)
            self.fail(OSError(errno.EIO, "said of one, then the whole call fails"))
            raise OSError(errno.EROFS, "Read-only file system")

    with Rig(Mute(), HeapRegion(), path=tmp_path) as rig:
        rig.run([key_of(0), key_of(1)], [0, 1])
        assert faults_of(rig) == {Fault.OTHER: 2}
        rig.run([key_of(2), key_of(3), key_of(4)], [0, 1, 2])
        assert faults_of(rig) == {Fault.OTHER: 2, Fault.READ_ONLY: 3}
        assert rig.word(TierWord.BLOCKS_FAILED) == 5


def test_a_file_that_cannot_be_removed_still_counts_against_the_bound(
    tmp_path, monkeypatch
):
    region = HeapRegion(num_slots=32)
    with Rig(FsTier(), region, path=tmp_path, max_blocks=3) as rig:
        keys = [key_of(i) for i in range(3)]
        rig.fill(keys)
        assert rig.run(keys, range(3)) == ([], [], "")
        with monkeypatch.context() as patch:
            patch.setattr(FsTier, "_unlink", refusing(errno.EROFS))
            failed, removed, _ = rig.run([key_of(7)], [8])
        assert (failed, removed) == ([0], [])
        assert rig.tier.usage().num_blocks == 3
        assert faults_of(rig) == {Fault.READ_ONLY: 1}
        assert rig.run(keys, range(8, 11), load=True) == ([], [], "")
        rig.fill([key_of(7)])
        failed, removed, _ = rig.run([key_of(7)], [0])
        assert (failed, len(removed)) == ([], 1)
        assert rig.tier.usage().num_blocks == 3


def test_bad_files_that_cannot_be_removed_are_read_once(tmp_path, monkeypatch):
    region = HeapRegion(num_slots=32)
    with Rig(FsTier(), region, path=tmp_path) as rig:
        keys = [key_of(i) for i in range(4)]
        rig.fill(keys)
        assert rig.run(keys, range(4)) == ([], [], "")
        for file in tmp_path.rglob("*0" * 4):
            os.truncate(file, 10)
        monkeypatch.setattr(FsTier, "_unlink", refusing(errno.EACCES))
        failed, removed, _ = rig.run(keys, range(8, 12), load=True)
        assert (sorted(failed), set(removed)) == ([0, 1, 2, 3], set(keys))
        assert rig.tier.exists(keys, deadline()) == [False] * 4
        rig.fill(keys)
        assert rig.run(keys, range(4)) == ([], [], "")  # written over
        assert rig.run(keys, range(8, 12), load=True) == ([], [], "")


def test_folders_removed_behind_our_back_are_misses_and_come_again(tmp_path):
    region = HeapRegion(num_slots=32)
    with Rig(FsTier(), region, path=tmp_path) as rig:
        keys = [key_of(i) for i in range(6)]
        rig.fill(keys)
        assert rig.run(keys, range(6)) == ([], [], "")
        folder = tmp_path / region.namespace.hex()
        subprocess.run(["find", folder, "-mindepth", "1", "-delete"], check=True)
        failed, removed, words = rig.run(keys, range(8, 14), load=True)
        assert (sorted(failed), set(removed), words) == (list(range(6)), set(keys), "")
        assert rig.word(TierWord.BLOCKS_MISSED) == 6
        assert faults_of(rig) == {}
        assert rig.run(keys, range(6)) == ([], [], "")
        assert rig.run(keys, range(8, 14), load=True) == ([], [], "")


def test_a_missing_file_does_not_take_a_newer_block_along(tmp_path, monkeypatch):
    """Reader: open fails. Writer: deletes and stores the key. Reader: drops it?"""
    region = HeapRegion(num_slots=32)
    with Rig(FsTier(), region, path=tmp_path) as rig:
        key = key_of(0)
        assert stores(rig, key)

        def read(*_args):
            rig.tier.delete([key], deadline())
            region.fill(1, key)
            assert rig.tier.put([key], [1], deadline()) == [BlockStatus.OK]
            raise FileNotFoundError(errno.ENOENT, "gone at the time of looking")

        with monkeypatch.context() as patch:
            patch.setattr(FsTier, "_read", read)
            assert rig.tier.get([key], [8], deadline()) == [BlockStatus.MISS]
        assert rig.tier.exists([key], deadline()) == [True]
        assert rig.tier.get([key], [8], deadline()) == [BlockStatus.OK]


def test_a_block_that_is_read_outlives_its_deletion(rig, monkeypatch):
    """Two phases: gone for lookups at once, its bytes after the last reader."""
    keys = [key_of(i) for i in range(16)]  # the tier is full
    rig.fill(keys)
    assert rig.run(keys, range(16)) == ([], [], "")
    reading, go_on = threading.Event(), threading.Event()
    calls = {"slab": "preadv", "fs": "readv"}
    real = getattr(os, calls[rig.kind])

    def slow(*args):
        reading.set()
        assert go_on.wait(TIMEOUT_S)
        return real(*args)

    monkeypatch.setattr(os, calls[rig.kind], slow)
    load = rig.submit([keys[5]], [20], load=True)
    assert reading.wait(TIMEOUT_S)
    rig.tier.delete([keys[5]], deadline())
    assert rig.tier.exists([keys[5]], deadline()) == [False]
    new = [key_of(100 + i) for i in range(15)]  # all but the slot that is read
    rig.fill(new)
    assert rig.run(new, range(15))[0] == []
    go_on.set()
    assert rig.answer(load).failed_idx == b""
    assert rig.region.holds(20, keys[5])
    rig.fill([key_of(200)])
    assert rig.run([key_of(200)], [0])[0] == []
    assert rig.tier.usage().num_blocks <= 16


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 256 KiB."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256K", "tmpfs", str(small)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this user may not mount")
    yield small
    wait_until(
        lambda: subprocess.run(["umount", str(small)]).returncode == 0,
        timeout_s=10,
        what="the unmount",
    )


def fill_up(path):
    """Take all that is left, as a neighbour would."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 512)


def test_f29_a_full_disk_is_survived_and_used_again(tiny_disk, monkeypatch):
    region = HeapRegion(num_slots=16, block_bytes=100_000)
    with Rig(FsTier(), region, path=tiny_disk, max_blocks=100) as rig:
        # statvfs would warn the tier; a neighbour that is quicker would not.
        monkeypatch.setattr(type(rig.tier._place), "free_bytes", lambda _: 1 << 40)
        keys = [key_of(i) for i in range(3)]
        rig.fill(keys)
        failed, removed, words = rig.run(keys, range(3))
        assert (failed, removed) == ([0], [])  # the last block is stored first
        assert "No space left" in words
        for i in itertools.count():
            assert not stores(rig, key_of(50 + i))
            if rig.word(TierWord.BACKING_OFF):
                break
        assert i <= 3
        assert rig.word(TierWord.BACKING_OFF) == Fault.NO_SPACE
        assert set(faults_of(rig)) == {Fault.NO_SPACE}
        assert list(tiny_disk.rglob("*.tmp")) == []
        assert rig.run(keys[1:], [8, 9], load=True) == ([], [], "")
        assert all(rig.region.holds(7 + i, keys[i]) for i in (1, 2))
        monkeypatch.undo()
        # Space returns: the tier's own, under its bound.
        rig.tier.delete([keys[1]], deadline())
        wait_until(
            lambda: stores(rig, keys[0]), timeout_s=TIMEOUT_S, what="the probe store"
        )
        assert rig.word(TierWord.BACKING_OFF) == 0
        assert rig.run([keys[0], keys[2]], [8, 9], load=True) == ([], [], "")


def test_f29_a_neighbour_fills_the_disk_and_goes(tiny_disk):
    region = HeapRegion(num_slots=16, block_bytes=30_000)
    rig = Rig(FsTier(), region, path=tiny_disk, max_blocks=4)
    rig.tier._min_free = 40_000
    with rig:
        keys = [key_of(i) for i in range(2)]
        rig.fill(keys)
        assert rig.run(keys, range(2)) == ([], [], "")
        fill_up(tiny_disk / "neighbour")
        wait_until(
            lambda: not stores(rig, key_of(5)) and rig.word(TierWord.BACKING_OFF),
            timeout_s=TIMEOUT_S,
            what="the breaker",
        )
        assert rig.word(TierWord.BACKING_OFF) == Fault.NO_SPACE
        (tiny_disk / "neighbour").unlink()
        wait_until(
            lambda: stores(rig, key_of(6)), timeout_s=TIMEOUT_S, what="the probe store"
        )
        assert rig.run([key_of(6)], [8], load=True) == ([], [], "")


@pytest.mark.parametrize("kind", [SlabTier, FsTier])
def test_f29_use_never_exceeds_max_bytes(tmp_path, monkeypatch, kind):
    region = HeapRegion(num_slots=32)
    most = []
    names = {"index.sqlite", "index.sqlite-wal", "index.sqlite-shm", "lock"}

    def measure(real):
        def call(*args, **kwargs):
            result = real(*args, **kwargs)
            files = [p for p in tmp_path.rglob("*") if p.is_file()]
            most.append(sum(p.stat().st_size for p in files if p.name not in names))
            return result

        return call

    with Rig(kind(), region, path=tmp_path, max_blocks=5) as rig:
        for name in ("pwritev", "write", "rename"):
            monkeypatch.setattr(os, name, measure(getattr(os, name)))
        for start in range(0, 40, 4):
            keys = [key_of(start + i) for i in range(4)]
            rig.fill(keys)
            assert rig.run(keys, range(4))[0] == []
        monkeypatch.undo()
    assert len(most) >= 10
    assert max(most) <= 5 * region.stride
