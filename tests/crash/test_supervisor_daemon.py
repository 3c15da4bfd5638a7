"""The daemon's rows of docs/deaths.md, with real processes."""

import json
import os
import signal
import subprocess
import sys

import pytest
from fake_engine import FAKE_WORKER, LONG_S, wait_ready
from supervisor_kit import (
    end_process,
    is_alive,
    names_of,
    num_fds,
    start_engine_process,
    toml,
    wait_gone,
)

from shmoffload.supervisor.spawn import connect_daemon
from shmoffload.testing.poll import wait_until
from shmoffload.wire.messages import (
    Detached,
    Refused,
)

SERVE = """
import json, sys
from pathlib import Path
from shmoffload.errors import ShmoffloadError
from shmoffload.supervisor.daemon import serve
from shmoffload.wire.config import from_toml
try:
    code = serve(from_toml(Path(sys.argv[1]).read_text()),
                 worker_command=json.loads(sys.argv[2]))
except ShmoffloadError as error:
    sys.exit(f"{error}") if error.exit_code == 1 else (
        print(error, file=sys.stderr), sys.exit(error.exit_code))
sys.exit(code)
"""


@pytest.fixture
def runtime_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("SHMOFFLOAD_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def start_daemon(tmp_path, runtime_dir, session_name):
    started = []

    def start():
        file = tmp_path / "serve.toml"
        file.write_text(toml(session_name))
        daemon = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(file), json.dumps(FAKE_WORKER)],
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(daemon)
        return daemon

    yield start
    for daemon in started:
        daemon.terminate()
        daemon.wait(LONG_S)
        daemon.stderr.close()


def test_daemon_serves_one_engine_after_the_other(
    start_daemon, make_engine, session_name, runtime_dir
):
    daemon = start_daemon()
    assert f"socket {runtime_dir}/{session_name}.sock" in wait_ready(daemon)
    for epoch in (1, 2):
        with make_engine(daemon=True) as engine:
            engine.attach(epoch=epoch).wait_up(epoch=epoch)
            assert engine.supervisor_pid() == daemon.pid
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(LONG_S) == 0
    assert names_of(session_name) == []
    assert list(runtime_dir.iterdir()) == []


def test_daemon_outlives_a_killed_engine(
    start_daemon, make_engine, session_name, tmp_path
):
    wait_ready(start_daemon())
    engine, pids = start_engine_process(tmp_path, session_name, "daemon")
    end_process(engine)
    # The successor is there before the daemon has cleaned up: it is made to wait.
    with make_engine(daemon=True) as successor:
        successor.attach(epoch=2).wait_up(epoch=2)
        assert not any(is_alive(pid) for pid in pids["workers"])


def test_daemon_serves_one_engine_at_a_time(start_daemon, make_engine, session_name):
    wait_ready(start_daemon())
    with make_engine(daemon=True) as engine:
        engine.attach().wait_up()
        engine.channel, first = connect_daemon(session_name), engine.channel
        engine.attach()
        assert "in use by process" in engine.wait_for(Refused).reason
        engine.channel.close()
        engine.channel, engine.is_closed = first, False
        engine.wait_up()


def test_daemon_and_engine_need_one_configuration(start_daemon, make_engine):
    wait_ready(start_daemon())
    with make_engine(daemon=True, hung_after_s=7) as engine:
        engine.attach()
        assert "limits.hung_after_s is 30" in engine.wait_for(Refused).reason


def test_garbage_on_the_socket_closes_only_that_connection(
    start_daemon, make_engine, session_name
):
    daemon = start_daemon()
    wait_ready(daemon)
    before = num_fds(daemon.pid)
    for garbage in (b"\xc1", os.urandom(5000), b"\x91\xa2de\xff", b"\x93\xa2ha"):
        channel = connect_daemon(session_name)
        channel.send(garbage, [0, 1, 2])
        assert channel.wait(timeout_s=LONG_S)
        channel.close()
    silent = [connect_daemon(session_name) for _ in range(20)]  # more than it keeps
    for channel in filter(None, silent):
        channel.close()
    with make_engine(daemon=True) as engine:
        engine.attach().wait_up()
    wait_until(lambda: num_fds(daemon.pid) == before, timeout_s=LONG_S, what="no leak")


def test_second_daemon_is_refused(start_daemon):
    first = start_daemon()
    wait_ready(first)
    second = start_daemon()
    assert second.wait(LONG_S) == 2
    assert f"already served by process {first.pid}" in second.stderr.read()
    assert first.poll() is None


def test_daemon_killed_is_replaced(start_daemon, make_engine, session_name):
    """Stale socket and dead page are no hindrance; a live engine keeps its page."""
    first = start_daemon()
    wait_ready(first)
    with make_engine(daemon=True) as engine:
        engine.attach().wait_up()
        workers = [pid for _, pid in engine.workers.values()]
        first.kill()
        wait_gone([first.pid, *workers])
        second = start_daemon()
        wait_ready(second)
        engine.channel.close()
        engine.channel, engine.is_closed = connect_daemon(session_name), False
        engine.messages.clear()
        engine.attach().wait_up(epoch=2)
        assert engine.supervisor_pid() == second.pid


def test_daemon_told_to_leave_under_an_engine(start_daemon, make_engine, session_name):
    """Workers end in order; the engine's names stay, its page among them."""
    daemon = start_daemon()
    wait_ready(daemon)
    with make_engine(daemon=True) as engine:
        engine.attach().wait_up()
        daemon.send_signal(signal.SIGINT)
        assert daemon.wait(LONG_S) == 0
        engine.wait_for(Detached)
        assert len(names_of(session_name)) == 3
        engine.is_daemon = False  # it has to remove the page itself now
        wait_until(
            lambda: engine.pump() and engine.is_closed,
            timeout_s=LONG_S,
            what="end of file",
        )


def test_daemon_is_refused_beside_an_engine_of_its_own(start_daemon, make_engine):
    with make_engine() as engine:
        engine.attach().wait_up()
        daemon = start_daemon()
        assert daemon.wait(LONG_S) == 2
        assert "with a supervisor of its own" in daemon.stderr.read()
