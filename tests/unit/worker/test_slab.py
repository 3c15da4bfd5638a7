"""The slab's own promises: runs, O_DIRECT, failing calls, pins."""

import contextlib
import errno
import fcntl
import os
import sqlite3
import stat

import pytest
from slab_kit import BAD, FAIL, OK, folder_of, open_slab, store

from shmoffload.testing.tier_tests import HeapRegion, deadline, key_of
from shmoffload.worker.tiers import slab_file


def test_files_are_private_under_any_umask(tmp_path):
    region = HeapRegion()
    old = os.umask(0)
    try:
        tier = open_slab(tmp_path / "new", region)
        store(tier, region, [key_of(0)])
    finally:
        os.umask(old)
    folder = folder_of(tmp_path / "new", region)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    names = sorted(p.name for p in folder.iterdir())
    side = ["index.sqlite-shm", "index.sqlite-wal"]
    assert names == ["index.sqlite", *side, "lock", "slab.bin"]
    assert {stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == {0o600}
    tier.close()


def count_writes(monkeypatch):
    calls = []
    real = os.pwritev

    def counting(fd, views, offset):
        calls.append((len(views), offset))
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", counting)
    return calls


def test_a_job_on_an_empty_slab_is_one_write_per_8_mib(tmp_path, monkeypatch):
    region = HeapRegion(num_slots=512, block_bytes=60 * 1024)  # stride 64 KiB
    tier = open_slab(tmp_path, region, max_blocks=512)
    calls = count_writes(monkeypatch)
    keys = [key_of(i) for i in range(160)]
    assert store(tier, region, keys[:128]) == [OK] * 128
    assert [num for num, _ in calls] == [128]
    calls.clear()
    assert store(tier, region, keys[128:]) == [OK] * 32
    assert [num for num, _ in calls] == [32]
    tier.close()


def test_a_recycled_slab_is_still_written_in_runs(tmp_path, monkeypatch):
    region = HeapRegion(num_slots=16)
    tier = open_slab(tmp_path, region)
    calls = count_writes(monkeypatch)
    for turn in range(6):
        assert store(tier, region, [key_of(turn * 8 + i) for i in range(8)]) == [OK] * 8
    assert len(calls) == 6
    tier.close()


def test_short_writes_and_reads_are_completed(tmp_path, monkeypatch):
    region = HeapRegion()
    tier = open_slab(tmp_path, region)
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(
        os, "pwritev", lambda fd, v, at: write(fd, [v[0][: -(-len(v[0]) // 2)]], at)
    )
    monkeypatch.setattr(
        os, "preadv", lambda fd, v, at: read(fd, [v[0][: min(3000, len(v[0]))]], at)
    )
    keys = [key_of(i) for i in range(3)]
    assert store(tier, region, keys) == [OK] * 3
    assert tier.get(keys, [8, 9, 10], deadline()) == [OK] * 3
    assert all(region.holds(8 + i, key) for i, key in enumerate(keys))
    tier.close()


def test_o_direct_on_a_disk_is_used_and_reads_back(tmp_path):
    region = HeapRegion()
    tier = open_slab(tmp_path, region)
    if not tier.direct_io:
        pytest.skip("this temporary directory takes no O_DIRECT")
    assert store(tier, region, [key_of(0)]) == [OK]
    assert tier.get([key_of(0)], [9], deadline()) == [OK]
    assert region.holds(9, key_of(0))
    assert tier.direct_io
    tier.close()


class ShiftedRegion(HeapRegion):
    """Slots that no O_DIRECT takes: their address is not aligned."""

    def stride_view(self, slot):
        if not 0 <= slot < self.num_slots - 1:
            raise IndexError(slot)
        start = slot * self.stride + 1
        return self._view[start : start + self.stride]


def test_o_direct_falls_back_at_the_probe_with_one_warning(tmp_path, caplog):
    region = ShiftedRegion()
    tier = open_slab(tmp_path, region)
    if tier.direct_io:
        pytest.skip("this file system takes O_DIRECT from any address")
    assert len(caplog.records) == 1
    assert "buffered" in caplog.text
    assert store(tier, region, [key_of(0)]) == [OK]
    assert tier.get([key_of(0)], [9], deadline()) == [OK]
    assert region.holds(9, key_of(0))
    tier.close()


def test_o_direct_falls_back_in_the_middle(tmp_path, monkeypatch, caplog):
    region = HeapRegion()
    tier = open_slab(tmp_path, region)
    if not tier.direct_io:
        pytest.skip("this temporary directory takes no O_DIRECT")
    real = os.pwritev

    def refusing(fd, views, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", refusing)
    assert store(tier, region, [key_of(0), key_of(1)]) == [OK] * 2
    assert store(tier, region, [key_of(2)]) == [OK]
    assert not tier.direct_io
    assert len(caplog.records) == 1
    tier.close()


def test_a_failed_write_fails_its_blocks_only_and_frees_their_slots(
    tmp_path, monkeypatch
):
    region = HeapRegion(num_slots=16)
    tier = open_slab(tmp_path, region, max_blocks=4)
    real = os.pwritev
    monkeypatch.setattr(slab_file, "MAX_IOV", 1)

    def broken(fd, views, offset):
        if offset == 2 * region.stride:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", broken)
    keys = [key_of(i) for i in range(4)]
    assert store(tier, region, keys) == [OK, OK, FAIL, OK]
    assert "Input/output error" in tier.take_words()
    assert tier.exists(keys, deadline()) == [True, True, False, True]
    monkeypatch.setattr(os, "pwritev", real)
    assert tier.put([keys[2]], [2], deadline()) == [OK]
    assert tier.take_evicted() == []  # the slot of the failed write was free
    tier.close()


def test_a_pinned_block_is_neither_evicted_nor_overwritten(tmp_path, monkeypatch):
    region = HeapRegion(num_slots=16)
    tier = open_slab(tmp_path, region, max_blocks=2)
    store(tier, region, [key_of(0), key_of(1)])
    real = os.preadv

    def slow(fd, views, offset):  # in the middle of the read of key 0:
        monkeypatch.setattr(os, "preadv", real)
        tier.delete([key_of(0)], deadline())
        # Only key 1's slot may be taken; the second new block finds no room.
        answer = store(tier, region, [key_of(2), key_of(3)], first_slot=2)
        assert answer == [OK, FAIL]
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", slow)
    assert tier.get([key_of(0)], [9], deadline()) == [OK]
    assert region.holds(9, key_of(0))
    assert tier.put([key_of(3)], [3], deadline()) == [OK]  # free after the read
    assert tier.take_evicted() == [key_of(1)]
    tier.close()


def test_rows_of_victims_are_gone_before_their_slots_are_written(tmp_path, monkeypatch):
    region = HeapRegion()
    tier = open_slab(tmp_path, region, max_blocks=4)
    store(tier, region, [key_of(i) for i in range(4)])
    real = os.pwritev
    rows_while_writing = []

    def looking(fd, views, offset):
        index = folder_of(tmp_path, region) / "index.sqlite"
        with contextlib.closing(sqlite3.connect(index)) as db:
            rows = db.execute("SELECT key FROM blocks").fetchall()
        rows_while_writing.append({key for (key,) in rows})
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", looking)
    store(tier, region, [key_of(8), key_of(9)])
    assert rows_while_writing == [{key_of(0), key_of(1)}]
    tier.close()


def test_a_slab_that_was_cut_is_bad_where_it_ends(tmp_path):
    region = HeapRegion()
    tier = open_slab(tmp_path, region)
    keys = [key_of(i) for i in range(3)]
    store(tier, region, keys)
    os.truncate(folder_of(tmp_path, region) / "slab.bin", region.stride + 4096)
    for slot in (8, 9, 10):
        region.smear(slot)
    assert tier.get(keys[:1], [8], deadline()) == [OK]
    assert tier.get(keys[1:], [9, 10], deadline()) == [BAD, BAD]
    tier.close()


def test_a_read_past_its_deadline_is_not_made(tmp_path):
    region = HeapRegion()
    tier = open_slab(tmp_path, region)
    store(tier, region, [key_of(0)])
    assert tier.get([key_of(0)], [9], 0.0) == [FAIL]
    tier.close()
