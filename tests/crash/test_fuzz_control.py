"""Garbage on the daemon's socket, with and without descriptors, beside an engine."""

import os
import subprocess
import sys
import time

import pytest
from fake_engine import LONG_S, FakeEngine
from supervisor_kit import num_fds, toml

from shmoffload.supervisor.spawn import connect_daemon
from shmoffload.testing.frames import FrameFuzzer, budget_s, seed
from shmoffload.testing.poll import wait_until
from shmoffload.wire.channel import ChannelClosedError, DescriptorsLostError
from shmoffload.wire.config import encode, from_toml
from shmoffload.wire.messages import PROTOCOL_VERSION, Attach, encode_control


@pytest.fixture
def daemon(tmp_path, session_name, monkeypatch):
    monkeypatch.setenv("SHMOFFLOAD_RUNTIME_DIR", str(tmp_path / "run"))
    file = tmp_path / "serve.toml"
    file.write_text(toml(session_name))
    command = [sys.executable, "-m", "shmoffload.cli", "serve", "-c", str(file)]
    # Not a pipe: one that nobody reads would stop the daemon.
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stderr=log)
    wait_until(
        lambda: "ready: " in (tmp_path / "log").read_text(),
        timeout_s=LONG_S,
        what="the daemon",
    )
    yield process
    process.terminate()
    assert process.wait(LONG_S) == 0


def strange_fds(rng, page_fd):
    """Descriptors of every kind, none of which is what it should be."""
    read_end, write_end = os.pipe()
    kinds = [read_end, write_end, page_fd, os.open("/", os.O_RDONLY), 0]
    kinds += [os.open("/dev/zero", os.O_RDONLY), os.memfd_create("empty")]
    chosen = rng.choices(kinds, k=rng.randrange(4))
    return chosen, [fd for fd in kinds if fd not in (page_fd, 0)]


def pester(fuzzer, session, config, page_fd):
    """One connection that says a few things, and leaves or waits to be left."""
    channel = connect_daemon(session)
    if channel is None:
        return 0
    attach = Attach(PROTOCOL_VERSION, session, 1, encode(config))
    num_said = 0
    try:
        for _ in range(fuzzer.rng.randrange(1, 6)):
            data = fuzzer.any_of(
                lambda: encode_control(attach),
                lambda: fuzzer.to_supervisor(session, encode(config)),
            )
            fds, opened = strange_fds(fuzzer.rng, page_fd)
            try:
                num_said += channel.send(data, fds)
            finally:
                for fd in opened:
                    os.close(fd)
    except (ChannelClosedError, DescriptorsLostError):
        pass  # it has hung up, as it should
    finally:
        channel.close()
    return num_said


def test_a_daemon_under_garbage_serves_on(daemon, session_name):
    fuzzer = FrameFuzzer(seed())
    config = from_toml(toml(session_name))
    with FakeEngine(config, daemon=True) as engine:
        engine.attach().wait_up()
        workers, before = dict(engine.workers), num_fds(daemon.pid)
        num_said = 0
        until = time.monotonic() + budget_s(4)
        while time.monotonic() < until:
            num_said += pester(fuzzer, session_name, config, engine.page.fd)
            engine.pump()
            assert daemon.poll() is None
        assert num_said > 100
        wait_until(
            lambda: num_fds(daemon.pid) == before, timeout_s=LONG_S, what="no leak"
        )
        engine.wait_up()
        assert engine.workers == workers, "nobody's worker was touched"


def test_a_served_engine_that_sends_nonsense_harms_its_own_tiers_only(
    daemon, session_name
):
    """Well-formed words out of bounds are ignored; garbage ends the attachment."""
    fuzzer = FrameFuzzer(seed())
    config = from_toml(toml(session_name))
    with FakeEngine(config, daemon=True) as engine:
        engine.attach().wait_up()
        for _ in range(300):
            data = fuzzer.to_supervisor(session_name, b"")
            wait_until(
                lambda data=data: engine.pump() and engine.channel.send(data),
                timeout_s=LONG_S,
                what="room",
            )
        engine.wait_up()
        assert daemon.poll() is None
        engine.channel.send(b"\xc1")
        wait_until(
            lambda: engine.pump() and engine.is_closed, timeout_s=LONG_S, what="the end"
        )
    with FakeEngine(config, daemon=True) as engine:
        engine.attach(epoch=2).wait_up()
    assert daemon.poll() is None
