"""Channels: a full queue is a result, a dead peer is seen, descriptors are safe."""

import os
import resource
import signal
import subprocess
import sys

import pytest

from shmoffload.wire.channel import (
    Channel,
    ChannelClosedError,
    DescriptorsLostError,
    channel_pair,
)
from shmoffload.wire.messages import MAX_FRAME_BYTES


@pytest.fixture
def pair():
    left, right = channel_pair()
    yield left, right
    left.close()
    right.close()


def read_to_the_end(channel):
    """Everything that comes until the end of file; may wait for the peer's death."""
    received = []
    while True:
        assert channel.wait(timeout_s=30.0)
        try:
            received.append(channel.receive())
        except ChannelClosedError:
            return received


def test_datagrams_keep_order_and_borders(pair):
    left, right = pair
    for data in (b"a", b"bb" * 1000, b"c" * MAX_FRAME_BYTES):
        assert left.send(data)
    assert right.receive() == b"a"
    assert right.receive() == b"bb" * 1000
    assert right.receive() == b"c" * MAX_FRAME_BYTES
    assert right.receive() is None
    assert right.send(b"back")
    assert left.receive() == b"back"


def test_full_queue_is_a_result_and_costs_no_wait(pair):
    left, right = pair
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    sent = 0
    while left.send(sent.to_bytes(4, "big") + bytes(40_000)):
        sent += 1
        assert sent < 10_000
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw == before
    assert sent >= 2
    assert not left.send_wait(b"late", timeout_s=0.05)
    for i in range(sent):
        assert right.receive()[:4] == i.to_bytes(4, "big")
    assert right.receive() is None
    assert left.send_wait(b"late", timeout_s=5.0)
    assert right.receive() == b"late"


def test_wait_has_a_timeout(pair):
    left, right = pair
    assert not left.wait(timeout_s=0.01)
    right.send(b"x")
    assert left.wait(timeout_s=5.0)


def test_orderly_close_is_end_of_file_after_what_was_sent(pair):
    left, right = pair
    right.send(b"last words")
    right.close()
    right.close()
    assert left.receive() == b"last words"
    with pytest.raises(ChannelClosedError):
        left.receive()
    with pytest.raises(ChannelClosedError):
        left.send(b"x")


@pytest.mark.parametrize("unread", [0, 3])
def test_sigkill_of_the_peer_is_end_of_file_after_its_replies(pair, unread):
    left, right = pair
    code = (
        "import socket, sys, time\n"
        "s = socket.socket(fileno=int(sys.argv[1]))\n"
        "[s.send(b'reply%d' % i) for i in range(4)]\n"
        "print('sent', flush=True)\n"
        "time.sleep(60)"
    )
    peer = subprocess.Popen(
        [sys.executable, "-c", code, str(right.fileno())],
        pass_fds=[right.fileno()],
        stdout=subprocess.PIPE,
    )
    with peer:
        right.close()
        assert peer.stdout.readline() == b"sent\n"
        for _ in range(unread):
            assert left.send(b"job that nobody reads")
        os.kill(peer.pid, signal.SIGKILL)
        peer.wait(30.0)
        assert read_to_the_end(left) == [b"reply0", b"reply1", b"reply2", b"reply3"]
        with pytest.raises(ChannelClosedError):
            left.send(b"x")


def test_descriptors_come_close_on_exec(pair, tmp_path):
    left, right = pair
    with open(tmp_path / "f", "w+") as file:
        assert left.send(b"take", [file.fileno(), file.fileno()])
    data, fds = right.receive_with_fds()
    assert data == b"take"
    assert len(fds) == 2
    for fd in fds:
        assert not os.get_inheritable(fd)
        os.write(fd, b"!")
        os.close(fd)
    assert (tmp_path / "f").read_text() == "!!"
    assert not os.get_inheritable(left.fileno())
    assert not os.get_inheritable(right.fileno())


def test_unwanted_descriptors_are_closed(pair):
    left, right = pair
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        left.send(b"x", [0, 1, 2])
        assert right.receive() == b"x"
    assert len(os.listdir("/proc/self/fd")) == before


def test_lost_descriptors_are_an_error_and_none_leaks(pair):
    left, right = pair
    before = os.listdir("/proc/self/fd")
    assert left.send(b"x", [0, 1, 2, 0])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, hard))
    try:
        with pytest.raises(DescriptorsLostError, match="ulimit -n"):
            right.receive_with_fds()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_channel_from_a_descriptor_does_not_block(pair):
    left, right = pair
    again = Channel.from_fd(os.dup(right.fileno()))
    assert again.receive() is None
    left.send(b"x")
    assert again.receive() == b"x"
    again.close()


def test_an_empty_datagram_is_garbage_and_no_end(pair):
    left, right = pair
    assert left.send(b"")
    assert left.send(b"next")
    assert right.receive() == b""
    assert right.receive() == b"next"
    assert right.receive() is None
    left.close()
    with pytest.raises(ChannelClosedError):
        right.receive()
