"""The engine's end of a queue: frames, backlog, and the proof of a death."""

import os
import subprocess
import sys

import numpy as np
import pytest

from shmoffload.core.types import (
    AnnounceRequest,
    FinishRequest,
    JobMetadata,
    OffloadPolicy,
    ReqContext,
    TierDown,
    make_offload_key,
)
from shmoffload.engine.tier_link import TierLink
from shmoffload.testing.poll import wait_until
from shmoffload.wire.channel import channel_pair
from shmoffload.wire.messages import MAX_FRAME_BYTES, JobPart, decode_to_worker


def announce(req_id):
    return AnnounceRequest(req_id, OffloadPolicy.BLOCK_LEVEL)


def job_of(num_keys, req_id="r"):
    keys = [make_offload_key(b"%036d" % i) for i in range(num_keys)]
    slots = np.arange(num_keys, dtype=np.int32)
    return JobMetadata(1, keys, slots, True, ReqContext(req_id))


@pytest.fixture
def link():
    opened = TierLink(engine_epoch=1)
    yield opened
    opened.close()


@pytest.fixture
def worker(link):
    """The worker's end, and a process that plays it."""
    ours, theirs = channel_pair()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1)
    link.connect(ours, os.pidfd_open(process.pid), worker_epoch=1)
    yield theirs, process
    process.kill()
    process.wait()
    process.stdin.close()
    theirs.close()


def frames_of(theirs):
    while (frame := theirs.receive()) is not None:
        yield frame


@pytest.mark.parametrize("req_id", ["\ud800x", "漢" * 500, "r" * 10_000, ""])
def test_whatever_a_request_is_called_its_frames_arrive(link, worker, req_id):
    theirs, _ = worker
    words = [announce(req_id + str(i)) for i in range(400)]
    link.send([*words, job_of(2500, req_id), FinishRequest(req_id)])
    frames = list(frames_of(theirs))
    assert max(map(len, frames)) <= MAX_FRAME_BYTES
    messages = [message for frame in frames for message in decode_to_worker(frame)]
    parts = [message for message in messages if isinstance(message, JobPart)]
    assert [(part.start, part.num_left) for part in parts] == [
        (0, 1500),
        (1000, 500),
        (2000, 0),
    ]
    assert len(messages) == len(words) + len(parts) + 1


def test_a_full_queue_keeps_the_rest_in_order(link, worker):
    theirs, _ = worker
    for i in range(200):
        link.send([announce(f"{i}-{j}" + "x" * 100) for j in range(256)])
    assert link.num_unsent > 0
    seen = []
    while len(seen) < 200 * 256:
        for frame in frames_of(theirs):
            seen += [message.req_id for message in decode_to_worker(frame)]
        link.send(())
    assert [name.partition("x")[0] for name in seen] == [
        f"{i}-{j}" for i in range(200) for j in range(256)
    ]


def test_a_death_is_proven_although_somebody_holds_the_socket(link, worker):
    """A child of the worker may keep its end open: no end of file ever comes."""
    _, process = worker
    assert link.receive() == []
    process.kill()
    process.wait()

    def downs():
        return [item for item in link.receive() if isinstance(item, TierDown)]

    found = wait_until(downs, timeout_s=10, what="the pidfd to speak")
    assert found[-1].dead
    assert link.is_vacant
