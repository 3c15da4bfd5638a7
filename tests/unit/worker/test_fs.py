"""The fs tier's own promises: temporary files, bounds, files that are not right."""

import errno
import os
import stat
import subprocess

import pytest

from shmoffload.errors import TierConfigError
from shmoffload.testing.poll import wait_until
from shmoffload.testing.tier_tests import HeapRegion, deadline, key_of
from shmoffload.wire.config import TierConfig
from shmoffload.worker.tier import BlockStatus
from shmoffload.worker.tiers import fs as fs_module
from shmoffload.worker.tiers.fs import FsTier

OK, MISS, BAD, FAIL = BlockStatus


def open_fs(path, region, *, max_blocks=16, min_free=0):
    bound = None if max_blocks is None else max_blocks * region.stride
    tier = FsTier()
    config = TierConfig(
        type="fs", name="f", path=str(path), max_bytes=bound, min_free=min_free
    )
    tier.open(config, region, region.namespace)
    return tier


def store(tier, region, keys):
    for i, key in enumerate(keys):
        region.fill(i, key)
    return tier.put(keys, range(len(keys)), deadline())


def file_of(path, region, key):
    name = key.hex()
    return path / region.namespace.hex() / name[:2] / name


def temps_in(path):
    return sorted(p.name for p in path.rglob("*.tmp"))


def test_a_block_is_one_private_file_of_one_stride(tmp_path):
    region = HeapRegion()
    tier = open_fs(tmp_path, region)
    store(tier, region, [key_of(0)])
    status = file_of(tmp_path, region, key_of(0)).stat()
    assert status.st_size == region.stride
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert temps_in(tmp_path) == []
    tier.close()


def test_only_temporary_files_of_dead_writers_go(tmp_path):
    region = HeapRegion()
    tier = open_fs(tmp_path, region)
    store(tier, region, [key_of(0)])
    tier.close()
    folder = tmp_path / region.namespace.hex()
    dead = subprocess.Popen(["sleep", "60"])
    started = fs_module._start_time(dead.pid)
    dead.kill()
    dead.wait()
    ours = fs_module._start_time(os.getpid())
    names = {
        "dead": f".{dead.pid}-{started}-1.tmp",
        "pid was reused": f".{os.getpid()}-{ours - 1}-1.tmp",
        "alive": f".{os.getpid()}-{ours}-77.tmp",
        "foreign": "download.tmp",
    }
    for name in names.values():
        (folder / name).write_text("x")
    target = tmp_path / "victim"
    target.write_text("precious")
    (folder / f".{dead.pid}-{started}-2.tmp").symlink_to(target)
    tier = open_fs(tmp_path, region)
    assert temps_in(tmp_path) == sorted([names["alive"], names["foreign"]])
    assert target.read_text() == "precious"
    assert list(tier.resident()) == [key_of(0)]
    tier.close()


def test_a_file_of_another_length_is_bad_and_an_error_leaves_it(tmp_path, monkeypatch):
    region = HeapRegion()
    keys = [key_of(i) for i in range(3)]
    tier = open_fs(tmp_path, region)
    store(tier, region, keys)
    short, longer, fine = (file_of(tmp_path, region, key) for key in keys)
    os.truncate(short, 100)
    with longer.open("ab") as file:
        file.write(b"\0" * 4096)
    assert tier.get(keys, [8, 9, 10], deadline()) == [BAD, BAD, OK]
    tier.delete(keys[:2], deadline())
    assert not short.exists()
    real = os.readv

    def broken(fd, views):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "readv", broken)
    assert tier.get([keys[2]], [8], deadline()) == [FAIL]
    assert "Input/output error" in tier.take_words()
    monkeypatch.setattr(os, "readv", real)
    assert fine.exists()
    assert tier.get([keys[2]], [8], deadline()) == [OK]
    tier.close()


