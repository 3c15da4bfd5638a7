"""What the slab holds after restarts, kills, damage, resizes and full disks."""

import contextlib
import errno
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from slab_kit import FAIL, OK, folder_of, open_slab, store

from shmoffload.errors import TierConfigError, TierError
from shmoffload.testing.poll import wait_until
from shmoffload.testing.tier_tests import HeapRegion, deadline, key_of
from shmoffload.worker.tiers import place as place_module
from shmoffload.worker.tiers import slab_index


def test_order_of_use_survives_an_orderly_end(tmp_path):
    region = HeapRegion()
    keys = [key_of(i) for i in range(4)]
    tier = open_slab(tmp_path, region, max_blocks=4)
    store(tier, region, keys)
    tier.exists([keys[3]], deadline())
    tier.close()
    tier = open_slab(tmp_path, region, max_blocks=4)
    store(tier, region, [key_of(9)])
    assert tier.take_evicted() == [keys[2]]
    tier.close()


def test_an_existing_slab_keeps_its_size_and_a_new_bound_resizes_it(tmp_path):
    region = HeapRegion()
    keys = [key_of(i) for i in range(8)]
    tier = open_slab(tmp_path, region, max_blocks=8)
    store(tier, region, keys)
    tier.close()
    tier = open_slab(tmp_path, region, max_blocks=None)
    assert len(tier.resident()) == 8
    tier.close()
    size = (folder_of(tmp_path, region) / "slab.bin").stat().st_size
    assert size == 8 * region.stride
    tier = open_slab(tmp_path, region, max_blocks=5)
    left = tier.resident()
    assert len(left) == 5
    assert tier.get(left, range(8, 13), deadline()) == [OK] * 5
    assert all(region.holds(8 + i, key) for i, key in enumerate(left))
    tier.close()
    tier = open_slab(tmp_path, region, max_blocks=10)
    assert sorted(tier.resident()) == sorted(left)
    assert store(tier, region, [key_of(20 + i) for i in range(5)]) == [OK] * 5
    assert tier.take_evicted() == []
    tier.close()


def garble(path):
    data = bytearray(path.read_bytes())
    for at in range(100, len(data), 7):
        data[at] ^= 0x5A
    path.write_bytes(data)


def change(index, statement, *values):
    with contextlib.closing(sqlite3.connect(index)) as db, db:
        db.execute(statement, values)


