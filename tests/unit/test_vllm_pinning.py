"""Pinning with a stand-in for the CUDA runtime: pieces, failure, the end."""

import logging
import threading

import pytest

from shmoffload.testing.poll import wait_until
from shmoffload.vllm.copies.pinning import Pinning
from shmoffload.vllm.copies.transfer import SlotPart

BASE, STRIDE = 1 << 30, 12 << 10
TIMEOUT_S = 5.0


class FakeHost:
    """Keeps what is registered; may fail at one piece or stop in it."""

    def __init__(self, *, fails_at=None, gate=None, keeps=False):
        self.pinned = {}
        self.calls = []
        self.threads = set()
        self._fails_at, self._gate, self._keeps = fails_at, gate, keeps

    def register(self, address, num_bytes):
        self.threads.add(threading.current_thread())
        self.calls.append((address, num_bytes))
        if self._gate is not None:
            assert self._gate.wait(TIMEOUT_S)
        if len(self.calls) - 1 == self._fails_at:
            raise RuntimeError("out of memory (2)")
        self.pinned[address] = num_bytes

    def unregister(self, address):
        if self._keeps:
            raise RuntimeError("invalid argument (1)")
        del self.pinned[address]


def pinning_of(host, *, slots=10, max_piece_bytes=3 * STRIDE + 1):
    part = SlotPart(BASE, STRIDE, slots, 0, 8 << 10)
    return Pinning(host, part, max_piece_bytes=max_piece_bytes)


def ran(pinning):
    pinning.start()
    wait_until(lambda: not pinning.is_running, timeout_s=TIMEOUT_S, what="pinning")
    return pinning


@pytest.mark.parametrize("slots", [1, 3, 10, 12])
def test_pieces_cover_all_slots_and_end_between_two(slots):
    host = FakeHost()
    pinning = ran(pinning_of(host, slots=slots))
    place = BASE
    for address, num_bytes in host.calls:
        assert address == place
        assert num_bytes % STRIDE == 0
        assert 0 < num_bytes <= 3 * STRIDE
        place += num_bytes
    assert place == BASE + slots * STRIDE
    assert pinning.close()
    assert host.pinned == {}


def test_a_slot_larger_than_a_piece_is_a_piece():
    host = FakeHost()
    pinning = ran(pinning_of(host, slots=3, max_piece_bytes=STRIDE - 1))
    assert [num_bytes for _, num_bytes in host.calls] == [STRIDE] * 3
    assert pinning.close()


def test_nothing_happens_before_the_start_and_it_starts_once():
    host = FakeHost()
    pinning = pinning_of(host)
    assert not pinning.is_running
    assert host.calls == []
    ran(pinning)
    ran(pinning)
    assert len(host.calls) == 4
    assert len(host.threads) == 1
    assert threading.current_thread() not in host.threads
    assert pinning.close()


def test_the_start_does_not_wait():
    gate = threading.Event()
    pinning = pinning_of(FakeHost(gate=gate))
    pinning.start()
    assert pinning.is_running
    gate.set()
    assert pinning.close()


def test_a_failure_is_one_warning_and_keeps_what_is_pinned(caplog):
    host = FakeHost(fails_at=2)
    with caplog.at_level(logging.INFO, logger="shmoffload.vllm.copies.pinning"):
        pinning = ran(pinning_of(host))
    assert len(host.pinned) == 2
    assert len(host.calls) == 3
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "out of memory (2)" in record.getMessage()
    assert pinning.close()
    assert host.pinned == {}


def test_close_stops_between_two_pieces():
    gate = threading.Event()
    host = FakeHost(gate=gate)
    pinning = pinning_of(host)
    pinning.start()
    wait_until(lambda: host.calls, timeout_s=TIMEOUT_S, what="the first piece")
    assert not pinning.close(timeout_s=0.01)  # the piece under way is waited for
    gate.set()
    assert pinning.close()
    assert len(host.calls) == 1
    assert host.pinned == {}


def test_memory_that_cannot_be_unpinned_is_said_to_be_in_use(caplog):
    pinning = ran(pinning_of(FakeHost(keeps=True)))
    assert not pinning.close()
    assert "invalid argument (1)" in caplog.text


def test_close_without_a_start():
    assert pinning_of(FakeHost()).close()
