"""Copies on vLLM's CPU platform: bytes arrive, nothing else moves."""

import numpy as np
import pytest

from shmoffload.vllm.copies.fence import CopyKind
from shmoffload.vllm.copies.host import HostCopier
from shmoffload.vllm.copies.transfer import (
    KVTensor,
    LayerRef,
    SlotPart,
    Transfer,
    TransferPlanner,
)

PAGE, BLOCKS, SLOTS, STRIDE = 96, 12, 5, 512


def bytes_at_random(*shape):
    return np.random.default_rng(7).integers(0, 256, shape, dtype=np.uint8)


class Bench:
    """Two KV tensors, the second with gaps between its pages; slots of two blocks."""

    def __init__(self):
        self.plain = bytes_at_random(BLOCKS, PAGE)
        self.spaced = bytes_at_random(BLOCKS, PAGE + 32)
        self.slots = bytes_at_random(SLOTS, STRIDE)
        self.planner = TransferPlanner(
            [
                KVTensor(each.ctypes.data, each.strides[0], PAGE, BLOCKS)
                for each in (self.plain, self.spaced)
            ],
            [[LayerRef(0, PAGE), LayerRef(1, PAGE - 16)]],
            part=SlotPart(self.slots.ctypes.data, STRIDE, SLOTS, 64, 4 * PAGE),
            blocks_per_chunk=2,
        )
        self.copier = HostCopier()

    def run(self, job_id, kind, blocks, slots):
        copies = self.planner.plan(
            gpu_blocks=np.array(blocks, dtype=np.int32),
            group_sizes=[len(blocks)],
            block_indices=[0],
            slots=np.array(slots, dtype=np.int32),
        )
        transfer = Transfer(job_id, kind, job_id, copies)
        self.copier.submit(transfer, is_expedited=False)

    def pages(self, block):
        return [self.plain[block].copy(), self.spaced[block, : PAGE - 16].copy()]


def test_stored_bytes_come_back_in_other_blocks():
    bench = Bench()
    before = [bench.pages(block) for block in (3, 4, 9)]
    bench.run(1, CopyKind.STORE, [3, 4, 9], [4, 0])
    bench.plain[:], bench.spaced[:] = 0, 0
    bench.run(2, CopyKind.LOAD, [7, 1, 2], [4, 0])
    for block, pages in zip((7, 1, 2), before, strict=True):
        for is_, was in zip(bench.pages(block), pages, strict=True):
            assert np.array_equal(is_, was)


@pytest.mark.parametrize("kind", CopyKind)
def test_no_other_byte_is_written(kind):
    bench, untouched = Bench(), Bench()
    bench.run(1, kind, [3], [2])
    if kind is CopyKind.STORE:
        wrote = np.zeros((SLOTS, STRIDE), dtype=bool)
        wrote[2, 64 : 64 + PAGE] = True
        wrote[2, 64 + 2 * PAGE : 64 + 3 * PAGE - 16] = True
        assert np.array_equal(bench.slots[~wrote], untouched.slots[~wrote])
        assert np.array_equal(bench.plain, untouched.plain)
        assert np.array_equal(bench.spaced, untouched.spaced)
        assert not np.array_equal(bench.slots, untouched.slots)
    else:
        assert np.array_equal(bench.slots, untouched.slots)
        others = np.arange(BLOCKS) != 3
        assert np.array_equal(bench.plain[others], untouched.plain[others])
        assert np.array_equal(bench.spaced[others], untouched.spaced[others])
        assert np.array_equal(
            bench.spaced[3, PAGE - 16 :], untouched.spaced[3, PAGE - 16 :]
        )
        assert not np.array_equal(bench.plain, untouched.plain)


def test_results_say_size_and_time_and_come_once_in_order():
    bench = Bench()
    bench.run(5, CopyKind.LOAD, [1, 2], [0])
    bench.run(4, CopyKind.STORE, [3], [1])
    bench.copier.wait({5, 4, 99})
    first, second = bench.copier.take_finished()
    assert (first.job_id, first.kind, first.ticket) == (5, CopyKind.LOAD, 5)
    assert (second.job_id, second.kind) == (4, CopyKind.STORE)
    assert first.num_bytes == 2 * (2 * PAGE - 16)
    assert 0 < first.time_s < 10
    assert bench.copier.take_finished() == []
    assert bench.copier.close()