def test_a_file_that_vanished_or_became_a_symlink_is_no_data(tmp_path):
    region = HeapRegion()
    keys = [key_of(0), key_of(1)]
    tier = open_fs(tmp_path, region)
    store(tier, region, keys)
    paths = [file_of(tmp_path, region, key) for key in keys]
    paths[0].unlink()
    moved = tmp_path / "moved"
    paths[1].rename(moved)
    paths[1].symlink_to(moved)
    assert tier.get(keys, [8, 9], deadline()) == [MISS, BAD]
    assert tier.exists([keys[0]], deadline()) == [False]
    tier.close()


def test_foreign_files_are_neither_counted_nor_touched(tmp_path):
    region = HeapRegion()
    tier = open_fs(tmp_path, region)
    store(tier, region, [key_of(0)])
    tier.close()
    there = file_of(tmp_path, region, key_of(0)).parent
    (there / "README").write_text("mine")
    (there / "ab").write_text("too short for a key")
    tier = open_fs(tmp_path, region, max_blocks=1)
    assert list(tier.resident()) == [key_of(0)]
    store(tier, region, [key_of(1)])
    assert (there / "README").exists()
    assert (there / "ab").exists()
    tier.close()


def test_a_lower_bound_removes_the_oldest_files_at_open(tmp_path):
    region = HeapRegion()
    keys = [key_of(i) for i in range(4)]
    tier = open_fs(tmp_path, region)
    store(tier, region, keys)
    for i, key in enumerate(keys):
        os.utime(file_of(tmp_path, region, key), ns=(0, 10**9 * (10 - i)))
    tier.close()
    tier = open_fs(tmp_path, region, max_blocks=2)
    assert list(tier.resident()) == [keys[1], keys[0]]
    assert not file_of(tmp_path, region, keys[3]).exists()
    tier.close()


def test_the_temporary_file_counts_against_the_bound(tmp_path, monkeypatch):
    region = HeapRegion()
    tier = open_fs(tmp_path, region, max_blocks=2)
    store(tier, region, [key_of(0), key_of(1)])
    most = []
    real = os.rename

    def looking(*args, **kwargs):
        folder = tmp_path / region.namespace.hex()
        files = [p for p in folder.rglob("*") if p.is_file() and p.name != "lock"]
        most.append(len(files))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, "rename", looking)
    store(tier, region, [key_of(2)])
    assert most == [2]
    tier.close()


def test_the_floor_of_free_space_refuses_in_words(tmp_path):
    region = HeapRegion()
    tier = open_fs(tmp_path, region, min_free="4000TiB")
    assert store(tier, region, [key_of(0)]) == [FAIL]
    assert "min_free" in tier.take_words()
    tier.close()


def test_a_full_disk_leaves_no_part_of_a_block(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256K", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this machine does not let root mount")
    try:
        region = HeapRegion(block_bytes=100_000)
        tier = open_fs(small, region, max_blocks=100)
        assert store(tier, region, [key_of(i) for i in range(3)])[:1] == [OK]
        # 256 KiB minus 256 directories' pages hold at most two strides.
        there = [key_of(i) for i in range(3) if tier.exists([key_of(i)], 0.0)[0]]
        assert 1 <= len(there) <= 2
        assert "No space left" in tier.take_words() or len(there) == 2
        assert temps_in(small) == []
        assert tier.get(there, range(8, 8 + len(there)), deadline())[0] is OK
        assert region.holds(8, there[0])
        tier.delete(there, deadline())
        assert store(tier, region, [key_of(7)]) == [OK]
        tier.close()
    finally:
        wait_until(
            lambda: subprocess.run(["umount", str(small)]).returncode == 0,
            timeout_s=10,
            what="the unmount",
        )


def test_two_writers_of_one_folder_are_refused(tmp_path, monkeypatch):
    region = HeapRegion()
    tier = open_fs(tmp_path, region)
    monkeypatch.setattr(fs_module.take_place, "__kwdefaults__", {"timeout_s": 0.1})
    with pytest.raises(TierConfigError, match="in use by another worker"):
        open_fs(tmp_path, region)
    tier.close()
