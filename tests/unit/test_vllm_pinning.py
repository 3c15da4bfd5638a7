"""Pinning with a stand-in for the CUDA runtime: pieces, failure, the end."""

import contextlib
import logging
import threading

import pytest
import torch

from shmoffload.testing.poll import wait_until
from shmoffload.vllm.copies.pinning import Pinning, TorchHostRegister
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
        self.threads.add(threading.current_thread())
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
    assert pinning.close()
    assert len(host.threads) == 1  # the last one to see a CUDA error, if any
    assert threading.current_thread() not in host.threads


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


class Watch(threading.Event):
    """A stop event that notes how long it is waited for, and does not wait."""

    def __init__(self, *, last):
        super().__init__()
        self.pauses = []
        self._last = last

    def wait(self, timeout=None):
        if timeout is None:
            return super().wait(TIMEOUT_S)
        self.pauses.append(timeout)
        if len(self.pauses) == self._last:
            self.set()  # as ``close`` does
        return self.is_set()


@pytest.mark.parametrize(("last", "num_pieces"), [(3, 2), (99, 4)])
def test_the_server_has_its_turn_between_pieces_and_can_stop_there(last, num_pieces):
    now, takes = [100.0], iter([3.0, 1.0, 7.0, 2.0])

    class Slow(FakeHost):
        def register(self, address, num_bytes):
            super().register(address, num_bytes)
            now[0] += next(takes)

    host = Slow()
    part = SlotPart(BASE, STRIDE, 10, 0, 8 << 10)
    pinning = Pinning(host, part, max_piece_bytes=3 * STRIDE, clock=lambda: now[0])
    watch = pinning._stop = Watch(last=last)
    ran(pinning)
    assert len(host.calls) == num_pieces
    assert watch.pauses == [0.0, 3.0, 1.0, 7.0][: num_pieces + (last == 3)]
    assert pinning.close()
    assert host.pinned == {}


def test_a_thread_that_cannot_start_is_one_warning(monkeypatch, caplog):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    host = FakeHost()
    pinning = pinning_of(host)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        pinning.start()
        pinning.start()
    pinning.start()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "can't start new thread" in record.getMessage()
    assert not pinning.is_running
    assert pinning.close()
    assert host.calls == []


def test_close_never_raises_and_lets_go_of_the_rest(caplog):
    class Odd(FakeHost):
        def unregister(self, address):
            if address == BASE + 3 * STRIDE:
                raise AttributeError("no cudaHostUnregister here")
            super().unregister(address)

    host = Odd()
    pinning = ran(pinning_of(host))
    assert not pinning.close()
    assert list(host.pinned) == [BASE + 3 * STRIDE]
    assert "no cudaHostUnregister here" in caplog.text
    assert not pinning.close()


def test_unpinning_that_takes_long_but_goes_on_is_waited_for():
    turn = threading.Semaphore(0)

    class Slow(FakeHost):
        def unregister(self, address):
            assert turn.acquire(timeout=TIMEOUT_S)
            super().unregister(address)

    host = Slow()
    pinning = ran(pinning_of(host))
    assert not pinning.close(timeout_s=0.01)  # in one call: it is stuck
    turn.release(4)
    assert pinning.close()
    assert host.pinned == {}


class FakeCudart:
    """torch's ``cudart``, as far as it goes; notes the calls and their GPU."""

    def __init__(self, monkeypatch):
        self.calls, self.gpu, self.code = [], None, 0
        self.cudaError = int
        monkeypatch.setattr(torch.cuda, "device", self._device)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        # What torch's own CudaError asks for its words.
        monkeypatch.setattr(torch.cuda, "_cudart", self)

    @contextlib.contextmanager
    def _device(self, idx):
        self.gpu = idx
        yield
        self.gpu = None

    def cudaHostRegister(self, *args):
        self.calls.append((self.gpu, "register", *args))
        return self.code

    def cudaHostUnregister(self, *args):
        self.calls.append((self.gpu, "unregister", *args))
        return self.code

    def cudaGetErrorString(self, code):
        return {2: "out of memory"}[code]


def test_torch_is_asked_for_the_right_gpu(monkeypatch):
    cudart = FakeCudart(monkeypatch)
    pinning = ran(pinning_of(TorchHostRegister(3), slots=6))
    assert pinning.close()
    size = 3 * STRIDE
    assert cudart.calls == [
        (3, "register", BASE, size, 1),
        (3, "register", BASE + size, size, 1),
        (3, "unregister", BASE + size),
        (3, "unregister", BASE),
    ]


def test_an_error_code_of_cuda_is_a_runtime_error_with_its_words(monkeypatch, caplog):
    cudart = FakeCudart(monkeypatch)

    class Code:  # an enum of torch's
        def __int__(self):
            return 2

    cudart.code = Code()
    host = TorchHostRegister(0)
    with pytest.raises(RuntimeError, match=r"out of memory \(2\)"):
        host.register(BASE, STRIDE)
    with pytest.raises(RuntimeError, match=r"out of memory \(2\)"):
        host.unregister(BASE)
    assert ran(pinning_of(host)).close()
    assert "out of memory (2)" in caplog.text
