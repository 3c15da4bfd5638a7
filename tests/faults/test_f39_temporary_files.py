"""F39: a killed writer's temporary files go, a living one's stay, however old."""

import os
import signal
import subprocess

import pytest
from late_faults_kit import patched
from worker_kit import WorkerRig

from shmoffload.testing.tier_tests import key_of
from shmoffload.wire.session import TierWord
from shmoffload.worker.tiers import fs

pytestmark = pytest.mark.timeout(300)
NUM_KILLS = 25
# Between close and rename, at the second block of a job.
DIES = """
from shmoffload.worker.tiers.fs import FsTier
real, turns = FsTier._give_name, []
def give_name(self, temp, key):
    turns.append(key)
    if len(turns) == 2:
        die()
    return real(self, temp, key)
FsTier._give_name = give_name
"""


@pytest.fixture
def rig(session_name, tmp_path):
    tier = {"type": "fs", "path": str(tmp_path), "max_bytes": "4MiB", "nice": 0}
    with WorkerRig(session_name, **tier) as made:
        yield made


def end(rig):
    rig.process.kill()
    rig.process.wait()
    rig.channel.close()


def temps_in(folder):
    return sorted(path.name for path in folder.iterdir() if ".tmp" in path.name)


def test_f39_writers_killed_between_close_and_rename(rig, tmp_path):
    folder = tmp_path / rig.region.namespace.hex()
    stored = []
    for turn in range(NUM_KILLS):
        rig.ready(wrap=patched(DIES))
        assert temps_in(folder) == []  # the last one's is gone already
        assert rig.word(TierWord.RESIDENT_BLOCKS) == turn
        keys = [key_of(2 * turn), key_of(2 * turn + 1)]
        for slot, key in enumerate(keys):
            rig.fill(slot, key)
        rig.submit(keys, [0, 1])
        assert rig.exit_code() == -signal.SIGKILL
        (temp,) = temps_in(folder)
        assert temp.startswith(f".{rig.process.pid}-")
        rig.channel.close()
        stored.append(keys[1])  # the last block is written first
    written = rig.word(TierWord.BLOCKS_WRITTEN)
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*0" * 4)}
    rig.ready()
    assert temps_in(folder) == []
    assert rig.run(stored, range(NUM_KILLS), load=True) == ([], "")
    assert all(rig.holds(i, key) for i, key in enumerate(stored))
    for slot, key in enumerate(stored):
        rig.fill(slot, key)
    assert rig.run(stored, range(NUM_KILLS)) == ([], "")
    assert rig.word(TierWord.BLOCKS_WRITTEN) == written  # nothing is written again
    assert rig.word(TierWord.BLOCKS_SKIPPED) == NUM_KILLS
    assert times == {path: path.stat().st_mtime_ns for path in times}


def test_f39_only_temporary_files_of_the_dead_go(rig, tmp_path):
    """Fresh or stalled for a year: the owner counts. Links lead nowhere."""
    rig.ready()
    rig.fill(0, key_of(0))
    assert rig.run([key_of(0)], [0]) == ([], "")
    end(rig)
    folder = tmp_path / rig.region.namespace.hex()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    with subprocess.Popen(["sleep", "600"]) as living:
        try:
            started = fs._start_time(living.pid)
            kept = {
                "fresh": f".{living.pid}-{started}-1.tmp",
                "stalled": f".{living.pid}-{started}-2.tmp",
                "foreign": "upload.tmp",
                "foreign and hidden": ".upload-1-2.tmp",
            }
            gone = {
                "its pid is another's now": f".{living.pid}-{started - 1}-1.tmp",
                "of the dead": f".{rig.process.pid}-1-1.tmp",
            }
            for name in (*kept.values(), *gone.values()):
                (folder / name).write_bytes(b"half a block")
            for name in (kept["stalled"], gone["of the dead"]):
                os.utime(folder / name, (1, 1))
            link = folder / f".{rig.process.pid}-1-9.tmp"
            link.symlink_to(victim)
            rig.ready()
            assert temps_in(folder) == sorted(kept.values())
            assert not link.is_symlink()
            assert victim.read_text() == "precious"
            assert rig.run([key_of(0)], [1], load=True) == ([], "")
            end(rig)
        finally:
            living.kill()
    rig.ready()  # now it is dead, too
    assert temps_in(folder) == sorted(
        name for what, name in kept.items() if "foreign" in what
    )


def test_f39_a_live_worker_of_another_namespace_is_left_alone(
    rig, session_name, tmp_path
):
    """Two models on one path: each in its own directory, behind its own lock."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    waits = f"""
from shmoffload.worker.tiers.fs import FsTier
real = FsTier._give_name
def give_name(self, temp, key):
    open({str(gate)!r}).read()  # until the test opens it
    return real(self, temp, key)
FsTier._give_name = give_name
"""
    tier = {"type": "fs", "path": str(tmp_path), "max_bytes": "4MiB", "nice": 0}
    with WorkerRig(f"{session_name}-other", namespace="other", **tier) as other:
        other.ready(wrap=patched(waits))
        other.fill(0, key_of(0))
        job = other.submit([key_of(0)], [0])
        folder = tmp_path / other.region.namespace.hex()
        with gate.open("w") as opened:  # it has got so far
            (temp,) = temps_in(folder)
            rig.ready()
            rig.fill(0, key_of(0))
            assert rig.run([key_of(0)], [0]) == ([], "")
            assert temps_in(folder) == [temp]
            opened.write("go")
        assert other.answer(job).failed_idx == b""
        assert temps_in(folder) == []
        assert other.run([key_of(0)], [1], load=True) == ([], "")
