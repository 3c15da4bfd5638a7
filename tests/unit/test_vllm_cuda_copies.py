"""The CUDA copier with a device that records the order; there is no GPU here."""

import gc
import weakref

import numpy as np
import pytest

from shmoffload.errors import ShmoffloadError
from shmoffload.vllm.copies.cuda import CudaCopier
from shmoffload.vllm.copies.fence import CopyKind
from shmoffload.vllm.copies.transfer import Copies, Transfer

STORE, LOAD = CopyKind.STORE, CopyKind.LOAD


class FakeDevice:
    """Streams that are lists of operations; the test says how far each one is."""

    def __init__(self):
        self.streams = []
        self.past = set()
        self.events = 0
        self.waited = []
        self.is_closed = False
        self.broken = None

    def _may_fail(self, what):
        if self.broken == what:
            raise RuntimeError("an illegal memory access was encountered")

    def new_stream(self):
        self.streams.append([])
        return self.streams[-1]

    def new_event(self):
        self.events += 1
        return self.events

    def wait_for_compute(self, stream):
        stream.append("compute")

    def record(self, event, stream):
        self.past.discard(event)  # an event that is used again starts anew
        stream.append(event)

    def copy(self, copies, stream, *, is_store):
        self._may_fail("copy")
        stream.append(("store" if is_store else "load", copies))

    def is_past(self, event):
        self._may_fail("query")
        return event in self.past

    def wait(self, event):
        self._may_fail("wait")
        self.waited.append(event)
        for stream in self.streams:
            if event in stream:
                self.run(stream, upto=event)

    def time_between_s(self, start, end):
        assert {start, end} <= self.past
        return 0.25

    def close(self):
        self.is_closed = True

    def run(self, stream, upto=None):
        """Let a stream come past ``upto``, or to its end."""
        for operation in stream:
            if isinstance(operation, int):
                self.past.add(operation)
            if operation == upto:
                break


class FakePinning:
    def __init__(self, *, can_close=True):
        self.starts = 0
        self.closed_with = None
        self._can_close = can_close

    def start(self):
        self.starts += 1

    def close(self):
        self.closed_with = True
        return self._can_close


def transfer(job_id, kind, num_bytes=100):
    sizes = np.array([num_bytes] if num_bytes else [], dtype=np.int64)
    return Transfer(job_id, kind, job_id, Copies(sizes, sizes, sizes))


@pytest.fixture
def device():
    return FakeDevice()


@pytest.fixture
def copier(device):
    return CudaCopier(device, None)


def submit(copier, job_id, kind, *, is_expedited=False, num_bytes=100):
    copier.submit(transfer(job_id, kind, num_bytes), is_expedited=is_expedited)


def finished(copier):
    return [each.job_id for each in copier.take_finished()]


def test_each_copy_waits_for_compute_and_lies_between_its_events(copier, device):
    submit(copier, 1, STORE)
    submit(copier, 2, STORE)
    stream = device.streams[0]
    assert [each[0] if isinstance(each, tuple) else each for each in stream] == [
        "compute", 1, "store", 2, "compute", 3, "store", 4,
    ]  # fmt: skip


def test_stores_loads_and_expedited_loads_have_a_stream_each(copier, device):
    submit(copier, 1, STORE)
    submit(copier, 2, LOAD)
    submit(copier, 3, LOAD, is_expedited=True)
    kinds = [
        [each[0] for each in stream if isinstance(each, tuple)]
        for stream in device.streams
    ]
    assert kinds == [["store"], ["load"], ["load"]]
    device.run(device.streams[2])  # behind no regular load
    assert finished(copier) == [3]


def test_in_a_queue_results_come_in_order(copier, device):
    for job_id in (1, 2, 3):
        submit(copier, job_id, LOAD)
    assert finished(copier) == []
    device.run(device.streams[1], upto=4)
    assert finished(copier) == [1, 2]
    device.run(device.streams[1])
    (last,) = copier.take_finished()
    assert (last.job_id, last.kind, last.ticket) == (3, LOAD, 3)
    assert (last.num_bytes, last.time_s) == (100, 0.25)
    assert finished(copier) == []


def test_a_flush_waits_for_exactly_the_named(copier, device):
    for job_id in (1, 2):
        submit(copier, job_id, STORE)
    submit(copier, 3, LOAD)
    copier.wait({1, 3, 77})
    assert sorted(device.waited) == [2, 6]
    assert sorted(finished(copier)) == [1, 3]
    copier.wait({1})  # over and done with
    assert sorted(device.waited) == [2, 6]


