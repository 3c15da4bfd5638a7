"""What an operator does after everything was killed: doctor, clean, verify, start."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from engine_kit import keys_of, load, make_config, request, slab

from shmoffload.cli import main
from shmoffload.engine import Engine
from shmoffload.testing.poll import wait_until

NUM = 6
CHILD = """
import sys, time
from engine_kit import keys_of, make_config, request, slab, step, store
from shmoffload.engine import Engine

session, path, num = sys.argv[1:]
engine = Engine(make_config(session, [slab(path)]))
store(engine, request(engine, "r"), keys_of(0, int(num)))
while True:  # an engine that steps until it is killed
    step(engine)
    time.sleep(0.005)
"""


@pytest.fixture(autouse=True)
def run_dir(tmp_path, monkeypatch):
    path = tmp_path / "run"
    monkeypatch.setenv("SHMOFFLOAD_RUNTIME_DIR", str(path))
    return path


@pytest.fixture
def verb(capsys):
    """Run a verb with ``--json``; returns exit code and what it says."""

    def run(*words):
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([*words, "--json"])
        out = capsys.readouterr().out
        return caught.value.code, json.loads(out) if out else None

    return run


@contextlib.contextmanager
def engine_process(session, path):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, session, str(path), str(NUM)],
        cwd=Path(__file__).parent,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.DEVNULL,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait(10)


def test_kill_everything_then_clean_verify_start(session_name, tmp_path, verb):
    def status():
        return verb("status", "--session", session_name)[1]

    def is_stored():
        seen = status()
        return seen is not None and seen["tiers"][0]["resident_blocks"] == NUM

    with engine_process(session_name, tmp_path / "tier") as child:
        wait_until(is_stored, timeout_s=40.0, what="the blocks in the slab")
        assert verb("doctor", "--session", session_name)[0] == 0
        assert verb("clean", "--session", session_name, "--yes")[1]["found"] == []
        assert verb("verify", str(tmp_path / "tier"))[0] == 2  # it is served
        assert status()["status"] == "healthy"
        child.send_signal(signal.SIGSTOP)  # else it would start another supervisor
        os.kill(status()["supervisor"]["pid"], signal.SIGKILL)

    def is_dead():
        found = verb("clean", "--session", session_name)[1]["found"]
        return {Path(row["path"]).suffix for row in found} == {
            ".page",
            ".region",
            ".own",
        }

    wait_until(is_dead, timeout_s=10.0, what="the end of every process")
    code, seen = verb("doctor", "--session", session_name)
    (fault,) = [check for check in seen["checks"] if not check["ok"]]
    assert (code, fault["check"]) == (1, "leftovers")
    assert verb("clean", "--session", session_name, "--yes")[0] == 0
    assert verb("doctor", "--session", session_name)[0] == 0

    code, seen = verb("verify", str(tmp_path / "tier"))
    assert (code, seen["directories"][0]["blocks"]) == (0, NUM)
    config = make_config(session_name, [slab(tmp_path / "tier")])
    with Engine(config) as engine:
        assert load(engine, request(engine, "r"), keys_of(0, NUM)) == NUM
