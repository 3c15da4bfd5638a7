"""The calls into torch for a GPU, made to stand-ins; there is no GPU here."""

import contextlib

import numpy as np
import pytest
import torch

from shmoffload.errors import ConfigError
from shmoffload.vllm.copies.cuda import CudaCopier
from shmoffload.vllm.copies.cuda_device import TensorCopies, TorchCudaDevice, batch_copy
from shmoffload.vllm.copies.fence import CopyKind
from shmoffload.vllm.copies.transfer import Copies, Transfer

STORE, LOAD = CopyKind.STORE, CopyKind.LOAD


def test_copies_by_tensors_reach_every_storage_and_no_other_byte():
    shared = torch.arange(0, 200, dtype=torch.uint8).view(torch.int8)
    tensors = [
        shared[:80].view(8, 10),
        shared[80:160].view(8, 10),
        torch.full((4, 16), 7, dtype=torch.int8),
    ]
    host = np.zeros(300, dtype=np.uint8)
    copy = TensorCopies(tensors, host)

    def copies(*ranges):
        return Copies(
            np.array([tensors[t].data_ptr() + at for t, at, _, _ in ranges]),
            np.array([host.ctypes.data + at for _, _, at, _ in ranges]),
            np.array([size for _, _, _, size in ranges]),
        )

    copy(copies((0, 10, 5, 20), (1, 70, 100, 10), (2, 48, 290, 10)), True)
    expected = np.zeros(300, dtype=np.uint8)
    expected[5:25] = np.arange(10, 30)
    expected[100:110] = np.arange(150, 160)
    expected[290:] = 7
    assert np.array_equal(host, expected)
    host[:] = 99
    copy(copies((1, 3, 40, 4), (2, 0, 0, 16)), False)
    assert torch.equal(shared[83:87], torch.full((4,), 99, dtype=torch.int8))
    assert torch.equal(
        torch.cat([shared[:83], shared[87:]]).view(torch.uint8),
        torch.cat([torch.arange(83), torch.arange(87, 200)]).to(torch.uint8),
    )
    assert tensors[2][0].tolist() == [99] * 16
    assert tensors[2][1:].unique().tolist() == [7]
    assert (host == 99).all()


def test_without_vllm_or_its_kernel_there_is_no_batched_copy():
    assert batch_copy() is None


def test_kv_tensors_on_two_devices_are_refused():
    tensors = [torch.zeros(1), torch.zeros(1, device="meta")]
    with pytest.raises(ConfigError, match="lies on"):
        TorchCudaDevice(tensors, np.zeros(1, dtype=np.uint8))


class FakeStream:
    def __init__(self, log, name, device=None):
        self.log, self.name, self.device = log, name, device

    def wait_stream(self, other):
        self.log.append((self.name, "waits for", other.name))


class FakeEvent:
    def __init__(self, log, *, enable_timing=False):
        assert enable_timing  # without, CUDA refuses ``elapsed_time``
        self.log, self.at_ms, self.is_past = log, 0, False

    def record(self, stream):
        self.log.append((stream.name, "record"))
        self.at_ms = 250 * len(self.log)

    def query(self):
        return self.is_past

    def synchronize(self):
        self.is_past = True

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms


class FakeCuda:
    """torch.cuda's streams and events; the log says what was asked of which."""

    def __init__(self, monkeypatch):
        self.log, self.streams, self.current = [], [], []
        self.compute = FakeStream(self.log, "compute")
        monkeypatch.setattr(torch.cuda, "Stream", self._new_stream)
        monkeypatch.setattr(torch.cuda, "Event", lambda **kw: FakeEvent(self.log, **kw))
        monkeypatch.setattr(torch.cuda, "stream", self._stream)
        monkeypatch.setattr(torch.cuda, "current_stream", self._current_stream)

    def _new_stream(self, device):
        stream = FakeStream(self.log, f"s{len(self.streams)}", device)
        self.streams.append(stream)
        return stream

    def _current_stream(self, device):
        assert str(device) == "cpu", device
        return self.current[-1] if self.current else self.compute

    @contextlib.contextmanager
    def _stream(self, stream):
        self.current.append(stream)
        yield
        self.current.pop()


def test_torchs_streams_and_events_are_used_as_they_are_meant(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    tensor = torch.arange(40, dtype=torch.int8).view(4, 10)
    host = np.zeros(100, dtype=np.uint8)
    device = TorchCudaDevice([tensor], host)
    copy = device._copy

    def watched(copies, is_store):
        cuda.log.append((cuda.current[-1].name, "store" if is_store else "load"))
        copy(copies, is_store)

    device._copy = watched
    copier = CudaCopier(device, None)
    assert [stream.device for stream in cuda.streams] == [torch.device("cpu")] * 3

    def moved(job_id, kind, at_gpu, at_host):
        copies = Copies(
            np.array([tensor.data_ptr() + at_gpu]),
            np.array([host.ctypes.data + at_host]),
            np.array([10]),
        )
        copier.submit(Transfer(job_id, kind, job_id, copies), is_expedited=False)

    moved(1, STORE, 10, 50)
    moved(2, LOAD, 30, 50)
    assert cuda.log == [
        ("s0", "waits for", "compute"),
        ("s0", "record"),
        ("s0", "store"),
        ("s0", "record"),
        ("s1", "waits for", "compute"),
        ("s1", "record"),
        ("s1", "load"),
        ("s1", "record"),
    ]
    assert not cuda.current
    assert copier.take_finished() == []
    copier.wait({2})
    (second,) = copier.take_finished()
    assert (second.job_id, second.time_s) == (2, 0.5)  # of 500 ms: two log lines
    assert copier.close()  # synchronises with the first
    assert host[50:60].tolist() == list(range(10, 20))
    assert tensor[3].tolist() == list(range(10, 20))
    with pytest.raises(AssertionError, match="after close"):
        device.copy(Copies(*[np.zeros(1, int)] * 3), cuda.streams[0], is_store=True)
