"""The supervisor with the product's own workers and command line."""

import os
import signal
import subprocess
import sys

import pytest
from fake_engine import LONG_S, FakeEngine, wait_ready

from shmoffload.testing.poll import wait_until
from shmoffload.wire.config import from_toml

TOML = """
[session]
name = "{name}"
[primary]
block_bytes = 4096
slots = 8
[[tier]]
type = "memory"
[[tier]]
type = "slab"
path = "{path}"
max_bytes = "1MiB"
min_free = 0
[limits]
heartbeat_s = 0.1
"""


@pytest.fixture
def toml(tmp_path, session_name):
    return TOML.format(name=session_name, path=tmp_path / "slab")


def serve(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "shmoffload.cli", "serve", *arguments],
        stderr=subprocess.PIPE,
        text=True,
    )


def test_embedded_with_real_workers(toml):
    with FakeEngine(from_toml(toml), worker_command=None) as engine:
        engine.attach().wait_up()
        os.kill(engine.workers[1][1], signal.SIGKILL)
        wait_until(
            lambda: engine.pump() and engine.workers[1][0] == 2,
            timeout_s=LONG_S,
            what="the second slab worker",
        )
        engine.wait_up()


def test_serve_from_the_command_line(toml, tmp_path, session_name, monkeypatch):
    monkeypatch.setenv("SHMOFFLOAD_RUNTIME_DIR", str(tmp_path / "run"))
    file = tmp_path / "serve.toml"
    file.write_text(toml.replace(session_name, "another"))
    with serve("-c", str(file), "--session", session_name) as daemon:
        assert wait_ready(daemon) == (
            f"ready: session {session_name}, socket {tmp_path}/run/{session_name}.sock,"
            f" tiers memory (memory), slab (slab)\n"
        )
        with FakeEngine(from_toml(toml), daemon=True) as engine:
            engine.attach().wait_up()
        second = subprocess.run(
            serve_again(file, session_name), capture_output=True, text=True, check=False
        )
        assert second.returncode == 2
        assert second.stderr.startswith(f'shmoffload: session "{session_name}" is alre')
        assert second.stderr.count("\n") == 1
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(LONG_S) == 0


def serve_again(file, session):
    command = [sys.executable, "-m", "shmoffload.cli", "serve"]
    return [*command, "-c", str(file), "--session", session]


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('"memory"', '"memroy"', "memory"),
        ("max_bytes", "max_byte", "did you mean max_bytes?"),
        ("slots = 8", "slots = 0", "the primary has 0 blocks"),
    ],
)
def test_serve_refuses_bad_input(toml, tmp_path, monkeypatch, old, new, text):
    monkeypatch.setenv("SHMOFFLOAD_RUNTIME_DIR", str(tmp_path / "run"))
    file = tmp_path / "serve.toml"
    file.write_text(toml.replace(old, new))
    with serve("-c", str(file)) as daemon:
        assert daemon.wait(LONG_S) == 2
        words = daemon.stderr.read()
    assert text in words
    assert words.count("\n") == 1
    assert not (tmp_path / "run").exists()
