"""F29, F21 with a real worker: limits said, refusals counted, storage taken away."""

import os
import resource
import shutil
import subprocess

import pytest
from engine_kit import (
    drop_primary,
    keys_of,
    load,
    make_config,
    request,
    slab,
    step,
    store,
)
from worker_kit import TIMEOUT_S, WorkerRig

from shmoffload.engine import Engine
from shmoffload.testing.poll import wait_until
from shmoffload.testing.tier_tests import key_of
from shmoffload.wire.session import Fault, TierWord


def fs_of(path, **more):
    return {"type": "fs", "path": str(path), "max_bytes": "4MiB", **more}


def store_one(rig, i):
    rig.fill(i % 8, key_of(i))
    return rig.run([key_of(i)], [i % 8])


def store_until_backing_off(rig, first):
    keys = iter(range(first, first + 1000))
    wait_until(
        lambda: store_one(rig, next(keys)) and rig.word(TierWord.BACKING_OFF),
        timeout_s=TIMEOUT_S,
        what="the breaker",
    )


def expect_recovery(rig, i):
    wait_until(
        lambda: store_one(rig, i)[0] == [], timeout_s=TIMEOUT_S, what="a good store"
    )
    assert rig.word(TierWord.BACKING_OFF) == 0
    assert rig.run([key_of(i)], [20], load=True) == ([], "")
    assert rig.holds(20, key_of(i))


def test_effective_limits_are_said_at_start(session_name, tmp_path, capfd):
    with WorkerRig(session_name, **fs_of(tmp_path, min_free="1MiB")) as rig:
        rig.ready()
    said = capfd.readouterr().err
    assert said.splitlines() == [
        f"shmoffload: tier fs: at most 512 files, 4 MiB, 1 MiB are kept free in "
        f"{tmp_path}"
    ]


def test_f29_out_of_file_descriptors_and_back(session_name, tmp_path):
    with WorkerRig(session_name, **fs_of(tmp_path)) as rig:
        rig.ready()
        assert store_one(rig, 0) == ([], "")
        pid = rig.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        # Lower than what it has open: every further open says EMFILE.
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
        failed, words = store_one(rig, 1)
        assert (failed, "Too many open files" in words) == ([0], True)
        assert rig.run([key_of(0)], [9], load=True)[0] == [0]
        rig.wait_for(Fault.NO_FILES.word, 2)
        assert rig.word(TierWord.BLOCKS_MISSED) == rig.word(TierWord.BLOCKS_BAD) == 0
        store_until_backing_off(rig, 2)
        assert rig.word(TierWord.BACKING_OFF) == Fault.NO_FILES
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        assert rig.run([key_of(0)], [9], load=True) == ([], "")
        assert rig.holds(9, key_of(0))
        expect_recovery(rig, 5000)


def test_f29_a_disk_that_is_full_for_a_while(session_name, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256K", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this user may not mount")
    try:
        # The floor is above what the neighbour leaves: nothing of ours can help.
        with WorkerRig(session_name, **fs_of(disk, min_free=64 << 10)) as rig:
            rig.ready()
            assert store_one(rig, 0) == ([], "")
            (disk / "neighbour").write_bytes(b"x" * (200 << 10))
            store_until_backing_off(rig, 1)
            assert rig.word(TierWord.BACKING_OFF) == Fault.NO_SPACE
            assert rig.word(Fault.NO_SPACE.word) == rig.word(TierWord.BLOCKS_FAILED)
            assert list(disk.rglob("*.tmp")) == []
            (disk / "neighbour").unlink()
            expect_recovery(rig, 5000)
    finally:
        wait_until(
            lambda: subprocess.run(["umount", str(disk)]).returncode == 0,
            timeout_s=10,
            what="the unmount",
        )


@pytest.mark.parametrize("kind", ["slab", "fs"])
def test_storage_that_was_removed_ends_the_worker_in_words(
    session_name, tmp_path, kind, capfd
):
    tier = {**fs_of(tmp_path / "d"), "type": kind}
    with WorkerRig(session_name, **tier) as rig:
        rig.ready()
        assert store_one(rig, 0) == ([], "")
        shutil.rmtree(tmp_path / "d")
        rig.fill(1, key_of(1))
        rig.submit([key_of(1)], [1])
        assert rig.exit_code() == 1
        assert "was removed while tier" in capfd.readouterr().err.splitlines()[-1]
        rig.channel.close()
        rig.ready()
        assert store_one(rig, 1) == ([], "")


@pytest.mark.parametrize("kind", ["slab", "fs"])
def test_an_engine_gets_over_a_removed_directory(session_name, tmp_path, kind):
    """Requests go on, the other tier is untouched, the tier is back, empty."""
    gone = {"type": kind, "name": "gone", "path": str(tmp_path / "d")}
    tiers = [{**gone, "max_bytes": "8MiB", "min_free": 0}, slab(tmp_path / "other")]
    with Engine(make_config(session_name, tiers)) as engine:

        def word(tier_idx, which):
            return engine.page.get_tier(tier_idx, which)

        keys = keys_of(0, 8)
        store(engine, request(engine, "a"), keys)
        assert engine.wait_idle(30)
        other = [word(1, TierWord.WORKER_PID), word(1, TierWord.WORKER_EPOCH)]
        epoch = word(0, TierWord.WORKER_EPOCH)
        shutil.rmtree(tmp_path / "d")
        store(engine, request(engine, "b"), keys_of(8, 2))  # the next store finds out

        def is_back():
            step(engine)
            is_up = word(0, TierWord.ENGINE_TIER_UP)
            return is_up and word(0, TierWord.WORKER_EPOCH) > epoch

        wait_until(is_back, timeout_s=30, what="the next worker")
        assert engine.wait_idle(30)
        assert word(0, TierWord.RESIDENT_BLOCKS) == 0
        new = keys_of(20, 4)
        store(engine, request(engine, "c"), new)
        assert engine.wait_idle(30)
        assert word(0, TierWord.RESIDENT_BLOCKS) == 4
        drop_primary(engine)
        assert load(engine, request(engine, "d"), keys) == 8  # the other tier's
        assert load(engine, request(engine, "e"), new) == 4
        now = [word(1, TierWord.WORKER_PID), word(1, TierWord.WORKER_EPOCH)]
        assert now == other
