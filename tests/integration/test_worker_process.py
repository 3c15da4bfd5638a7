"""One real worker process: its first words, its answers, its ends."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from worker_kit import TIMEOUT_S, WORKER_EPOCH, WorkerRig

from shmoffload.testing.poll import wait_until
from shmoffload.testing.tier_tests import key_of
from shmoffload.wire.messages import JobDone
from shmoffload.wire.session import TierWord


@pytest.fixture
def rig(session_name, tmp_path):
    slab = {"type": "slab", "path": str(tmp_path), "max_bytes": "4MiB"}
    with WorkerRig(session_name, **slab) as made:
        yield made


def test_store_restart_load(rig):
    keys = [key_of(i) for i in range(10)]
    rig.start()
    hello = rig.hello()
    assert (hello.worker_epoch, hello.error, hello.num_resident) == (
        WORKER_EPOCH,
        "",
        0,
    )
    assert hello.limits == "512 blocks, 4 MiB"
    assert hello.capacity_bytes == 4 << 20
    assert rig.resident() == []
    assert rig.word(TierWord.WORKER_READY) == WORKER_EPOCH
    for slot, key in enumerate(keys):
        rig.fill(slot, key)
    assert rig.run(keys, range(10)) == ([], "")
    rig.process.terminate()
    assert rig.exit_code() == 0
    rig.channel.close()

    rig.start()
    assert rig.hello().num_resident == 10
    assert sorted(rig.resident()) == sorted(keys)
    assert rig.run(keys, range(20, 30), load=True) == ([], "")
    assert all(rig.holds(20 + i, key) for i, key in enumerate(keys))
    assert rig.word(TierWord.BLOCKS_WRITTEN) == rig.word(TierWord.BLOCKS_READ) == 10
    assert rig.word(TierWord.USED_BYTES) == 10 * rig.region.stride
    rig.wait_for(TierWord.COMPLETIONS, 2 + 1 + 2 + 1)


def test_title_priority_region_map_and_heartbeat(rig, session_name):
    rig.ready()
    proc = Path(f"/proc/{rig.process.pid}")
    title = proc.joinpath("cmdline").read_bytes().rstrip(b"\0").decode()
    assert title == f"shmoffload: {session_name} slab"
    assert os.getpriority(os.PRIO_PROCESS, rig.process.pid) == 10
    maps = proc.joinpath("maps").read_text()
    assert f"shmoffload.{session_name}.region" in maps
    assert f"shmoffload.{session_name}.page" in maps
    beat = rig.word(TierWord.HEARTBEAT_NS)
    assert abs(time.monotonic_ns() - beat) < TIMEOUT_S * 10**9
    wait_until(
        lambda: rig.word(TierWord.HEARTBEAT_NS) > beat,
        timeout_s=TIMEOUT_S,
        what="a heartbeat",
    )


def test_garbage_is_counted_and_the_worker_lives(rig):
    rig.ready()
    rng = random.Random(5)
    for size in (1, 2, 7, 100, 40_000):
        rig.send(rng.randbytes(size))
    rig.send(b"\x91\x92\xa1Z\x01")  # an unknown tag
    rig.send(b"\x91\xda\xff\xff")  # a length that is not there
    rig.submit([key_of(0)], [0], epoch=WORKER_EPOCH + 1)
    rig.wait_for(TierWord.GARBAGE_FRAMES, 8)
    rig.fill(1, key_of(1))
    assert rig.run([key_of(1)], [1]) == ([], "")
    assert len(rig.said(JobDone)) == 1


def test_slots_and_keys_out_of_bounds_are_refused_untouched(rig):
    rig.ready()
    key = key_of(0)
    rig.fill(0, key)
    assert rig.run([key], [0]) == ([], "")
    before = bytes(rig.region.stride_view(63))
    for load in (False, True):
        for slots in ([64], [-1], [2**31 - 1], [-(2**31)]):
            failed, error = rig.run([key], slots, load=load)
            assert failed == [0]
            assert "outside" in error
    failed, error = rig.run([b"tiny"], [0])
    assert (failed, "bytes" in error) == ([0], True)
    assert bytes(rig.region.stride_view(63)) == before
    assert rig.run([key], [5], load=True) == ([], "")


def test_a_job_of_8192_keys_comes_in_parts_and_is_answered_once(session_name, tmp_path):
    num = 8192
    slab = {"type": "slab", "path": str(tmp_path), "max_bytes": "80MiB"}
    with WorkerRig(session_name, slots=num, **slab) as rig:
        rig.ready()
        keys = [key_of(i) for i in range(num)]
        for slot in (0, 999, 1000, 5000, num - 1):
            rig.fill(slot, keys[slot])
        assert rig.run(keys, range(num)) == ([], "")
        assert rig.word(TierWord.BLOCKS_WRITTEN) == num
        for slot in (0, 999, 1000, 5000, num - 1):
            rig.region.stride_view(slot)[:] = b"\1" * rig.region.stride
        assert rig.run(keys, range(num), load=True) == ([], "")
        assert all(rig.holds(s, keys[s]) for s in (0, 999, 1000, 5000, num - 1))
        rig.wait_for(TierWord.QUEUE_KEYS, 2 * num)
        sent = rig.word(TierWord.QUEUE_BYTES_IN) + rig.word(TierWord.QUEUE_BYTES_OUT)
        assert sent < 100 * 2 * num  # no block travels through a queue
        missing = [key_of(i, "other") for i in range(num)]
        failed, _ = rig.run(missing, range(num), load=True)
        assert failed == list(range(num))


def test_the_end_of_the_engine_ends_the_worker_at_once(rig):
    rig.ready()
    rig.channel.close()
    started_s = time.monotonic()
    assert rig.exit_code() == 0
    assert time.monotonic() - started_s < 10


def test_sigterm_answers_everything_and_leaves(rig):
    rig.ready()
    keys = [key_of(i) for i in range(30)]
    for slot, key in enumerate(keys):
        rig.fill(slot, key)
    ids = [rig.submit([key], [slot]) for slot, key in enumerate(keys)]
    rig.answer(ids[0])
    rig.process.terminate()
    answers = [rig.answer(job_id) for job_id in ids]
    assert rig.exit_code() == 0
    stored = [i for i, answer in enumerate(answers) if not answer.failed_idx]
    rig.channel.close()
    rig.start()
    assert sorted(rig.resident()) == sorted(keys[i] for i in stored)


def test_the_worker_dies_with_its_parent(rig):
    parent = (
        "import subprocess, sys, os\n"
        "fds = [int(a.rpartition('=')[2]) for a in sys.argv[1:] if '-fd=' in a]\n"
        "child = subprocess.Popen(sys.argv[1:], pass_fds=fds)\n"
        "print(child.pid, file=open(os.environ['PID_FILE'], 'w'), flush=True)\n"
        "child.wait()\n"
    )
    pid_file = Path(rig.config.tier[0].path) / "pid"
    os.environ["PID_FILE"] = str(pid_file)
    try:
        rig.ready(wrap=lambda command: [sys.executable, "-c", parent, *command])
    finally:
        del os.environ["PID_FILE"]
    pid = int(pid_file.read_text())
    pidfd = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGSTOP)  # it cannot look for itself
        rig.process.send_signal(signal.SIGKILL)
        rig.process.wait()
        wait_until(lambda: not is_running(pid), timeout_s=TIMEOUT_S, what="the end")
    finally:
        os.close(pidfd)


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_a_wrong_parent_is_not_served(rig):
    rig.start(wrap=lambda command: [*command, "--parent-pid=1"])
    assert rig.exit_code() == 1


def test_a_tier_that_cannot_work_says_why_and_exits_2(session_name, tmp_path):
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file")
    with WorkerRig(session_name, type="slab", path=path) as rig:
        rig.start()
        hello = rig.hello()
        assert hello.is_config_error
        assert "give path a directory" in hello.error
        assert rig.exit_code() == 2
        assert rig.word(TierWord.WORKER_READY) == 0


def test_a_plug_in_that_is_not_there_is_a_config_error(session_name):
    with WorkerRig(session_name, type="nosuch") as rig:
        rig.start()
        assert 'no tier type "nosuch"' in rig.hello().error
        assert rig.exit_code() == 2


def test_sigkill_leaves_no_lock_and_no_half_block(rig):
    start = 0
    for _ in range(10):
        rig.ready()
        keys = [key_of(i) for i in range(start, start + 20)]
        for slot, key in enumerate(keys):
            rig.fill(slot, key)
        jobs = {rig.submit([key], [slot]): key for slot, key in enumerate(keys)}
        rig.answer(min(jobs))
        rig.process.kill()
        rig.process.wait()
        done = [jobs[m.job_id] for m in rig.said(JobDone) if not m.failed_idx]
        rig.channel.close()
        rig.start()
        found = rig.resident()
        assert set(done) <= set(found)
        slots = range(63, 63 - len(found), -1)
        new = [key for key in found if key in keys]
        assert rig.run(new, list(slots)[: len(new)], load=True) == ([], "")
        assert all(rig.holds(s, k) for s, k in zip(slots, new, strict=False))
        rig.process.kill()
        rig.process.wait()
        rig.channel.close()
        start += 2
    assert rig.word(TierWord.BLOCKS_BAD) == 0


def test_start_up_imports_no_heavy_module():
    code = (
        "import sys, shmoffload.worker.__main__, shmoffload.worker.tiers.slab\n"
        "heavy = {'torch', 'vllm', 'multiprocessing', 'numpy', 'pickle', 'asyncio'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or None)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
