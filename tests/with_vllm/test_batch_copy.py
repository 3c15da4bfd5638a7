"""vLLM's batched GPU copy as we call it, down to a kernel that moves bytes here.

Covers: ``cuda_device.batch_copy`` through vLLM's own Python function and torch's
dispatcher, with the kernel's schema (vLLM csrc/torch_bindings.cpp, 0.32 and 0.33).
Does not cover: the kernel itself, which needs a GPU.
"""

import ctypes
import inspect

import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops

from shmoffload.vllm.copies import cuda_device
from shmoffload.vllm.copies.transfer import Copies

SCHEMA = (
    "swap_blocks_batch(Tensor src_ptrs, Tensor dst_ptrs, Tensor sizes, "
    "bool is_src_access_order_any) -> ()"
)


class Kernel:
    """Moves bytes as the kernel of a CUDA build does; keeps the flag of each call."""

    def __init__(self):
        self.may_read_early = []

    def __call__(self, src_ptrs, dst_ptrs, sizes, is_src_access_order_any):
        self.may_read_early.append(is_src_access_order_any)
        columns = (src_ptrs, dst_ptrs, sizes)
        for column in columns:  # what cache_kernels.cu checks
            assert column.dtype == torch.int64
            assert column.device.type == "cpu"
            assert column.is_contiguous()
        for source, target, num_bytes in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            ctypes.memmove(target, source, num_bytes)


@pytest.fixture
def kernel():
    kernel = Kernel()
    library = torch.library.Library("_C_cache_ops", "FRAGMENT")
    library.define(SCHEMA)
    library.impl("swap_blocks_batch", kernel, "CPU")
    yield kernel
    library._destroy()


class Memory:
    """A GPU's and the slots', with ranges that differ on both sides."""

    def __init__(self):
        rng = np.random.default_rng(7)
        self.gpu, self.host = (
            rng.integers(0, 256, 400, dtype=np.uint8) for _ in range(2)
        )
        self.ranges = [(10, 300, 40), (200, 0, 1), (90, 120, 100)]
        at_gpu, at_host, sizes = np.array(self.ranges, dtype=np.int64).T
        self.copies = Copies(
            np.ascontiguousarray(at_gpu + self.gpu.ctypes.data),
            np.ascontiguousarray(at_host + self.host.ctypes.data),
            np.ascontiguousarray(sizes),
        )


def test_a_store_reads_the_gpu_in_stream_order_and_writes_slots(kernel):
    memory = Memory()
    gpu, expected = memory.gpu.copy(), memory.host.copy()
    for at_gpu, at_host, size in memory.ranges:
        expected[at_host : at_host + size] = gpu[at_gpu : at_gpu + size]
    cuda_device.batch_copy()(memory.copies, True)
    assert np.array_equal(memory.host, expected)
    assert np.array_equal(memory.gpu, gpu)
    # The model still writes what a store reads: only stream order is right.
    assert kernel.may_read_early == [False]


def test_a_load_may_read_slots_early_and_writes_the_gpu(kernel):
    memory = Memory()
    host, expected = memory.host.copy(), memory.gpu.copy()
    for at_gpu, at_host, size in memory.ranges:
        expected[at_gpu : at_gpu + size] = host[at_host : at_host + size]
    cuda_device.batch_copy()(memory.copies, False)
    assert np.array_equal(memory.gpu, expected)
    assert np.array_equal(memory.host, host)
    assert kernel.may_read_early == [True]


def test_vllms_function_has_the_signature_that_we_call():
    parameters = inspect.signature(ops.swap_blocks_batch).parameters
    assert list(parameters) == [
        "src_ptrs", "dst_ptrs", "sizes", "is_src_access_order_any",
    ]  # fmt: skip


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("is_store", [True, False])
def test_an_older_function_without_the_flag_is_called_without(monkeypatch, is_store):
    calls = []

    def older(src_ptrs, dst_ptrs, sizes):
        calls.append([each.tolist() for each in (src_ptrs, dst_ptrs, sizes)])

    monkeypatch.setattr(ops, "swap_blocks_batch", older)
    copies = Memory().copies
    cuda_device.batch_copy()(copies, is_store)
    gpu, host, sizes = (column.tolist() for column in copies)
    assert calls == [[gpu, host, sizes] if is_store else [host, gpu, sizes]]


def test_a_gpu_device_prefers_it(kernel):
    tensor = torch.zeros(8, dtype=torch.int8)
    device = cuda_device.TorchCudaDevice([tensor], np.zeros(8, dtype=np.uint8))
    assert not isinstance(device._copy, cuda_device.TensorCopies)


def test_without_the_kernel_there_is_none():
    assert cuda_device.batch_copy() is None  # this is vLLM's CPU build


@pytest.mark.usefixtures("kernel")
def test_without_the_function_there_is_none(monkeypatch):
    monkeypatch.delattr(ops, "swap_blocks_batch")
    assert cuda_device.batch_copy() is None