def test_events_are_used_again(copier, device):
    for job_id in range(1, 20):
        submit(copier, job_id, STORE)
        device.run(device.streams[0])
        assert finished(copier) == [job_id]
    assert device.events == 2


def test_an_event_is_of_one_transfer_at_a_time(copier, device):
    for round_ in range(3):
        for job_id in range(3):
            submit(copier, 10 * round_ + job_id, LOAD)
        in_use = [each for each in device.streams[1] if isinstance(each, int)][-6:]
        assert len(set(in_use)) == 6
        device.run(device.streams[1])
        assert len(finished(copier)) == 3
    assert device.events == 6


def test_a_copy_that_has_begun_has_not_ended(copier, device):
    submit(copier, 1, STORE)
    device.run(device.streams[0], upto=1)
    assert device.past == {1}
    assert finished(copier) == []


def test_an_event_used_again_does_not_end_the_next_transfer_early(copier, device):
    submit(copier, 1, STORE)
    device.run(device.streams[0])
    assert finished(copier) == [1]
    submit(copier, 2, LOAD)
    assert finished(copier) == []


def test_a_transfer_of_nothing_ends_in_its_turn(copier, device):
    submit(copier, 1, LOAD)
    submit(copier, 2, LOAD, num_bytes=0)
    assert finished(copier) == []
    device.run(device.streams[1])
    assert finished(copier) == [1, 2]


def test_descriptors_live_until_the_copy_has_ended(device, monkeypatch):
    """The driver may read them as late as the copy; we keep them, the device not."""
    kept = []

    def copy(copies, stream, *, is_store):
        kept.append([weakref.ref(column) for column in copies])
        stream.append("copy")

    monkeypatch.setattr(device, "copy", copy)
    copier = CudaCopier(device, None)

    def columns_alive():
        gc.collect()
        return [all(ref() is not None for ref in refs) for refs in kept]

    for job_id in (1, 2):
        columns = (np.array([job_id * 100 + i]) for i in range(3))
        submitted = Transfer(job_id, LOAD, job_id, Copies(*columns))
        copier.submit(submitted, is_expedited=False)
        del submitted, columns
    assert columns_alive() == [True, True]
    assert finished(copier) == []
    assert columns_alive() == [True, True]
    device.run(device.streams[1], upto=3)  # into the second copy
    copier.wait({1})
    assert columns_alive() == [True, True]
    assert finished(copier) == [1]
    assert finished(copier) == []
    assert columns_alive() == [False, True]
    device.run(device.streams[1])
    assert finished(copier) == [2]
    assert columns_alive() == [False, False]


@pytest.mark.parametrize("broken", ["copy", "query", "wait"])
def test_a_cuda_error_ends_it_with_its_reason(copier, device, broken):
    submit(copier, 1, STORE)
    device.broken = broken
    calls = {
        "copy": lambda: submit(copier, 2, LOAD),
        "query": copier.take_finished,
        "wait": lambda: copier.wait({1}),
    }
    with pytest.raises(ShmoffloadError, match="illegal memory access") as caught:
        calls[broken]()
    assert "start the server again" in str(caught.value)
    assert "transfer" in str(caught.value)


def test_close_drains_all_queues_before_it_unpins(device):
    class Watching(FakePinning):
        def close(self):
            assert sorted(device.waited) == [4, 6]
            return super().close()

    pinning = Watching()
    copier = CudaCopier(device, pinning)
    submit(copier, 1, STORE)
    submit(copier, 2, STORE)
    submit(copier, 3, LOAD)
    assert copier.close()
    assert pinning.closed_with
    assert device.is_closed
    assert copier.close()
    assert finished(copier) == []


def test_close_says_when_the_gpu_may_still_write(device, caplog):
    copier = CudaCopier(device, None)
    submit(copier, 1, STORE)
    device.broken = "wait"
    assert not copier.close()
    assert "illegal memory access" in caplog.text
    stuck = CudaCopier(FakeDevice(), FakePinning(can_close=False))
    assert not stuck.close()


def test_pinning_begins_with_the_first_transfer(device):
    pinning = FakePinning()
    copier = CudaCopier(device, pinning)
    copier.take_finished()
    copier.wait({1})
    assert pinning.starts == 0  # CUDA graphs may be being captured
    submit(copier, 1, LOAD)
    assert pinning.starts == 1
