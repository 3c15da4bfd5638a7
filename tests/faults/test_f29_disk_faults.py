"""F29: a full disk, and disks that refuse otherwise, cost stores and nothing else.

Each refusal's counter and the pace of probes: ``tests/unit/worker/test_tier_faults``.
"""

import os
import resource
import shutil
import threading

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
from executor_kit import Rig
from late_faults_kit import SmallDisk, patched
from worker_kit import TIMEOUT_S, WorkerRig

from shmoffload.engine import Engine
from shmoffload.testing.poll import wait_until
from shmoffload.testing.tier_tests import HeapRegion, key_of
from shmoffload.wire.session import Fault, TierWord
from shmoffload.worker.tiers.fs import FsTier
from shmoffload.worker.tiers.slab import SlabTier

pytestmark = pytest.mark.timeout(300)
# The disk has room when the tier looks; a neighbour is quicker.
QUICK_NEIGHBOUR = """
from shmoffload.worker.tiers.place import Place
Place.free_bytes = lambda _: 1 << 40
"""


def fs_of(path, **more):
    return {"type": "fs", "path": str(path), "max_bytes": "4MiB", "nice": 0, **more}


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


def test_f29_the_third_block_finds_no_room(session_name, tmp_path):
    """256 KiB and blocks of 100,000 bytes: two fit, the third is cut and given up."""
    with (
        SmallDisk(tmp_path / "disk", 256 << 10) as disk,
        WorkerRig(session_name, block_bytes=100_000, **fs_of(disk.folder)) as rig,
    ):
        rig.ready(wrap=patched(disk.patch + QUICK_NEIGHBOUR))
        keys = [key_of(i) for i in range(3)]
        for slot, key in enumerate(keys):
            rig.fill(slot, key)
        failed, words = rig.run(keys, range(3))
        assert failed == [0]  # the last block is stored first
        assert "No space left" in words
        assert rig.run(keys, range(8, 11), load=True)[0] == [0]
        assert all(rig.holds(8 + i, keys[i]) for i in (1, 2))
        store_until_backing_off(rig, 100)
        assert rig.word(TierWord.BACKING_OFF) == Fault.NO_SPACE
        tried = rig.word(Fault.NO_SPACE.word)
        assert tried <= 4
        for i in range(200, 240):  # at full speed; one or two may be probes
            assert store_one(rig, i)[0] == [0]
        assert rig.word(Fault.NO_SPACE.word) <= tried + 2
        assert rig.word(TierWord.RESIDENT_BLOCKS) == 2
        assert list(disk.folder.rglob("*.tmp")) == []
        assert len([p for p in disk.folder.rglob("*0" * 4) if p.is_file()]) == 2
        disk.grow(2 << 20)
        expect_recovery(rig, 0)
        assert rig.run(keys, range(8, 11), load=True) == ([], "")
        assert all(rig.holds(8 + i, key) for i, key in enumerate(keys))


def test_f29_a_neighbour_fills_the_disk_for_a_while(session_name, tmp_path):
    """The tier looks first: it keeps its blocks and leaves the floor alone."""
    floor = tmp_path / "floor"
    floor.write_text("0")
    look = (
        "from shmoffload.worker.tiers.place import Place\n"
        f"Place.free_bytes = lambda _: int(open({str(floor)!r}).read())"
    )
    floor.write_text(str(1 << 20))
    with WorkerRig(session_name, **fs_of(tmp_path / "d", min_free=64 << 10)) as rig:
        rig.ready(wrap=patched(look))
        assert store_one(rig, 0) == ([], "")
        floor.write_text(str(60 << 10))  # nothing of ours can help
        store_until_backing_off(rig, 1)
        assert rig.word(TierWord.BACKING_OFF) == Fault.NO_SPACE
        assert rig.word(Fault.NO_SPACE.word) == rig.word(TierWord.BLOCKS_FAILED)
        assert list(tmp_path.rglob("*.tmp")) == []
        floor.write_text(str(1 << 20))
        expect_recovery(rig, 5000)


@pytest.mark.parametrize("kind", [SlabTier, FsTier])
def test_f29_a_block_that_is_read_is_not_evicted(tmp_path, monkeypatch, kind):
    """Although the tier wants all of its room, twice over."""
    region = HeapRegion(num_slots=32)
    reading, go_on = threading.Event(), threading.Event()
    name = {SlabTier: "preadv", FsTier: "readv"}[kind]
    real = getattr(os, name)

    def slow(*args):
        reading.set()
        assert go_on.wait(TIMEOUT_S)
        return real(*args)

    with Rig(kind(), region, path=tmp_path, max_blocks=4) as rig:
        keys = [key_of(i) for i in range(4)]
        rig.fill(keys)
        assert rig.run(keys, range(4)) == ([], [], "")
        monkeypatch.setattr(os, name, slow)
        job = rig.submit(keys[3:], [20], load=True)
        assert reading.wait(TIMEOUT_S)
        gone = set()
        for i in range(10, 18):
            rig.fill([key_of(i)])
            failed, removed, _ = rig.run([key_of(i)], [0])
            assert failed == []
            gone.update(removed)
            assert rig.tier.usage().num_bytes <= 4 * region.stride
        assert set(keys[:3]) <= gone
        assert keys[3] not in gone
        go_on.set()
        assert rig.answer(job).failed_idx == b""
        assert rig.region.holds(20, keys[3])


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