DAMAGE = {
    "garbled": garble,
    "cut": lambda index: os.truncate(index, 5000),
    "no database": lambda index: index.write_bytes(b"hello" * 1000),
    "empty": lambda index: index.write_bytes(b""),
    "removed": lambda index: index.unlink(),
    "foreign layout": lambda index: change(
        index, "UPDATE meta SET value = 99 WHERE name = 'layout'"
    ),
    "a trigger": lambda index: change(
        index,
        "CREATE TRIGGER t BEFORE INSERT ON blocks BEGIN SELECT RAISE(ABORT, 'no'); END",
    ),
    "no table": lambda index: change(index, "DROP TABLE blocks"),
    "no order": lambda index: change(index, "UPDATE blocks SET seq = NULL"),
    "endless order": lambda index: change(
        index, "UPDATE blocks SET seq = 9223372036854775807"
    ),
    "a row outside": lambda index: change(
        index, "INSERT INTO blocks VALUES (7777, ?, 1)", key_of(77)
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_index_is_made_again_from_the_slab(tmp_path, damage, caplog):
    region = HeapRegion()
    keys = [key_of(i) for i in range(6)]
    tier = open_slab(tmp_path, region)
    store(tier, region, keys)
    tier.close()
    index = folder_of(tmp_path, region) / "index.sqlite"
    DAMAGE[damage](index)
    tier = open_slab(tmp_path, region)
    assert sorted(tier.resident()) == sorted(keys)
    assert tier.get(keys, range(8, 14), deadline()) == [OK] * 6
    assert all(region.holds(8 + i, key) for i, key in enumerate(keys))
    assert len(caplog.records) == 1
    assert store(tier, region, [key_of(9)]) == [OK]
    tier.close()


def test_who_dies_while_the_index_is_made_again_loses_nothing(tmp_path, monkeypatch):
    region = HeapRegion()
    keys = [key_of(i) for i in range(6)]
    tier = open_slab(tmp_path, region)
    store(tier, region, keys)
    tier.close()
    (folder_of(tmp_path, region) / "index.sqlite").unlink()

    def die(self, added):
        raise sqlite3.OperationalError("SIGKILL between the tables and their rows")

    with monkeypatch.context() as patch:
        patch.setattr(slab_index.SlabIndex, "_insert", die)
        with pytest.raises(TierError, match="cannot be made"):
            open_slab(tmp_path, region)
    tier = open_slab(tmp_path, region)
    assert sorted(tier.resident()) == sorted(keys)
    tier.close()


@pytest.mark.parametrize("num_left", [0, 3])
def test_rows_of_a_slab_that_was_cut_are_forgotten(tmp_path, num_left):
    region = HeapRegion()
    keys = [key_of(i) for i in range(6)]
    tier = open_slab(tmp_path, region)
    store(tier, region, keys)
    tier.close()
    slab = folder_of(tmp_path, region) / "slab.bin"
    os.truncate(slab, num_left * region.stride)
    tier = open_slab(tmp_path, region)
    assert sorted(tier.resident()) == sorted(keys[:num_left])
    assert store(tier, region, keys) == [OK] * 6
    tier.close()


WRITER = """
import sys
from shmoffload.testing.tier_tests import HeapRegion, deadline, key_of
from shmoffload.wire.config import TierConfig
from shmoffload.worker.tiers.slab import SlabTier
region = HeapRegion()
tier = SlabTier()
tier.open(
    TierConfig(type="slab", name="s", path=sys.argv[1],
               max_bytes=24 * region.stride, min_free=0),
    region, region.namespace)
i = int(sys.argv[2])
while True:
    keys = [key_of(i + n) for n in range(5)]
    for slot, key in enumerate(keys):
        region.fill(slot, key)
    assert not any(tier.put(keys, range(5), deadline()))
    print(i, flush=True)
    i += 5
"""


def test_sigkill_at_any_moment_leaves_right_blocks_and_all_finished_ones(tmp_path):
    region = HeapRegion(num_slots=24)
    start = 0
    for turn in range(12):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(start)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            for _ in range(1 + turn * 3):  # a different moment of life each time
                last = int(writer.stdout.readline())
        finally:
            writer.send_signal(signal.SIGKILL)
            rest = writer.stdout.read().split()
            writer.wait()
            writer.stdout.close()
        last = int(rest[-1]) if rest and rest[-1].isdigit() else last
        start = last + 5
        tier = open_slab(tmp_path, region, max_blocks=24)
        found = tier.resident()
        assert tier.get(found, range(len(found)), deadline()) == [OK] * len(found)
        wrong = [key for i, key in enumerate(found) if not region.holds(i, key)]
        assert not wrong
        # One put after the last acknowledged one may have evicted five: the four
        # that were left of an old put, and the tail of the oldest whole one.
        newest = [i for i in range(last + 5 - 20, last + 5) if i != last + 5 - 16]
        there = tier.exists([key_of(i) for i in newest if i >= 0], deadline())
        assert all(there)
        tier.close()


# What the disk and others may do ----------------------------------------------------


def test_a_slab_in_use_is_refused_by_name(tmp_path, monkeypatch):
    region = HeapRegion()
    monkeypatch.setattr(place_module.take_place, "__kwdefaults__", {"timeout_s": 0.1})
    tier = open_slab(tmp_path, region)
    with pytest.raises(TierConfigError, match=rf"in use .*process {os.getpid()}\)"):
        open_slab(tmp_path, region)
    tier.close()
    open_slab(tmp_path, region).close()


def test_a_dying_predecessor_is_waited_for(tmp_path):
    region = HeapRegion()
    tier = open_slab(tmp_path, region)
    holder = os.dup(tier._place._lock_fd)
    tier.close()
    child = subprocess.Popen(["sleep", "0.5"], pass_fds=(holder,))
    os.close(holder)  # now only the child holds the lock
    open_slab(tmp_path, region).close()
    child.wait()


@pytest.mark.parametrize("name", ["slab.bin", "index.sqlite", "lock"])
def test_a_planted_symlink_is_refused_and_not_followed(tmp_path, name):
    region = HeapRegion()
    folder = folder_of(tmp_path, region)
    folder.mkdir(mode=0o700)
    target = tmp_path / "victim"
    target.write_text("precious")
    (folder / name).symlink_to(target)
    with pytest.raises(TierConfigError, match="not a plain file"):
        open_slab(tmp_path, region)
    assert target.read_text() == "precious"


def test_a_symlink_as_folder_and_a_file_as_path_are_refused(tmp_path):
    region = HeapRegion()
    folder_of(tmp_path, region).symlink_to(tmp_path)
    with pytest.raises(TierConfigError, match="cannot be used"):
        open_slab(tmp_path, region)
    (tmp_path / "file").write_text("")
    with pytest.raises(TierConfigError, match="give path a directory"):
        open_slab(tmp_path / "file", region)


def test_no_room_is_said_with_numbers_and_keys(tmp_path):
    region = HeapRegion()
    with pytest.raises(TierConfigError, match=r"needs .* are free .* min_free"):
        open_slab(tmp_path, region, min_free="4000TiB")
    with pytest.raises(TierConfigError, match="set max_bytes"):
        open_slab(tmp_path, region, max_blocks=None, min_free="4000TiB")
    assert (folder_of(tmp_path, region) / "slab.bin").stat().st_size == 0


def test_allocation_failure_leaves_the_size_and_says_what_to_type(
    tmp_path, monkeypatch
):
    region = HeapRegion()
    open_slab(tmp_path, region, max_blocks=2).close()

    def full(fd, offset, length):
        os.ftruncate(fd, length)  # ext4 leaves the file longer, partly allocated
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TierConfigError, match="lower max_bytes"):
        open_slab(tmp_path, region, max_blocks=8)
    size = (folder_of(tmp_path, region) / "slab.bin").stat().st_size
    assert size == 2 * region.stride


@pytest.fixture
def small_tmpfs(tmp_path):
    """Yield a 1 MiB file system; needs root."""
    where = tmp_path / "small"
    where.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(where)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this machine does not let root mount")
    yield where
    wait_until(
        lambda: (
            subprocess.run(["umount", str(where)], capture_output=True).returncode == 0
        ),
        timeout_s=10,
        what="the unmount",
    )


def test_a_full_file_system_is_refused_and_a_fitting_slab_works(small_tmpfs):
    region = HeapRegion()
    with pytest.raises(TierConfigError, match="lower max_bytes"):
        open_slab(small_tmpfs, region, max_blocks=200)
    tier = open_slab(small_tmpfs, region, max_blocks=20)
    assert store(tier, region, [key_of(0)]) == [OK]
    assert tier.get([key_of(0)], [9], deadline()) == [OK]
    assert region.holds(9, key_of(0))
    tier.close()


def test_the_default_bound_leaves_half_of_the_free_space(small_tmpfs):
    region = HeapRegion()
    tier = open_slab(small_tmpfs, region, max_blocks=None)
    slab = next(Path(small_tmpfs).glob("*/slab.bin"))
    assert 20 * region.stride < slab.stat().st_size <= 512 * 1024
    tier.close()


def test_an_index_that_refuses_fails_the_put_and_keeps_the_promise(
    tmp_path, monkeypatch
):
    region = HeapRegion()
    tier = open_slab(tmp_path, region, max_blocks=2)
    store(tier, region, [key_of(0)])
    real = tier._index.commit

    def refuse(*args, **kwargs):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(tier._index, "commit", refuse)
    assert store(tier, region, [key_of(1)]) == [FAIL]
    assert "disk is full" in tier.take_words()
    assert tier.exists([key_of(0), key_of(1)], deadline()) == [True, False]
    monkeypatch.setattr(tier._index, "commit", real)
    assert store(tier, region, [key_of(1)]) == [OK]
    assert tier.take_evicted() == []
    tier.close()
