"""GPU workers of a server come first and may go last; real processes, no vLLM.

Covers: who removes names when the engine is killed under them, when no engine ever
came, and when worker and engine are one process.
Does not cover: races of the start (``test_region_deaths``).
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from supervisor_kit import is_alive

from shmoffload.core.types import SlotState, make_offload_key
from shmoffload.engine import Engine
from shmoffload.errors import SessionInUseError
from shmoffload.testing.poll import wait_until
from shmoffload.wire import names
from shmoffload.wire.config import encode, from_dict
from shmoffload.wire.region import PrimaryRegion

ROOT = Path(__file__).parents[2]
GONE_S = 10.0
PRELUDE = f"""
import json, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from shmoffload.engine import Engine
from shmoffload.wire.config import decode
from shmoffload.wire.region import PrimaryRegion
from shmoffload.wire.session import TierWord, Word
config = decode(sys.argv[1].encode())
"""
WORKER = """
region = PrimaryRegion.open(config)
print("joined", flush=True)
for line in sys.stdin:
    slot, byte = map(int, line.split())
    region.slot_view(slot)[:] = bytes([byte]) * region.block_bytes
    region.set_copies_done(0, 0, byte)
    print("written", flush=True)
"""
ENGINE = """
engine = Engine(config)
page = engine.page
print(page.get(Word.SUPERVISOR_PID), page.get_tier(0, TierWord.WORKER_PID), flush=True)
signal.pause()
"""


def config_of(session):
    return from_dict(
        {
            "session": {"name": session},
            "primary": {"slots": 16, "block_bytes": 4096},
            "tier": [{"type": "memory"}],
        }
    )


@contextlib.contextmanager
def running(code, session):
    """A process that runs ``code`` after the prelude; killed and reaped at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code, encode(config_of(session)).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def gpu_worker(session):
    with running(WORKER, session) as process:
        assert process.stdout.readline() == "joined\n"
        yield process


def write(worker, slot, byte):
    worker.stdin.write(f"{slot} {byte}\n")
    worker.stdin.flush()
    assert worker.stdout.readline() == "written\n"


def our_names(session):
    return sorted(n for n in os.listdir(names.SHM_DIR) if f".{session}." in n)


def wait_no_names(session):
    wait_until(
        lambda: our_names(session) == [], timeout_s=GONE_S, what="the end of all names"
    )


def test_engine_killed_while_gpu_workers_still_write(session_name):
    with gpu_worker(session_name) as first, gpu_worker(session_name) as second:
        with running(ENGINE, session_name) as engine:
            pids = [int(pid) for pid in engine.stdout.readline().split()]
            assert len(our_names(session_name)) == 3
            assert all(is_alive(pid) for pid in pids)
            engine.send_signal(signal.SIGKILL)
            wait_no_names(session_name)
            wait_until(
                lambda: not any(is_alive(pid) for pid in pids),
                timeout_s=GONE_S,
                what="the end of supervisor and tier worker",
            )
        write(first, 15, 7)  # neither is disturbed, and neither holds up a start
        with Engine(config_of(session_name)) as successor:
            assert bytes(successor.slot_view(15)) == bytes(4096)
            assert successor.region.copies_done(0, 0) == 0
            write(second, 15, 8)
            assert bytes(successor.slot_view(15)) == bytes(4096)
            first.kill()
            first.wait()
            assert len(our_names(session_name)) == 3
    assert our_names(session_name) == []


def test_server_killed_whole(session_name):
    """Workers, then engine, within an instant; the embedded supervisor is left."""
    with gpu_worker(session_name) as worker, running(ENGINE, session_name) as engine:
        assert engine.stdout.readline()
        worker.kill()
        engine.kill()
        wait_no_names(session_name)


def test_gpu_worker_killed_under_a_live_engine(session_name):
    config = config_of(session_name)
    with gpu_worker(session_name) as worker, Engine(config) as engine:
        write(worker, 3, 5)
        worker.kill()
        worker.wait()
        assert bytes(engine.slot_view(3)) == b"\5" * 4096
        assert engine.region.copies_done(0, 0) == 5
        assert names.sweep(session_name) == []
        assert len(our_names(session_name)) == 3
    assert our_names(session_name) == []


@pytest.mark.parametrize("next_session", ["same", "another"])
def test_gpu_workers_killed_before_any_engine(session_name, next_session):
    with gpu_worker(session_name) as first, gpu_worker(session_name) as second:
        write(first, 3, 5)
        for worker in (first, second):
            worker.kill()
            worker.wait()
    assert our_names(session_name) == [f"shmoffload.{session_name}.region"]
    is_same = next_session == "same"
    later = session_name if is_same else f"{session_name}-later"
    with gpu_worker(later) as worker, Engine(config_of(later)) as engine:
        assert our_names(session_name) == (our_names(later) if is_same else [])
        assert engine.region.copies_done(0, 0) == 0
        write(worker, 0, 9)
        assert bytes(engine.slot_view(0)) == b"\t" * 4096
    assert our_names(later) == []


@pytest.mark.parametrize("worker_goes_first", [True, False])
def test_worker_and_engine_in_one_process(session_name, worker_goes_first):
    config = config_of(session_name)
    worker_side = PrimaryRegion.open(config)
    engine = Engine(config)
    try:
        worker_side.slot_view(2)[:] = b"w" * 4096
        worker_side.set_copies_done(0, 1, 3)
        assert bytes(engine.slot_view(2)) == b"w" * 4096
        assert engine.region.copies_done(0, 1) == 3
        if worker_goes_first:
            worker_side.close()
            assert names.sweep(session_name) == []  # as a worker's shutdown does
            assert len(our_names(session_name)) == 3
            key = make_offload_key(b"k" * 32)
            engine.region.hand_out(2, 1, key, 4096)
            assert engine.region.record(2)[1] is SlotState.PENDING
            engine.close()
        else:
            engine.close()
            assert our_names(session_name) == []
            assert bytes(worker_side.slot_view(2)) == b"w" * 4096
    finally:
        engine.close()
        worker_side.close()
        names.sweep(session_name)
    assert our_names(session_name) == []


def test_engine_that_fails_to_start_leaves_the_region_to_its_workers(session_name):
    """Another engine has the session: the worker's region is that one's, and stays."""
    config = config_of(session_name)
    with gpu_worker(session_name) as worker, Engine(config) as engine:
        with pytest.raises(SessionInUseError, match="in use"):
            Engine(config)
        write(worker, 1, 4)
        assert bytes(engine.slot_view(1)) == b"\4" * 4096
        assert len(our_names(session_name)) == 3
    assert our_names(session_name) == []
