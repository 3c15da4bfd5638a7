"""SIGKILL in the middle of a replay: the next start is clean, and finds its blocks."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shmoffload.replay.generate import MultiTurn, generate
from shmoffload.testing.leaks import find_leftovers
from shmoffload.testing.poll import wait_until
from shmoffload.wire.session import NoSessionError, SessionPage, TierWord, Word

pytestmark = pytest.mark.timeout(240)

SHAPE = MultiTurn(num_conversations=10, num_turns=5, spread_s=1.0)
ENOUGH_WRITTEN = 40


@pytest.fixture(scope="module")
def workload():
    return generate(SHAPE)


@pytest.fixture
def replay(workload, tmp_path, session_name):
    """Start ``replay --live`` on a slab that outlives it."""
    number = {}
    trace = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": round(r.arrival_s * 1000),
            "input_length": r.num_input_tokens,
            "output_length": 4,
            "hash_ids": [number.setdefault(h, len(number)) for h in r.hashes],
        }
        for r in workload.requests
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))

    def start(session=session_name):
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "shmoffload.cli", "replay", str(trace)),
                *("--live", "--json", "--session", session, "--primary", "30%"),
                *("--block-bytes", "16K", "--speed", "0.5"),
                *("--tier", f"slab:{tmp_path}/slab,cap=100%"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def look(session):
    try:
        return SessionPage.look(session)
    except NoSessionError:
        return None


def kill_when_busy(process, session, victim):
    """Kill once blocks have been written and more are on their way."""
    page = wait_until(lambda: look(session), timeout_s=60, what="the session page")
    try:
        wait_until(
            lambda: page.get_tier(0, TierWord.BLOCKS_WRITTEN) >= ENOUGH_WRITTEN,
            timeout_s=60,
            what="some blocks on disk",
        )
        pid = {
            "engine": process.pid,
            "supervisor": page.get(Word.SUPERVISOR_PID),
            "worker": page.get_tier(0, TierWord.WORKER_PID),
        }[victim]
        os.kill(pid, signal.SIGKILL)
    finally:
        page.close()


@pytest.mark.parametrize("victim", ["engine", "supervisor", "worker"])
def test_a_kill_midway_leaves_nothing_and_loses_no_finished_block(
    replay, workload, session_name, victim
):
    process = replay()
    kill_when_busy(process, session_name, victim)
    out, err = process.communicate(timeout=120)
    if victim == "engine":
        assert process.returncode == -signal.SIGKILL
    else:
        # The replay goes on over the loss: every request served, no byte wrong.
        assert process.returncode == 0, err
        assert json.loads(out)["bad_stamps"] == 0
        assert json.loads(out)["requests"] == len(workload.requests)
    again = replay()
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    report = json.loads(out)
    assert report["bad_stamps"] == 0
    assert report["hits_by_tier"]["slab"] > 0
    # What the first run had finished is not written again.
    assert report["blocks_written"]["total"] <= workload.num_distinct - ENOUGH_WRITTEN
    wait_until(lambda: not find_leftovers(), timeout_s=10, what="nothing to be left")
    assert not list(Path("/dev/shm").glob(f"shmoffload.{session_name}.*"))
