"""A worker process with a test in the engine's and the supervisor's place."""

import array
import contextlib
import os
import random
import subprocess
import sys
import time

from shmoffload.testing.poll import wait_until
from shmoffload.wire import config as wire_config
from shmoffload.wire.channel import ChannelClosedError, channel_pair
from shmoffload.wire.messages import (
    MAX_KEYS_PER_FRAME,
    Hello,
    JobDone,
    JobPart,
    Resident,
    decode_from_worker,
    encode_frame,
)
from shmoffload.wire.region import PrimaryRegion
from shmoffload.wire.session import SessionPage

ENGINE_EPOCH, WORKER_EPOCH = 7, 3
BLOCK_BYTES = 4096
TIMEOUT_S = 40


class WorkerRig:
    """Region, page, and one worker on the tier given as keywords."""

    def __init__(
        self,
        session,
        *,
        slots=64,
        heartbeat_s=0.1,
        block_bytes=BLOCK_BYTES,
        namespace="test",
        **tier,
    ):
        self.block_bytes = block_bytes
        self.config = wire_config.from_dict(
            {
                "session": {"name": session, "namespace": namespace},
                "primary": {"block_bytes": block_bytes, "slots": slots},
                "tier": [{"min_free": 0, **tier}],
                "limits": {"heartbeat_s": heartbeat_s},
            }
        )
        self.stack = contextlib.ExitStack()
        self.page = SessionPage.open_or_create(self.config)
        self.stack.callback(self.page.close)
        self.stack.callback(self.page.unlink, session)
        self.region = PrimaryRegion.open(self.config)
        self.stack.callback(self.region.close)
        self.stack.callback(self.region.unlink)
        self.heard = []
        self.channel = None
        self.process = None
        self.next_id = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with self.stack:
            if self.process is not None:
                self.process.kill()
                self.process.wait()
            if self.channel is not None:
                self.channel.close()

    def command(self, jobs_fd, config_fd):
        numbers = {
            "tier-idx": 0,
            "worker-epoch": WORKER_EPOCH,
            "engine-epoch": ENGINE_EPOCH,
            "jobs-fd": jobs_fd,
            "region-fd": self.region.fd,
            "page-fd": self.page.fd,
            "config-fd": config_fd,
        }
        flags = [f"--{name}={number}" for name, number in numbers.items()]
        return [sys.executable, "-m", "shmoffload.worker", *flags]

    def start(self, *, wrap=None):
        """Start the worker; ``wrap`` turns its command into another."""
        self.channel, theirs = channel_pair()
        self.heard = []
        config_fd = os.memfd_create("config")
        os.write(config_fd, wire_config.encode(self.config))
        fds = (theirs.fileno(), self.region.fd, self.page.fd, config_fd)
        command = self.command(theirs.fileno(), config_fd)
        command = wrap(command) if wrap else command
        self.process = subprocess.Popen(command, pass_fds=fds)
        theirs.close()
        os.close(config_fd)
        return self

    def word(self, word):
        return self.page.get_tier(0, word)

    def wait_for(self, word, value):
        """Wait for a word that changes after its datagram was sent or taken."""
        wait_until(
            lambda: self.word(word) == value, timeout_s=TIMEOUT_S, what=word.name
        )

    def receive(self):
        """Return all that the worker has said so far."""
        with contextlib.suppress(ChannelClosedError):
            while (frame := self.channel.receive()) is not None:
                self.heard += decode_from_worker(frame)
        return self.heard

    def said(self, kind):
        return [m for m in self.receive() if isinstance(m, kind)]

    def hello(self):
        return wait_until(
            lambda: self.said(Hello), timeout_s=TIMEOUT_S, what="the worker's Hello"
        )[0]

    def resident(self):
        """Wait for the whole report; return its keys."""
        reports = wait_until(
            lambda: (r := self.said(Resident)) and r[-1].is_last and r,
            timeout_s=TIMEOUT_S,
            what="the report of residents",
        )
        return [key for report in reports for key in report.added]

    def ready(self, **kwargs):
        self.start(**kwargs)
        assert self.hello().error == ""
        self.resident()
        return self

    def send(self, frame):
        wait_until(
            lambda: self.channel.send(frame), timeout_s=TIMEOUT_S, what="room to send"
        )

    def submit(self, keys, slots, *, load=False, deadline_s=None, epoch=WORKER_EPOCH):
        self.next_id += 1
        keys, slots = list(keys), list(slots)
        due = time.monotonic() + TIMEOUT_S if deadline_s is None else deadline_s
        for start in range(0, len(keys), MAX_KEYS_PER_FRAME):
            end = start + MAX_KEYS_PER_FRAME
            part = JobPart(
                ENGINE_EPOCH,
                epoch,
                self.next_id,
                load,
                "r",
                due,
                keys[start:end],
                array.array("i", slots[start:end]).tobytes(),
                max(0, len(keys) - end),
            )
            self.send(encode_frame([part]))
        return self.next_id

    def answer(self, job_id):
        done = wait_until(
            lambda: [m for m in self.said(JobDone) if m.job_id == job_id],
            timeout_s=TIMEOUT_S,
            what=f"the answer to job {job_id}",
        )
        assert len(done) == 1
        assert (done[0].engine_epoch, done[0].worker_epoch) == (
            ENGINE_EPOCH,
            WORKER_EPOCH,
        )
        return done[0]

    def run(self, keys, slots, **kwargs):
        """Run a job; return failed positions and error."""
        done = self.answer(self.submit(keys, slots, **kwargs))
        return list(array.array("i", done.failed_idx)), done.error

    def fill(self, slot, key):
        block = random.Random(key).randbytes(self.block_bytes)
        self.region.slot_view(slot)[:] = block

    def holds(self, slot, key):
        block = random.Random(key).randbytes(self.block_bytes)
        return bytes(self.region.slot_view(slot)) == block

    def exit_code(self):
        return self.process.wait(timeout=TIMEOUT_S)
