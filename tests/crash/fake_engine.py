"""An engine's control side without a core: attaches, takes workers over, records.

In process for most tests; as a program it attaches, prints one JSON line with all
pids, and waits to be killed. Arguments of the program: the TOML file, then
``daemon`` if there is one.
"""

import json
import os
import signal
import sys
from pathlib import Path

from shmoffload.supervisor.spawn import connect_daemon, spawn_embedded
from shmoffload.testing.poll import wait_until
from shmoffload.wire.channel import Channel, ChannelClosedError
from shmoffload.wire.config import encode, from_toml
from shmoffload.wire.messages import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    Detach,
    Detached,
    HandoverAck,
    KillWorker,
    WorkerStarted,
    decode_from_supervisor,
    encode_control,
)
from shmoffload.wire.region import PrimaryRegion
from shmoffload.wire.session import SessionPage, TierState, TierWord, Word

FAKE_WORKER = [sys.executable, str(Path(__file__).with_name("fake_worker.py"))]
LONG_S = 30.0


class FakeEngine:
    """Use as a context manager: leaving it removes what an engine removes."""

    def __init__(self, config, *, worker_command=FAKE_WORKER, daemon=False):
        self.config = config
        self.messages = []
        self.workers = {}  # tier -> (epoch, pid), the last one that was handed over
        self.links = {}  # tier -> (channel, pidfd)
        self.acknowledges = True
        self.is_closed = False
        self.page = SessionPage.open_or_create(config)
        self.region = PrimaryRegion.open(config)
        self.region.own()
        if daemon:
            self.channel = wait_until(
                lambda: connect_daemon(config.session.name),
                timeout_s=LONG_S,
                what="the daemon's socket",
            )
        else:
            self.channel = spawn_embedded(config, worker_command=worker_command)
        self.is_daemon = daemon

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.detach()
        self.close()

    def attach(self, *, epoch=1, version=PROTOCOL_VERSION, config=None, fds=None):
        name = self.config.session.name
        message = Attach(version, name, epoch, encode(config or self.config))
        self.send(message, fds or [self.region.fd, self.page.fd])
        return self

    def send(self, message, fds=()):
        assert self.channel.send(encode_control(message), fds)

    def pump(self):
        """Take in what has come; True so that conditions can begin with it."""
        while not self.is_closed:
            try:
                data, fds = self.channel.receive_with_fds()
            except ChannelClosedError:
                self.is_closed = True
                break
            if data is None:
                break
            message = decode_from_supervisor(data)
            self.messages.append(message)
            if isinstance(message, WorkerStarted):
                self._take_over(message, fds)
        return True

    def _take_over(self, message, fds):
        tier = message.tier_idx
        self._drop_link(tier)
        self.links[tier] = (Channel.from_fd(fds[0]), fds[1])
        self.workers[tier] = (message.worker_epoch, message.pid)
        if self.acknowledges:
            self.send(HandoverAck(tier, message.worker_epoch))

    def _drop_link(self, tier):
        if tier in self.links:
            channel, pidfd = self.links.pop(tier)
            channel.close()
            os.close(pidfd)

    def wait_for(self, kind, *, timeout_s=LONG_S, where=lambda _: True):
        """Return the first message of a kind, once it is here."""

        def found():
            self.pump()
            return [m for m in self.messages if isinstance(m, kind) and where(m)]

        return wait_until(found, timeout_s=timeout_s, what=kind.__name__)[0]

    def state(self, tier=0):
        return TierState(self.page.get_tier(tier, TierWord.STATE))

    def wait_up(self, *, epoch=1):
        """Wait until every tier is up in this or a later incarnation."""

        def is_up():
            self.pump()
            return all(
                self.state(tier) is TierState.UP
                and self.workers.get(tier, (0, 0))[0] >= epoch
                for tier in range(len(self.config.tier))
            )

        wait_until(is_up, timeout_s=LONG_S, what=f"workers of epoch {epoch}")
        return self

    def wait_state(self, state, tier=0):
        wait_until(
            lambda: self.pump() and self.state(tier) is state,
            timeout_s=LONG_S,
            what=f"tier {tier} {state.name}",
        )

    def kill_worker(self, tier=0, *, epoch=None, reason="it missed a deadline"):
        self.send(KillWorker(tier, epoch or self.workers[tier][0], reason))

    def supervisor_pid(self):
        return self.wait_for(Attached).supervisor_pid

    def detach(self):
        if not self.is_closed and any(isinstance(m, Attached) for m in self.messages):
            self.send(Detach())
            self.wait_for(Detached)

    def close(self):
        """As an engine at its end: names it made, unless the page is a daemon's."""
        self.channel.close()
        for tier in list(self.links):
            self._drop_link(tier)
        self.region.unlink()
        self.region.close()
        if not self.is_daemon:
            self.page.unlink(self.config.session.name)
        self.page.close()


def wait_ready(daemon):
    """Return the line by which a daemon (a Popen) says that it serves."""
    for line in daemon.stderr:  # it may first tell of names that it swept
        if line.startswith("ready: "):
            return line
    raise AssertionError(f"the daemon left with {daemon.wait()}")


def main():
    config = from_toml(Path(sys.argv[1]).read_text())
    engine = FakeEngine(config, daemon="daemon" in sys.argv)
    engine.attach(epoch=engine.page.get(Word.ENGINE_EPOCH) + 1).wait_up()
    pids = [pid for _, pid in engine.workers.values()]
    json.dump({"supervisor": engine.supervisor_pid(), "workers": pids}, sys.stdout)
    sys.stdout.write("\n")
    sys.stdout.flush()
    while True:
        engine.channel.wait(timeout_s=60)
        engine.pump()
        if engine.is_closed:
            signal.pause()


if __name__ == "__main__":
    main()
