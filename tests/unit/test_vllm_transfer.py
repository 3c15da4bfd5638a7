"""Byte ranges of a transfer, against a model that walks block by block."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmoffload.errors import ConfigError
from shmoffload.vllm.copies.transfer import (
    KVTensor,
    LayerRef,
    SlotPart,
    TransferPlanner,
)

GPU_BLOCKS = 40
SLOTS = 24


@st.composite
def layouts(draw):
    """KV tensors side by side or apart, groups over some of them, a part of a slot."""
    per_chunk = draw(st.integers(1, 4))
    tensors = []
    address = 1 << 40
    for _ in range(draw(st.integers(1, 4))):
        page = draw(st.integers(1, 6))
        stride = page + draw(st.sampled_from([0, 0, 3]))
        tensors.append(KVTensor(address, stride, page, GPU_BLOCKS))
        address += GPU_BLOCKS * stride + draw(st.sampled_from([0, 64]))
    groups = [
        [
            LayerRef(idx, draw(st.integers(1, tensors[idx].page_bytes)))
            for idx in draw(
                st.lists(st.integers(0, len(tensors) - 1), min_size=1, max_size=4)
            )
        ]
        for _ in range(draw(st.integers(1, 3)))
    ]
    part_bytes = per_chunk * sum(tensor.page_bytes for tensor in tensors)
    rank = draw(st.integers(0, 2))
    part = SlotPart(
        address=1 << 30,
        stride=3 * part_bytes + draw(st.integers(0, 9)),
        num_slots=SLOTS,
        offset=rank * part_bytes,
        num_bytes=part_bytes,
    )
    return tensors, groups, part, per_chunk


@st.composite
def requests(draw, num_groups, per_chunk):
    """What vLLM asks: runs of GPU blocks with gaps, a first block anywhere."""
    sizes = [draw(st.integers(0, 9)) for _ in range(num_groups)]
    indices = [draw(st.integers(0, 11)) for _ in range(num_groups)]
    blocks = []
    while len(blocks) < sum(sizes):
        first = draw(st.integers(0, GPU_BLOCKS - 1))
        blocks += range(first, min(first + draw(st.integers(1, 6)), GPU_BLOCKS))
    touched = 0
    for size, index in zip(sizes, indices, strict=True):
        touched += len({(index + i) // per_chunk for i in range(size)})
    slots = draw(st.permutations(range(SLOTS)))[:touched]
    if draw(st.booleans()):
        slots.sort()
    return blocks[: sum(sizes)], sizes, indices, slots


def model(layout, request):
    """Pairs (GPU byte, slot byte), by the definition of a slot."""
    tensors, groups, part, per_chunk = layout
    blocks, sizes, indices, slots = (list(each) for each in request)
    pairs = set()
    for refs, size, index in zip(groups, sizes, indices, strict=True):
        slot_of = {}
        for place in range(index, index + size):
            block = blocks.pop(0)
            if place // per_chunk not in slot_of:
                slot_of[place // per_chunk] = slots.pop(0)
            slot = slot_of[place // per_chunk]
            for ref in refs:
                area = per_chunk * sum(each.page_bytes for each in tensors[: ref[0]])
                tensor = tensors[ref.tensor_idx]
                for byte in range(ref.num_bytes):
                    pairs.add(
                        (
                            tensor.address + block * tensor.stride + byte,
                            part.address
                            + slot * part.stride
                            + part.offset
                            + area
                            + place % per_chunk * tensor.page_bytes
                            + byte,
                        )
                    )
    return pairs


def planner_of(layout):
    tensors, groups, part, per_chunk = layout
    return TransferPlanner(tensors, groups, part=part, blocks_per_chunk=per_chunk)


def plan(layout, request):
    blocks, sizes, indices, slots = request
    return planner_of(layout).plan(
        gpu_blocks=np.array(blocks, dtype=np.int32),
        group_sizes=sizes,
        block_indices=indices,
        slots=np.array(slots, dtype=np.int32),
    )


def bytes_of(copies):
    return [
        (gpu + i, host + i)
        for gpu, host, size in zip(*(each.tolist() for each in copies), strict=True)
        for i in range(size)
    ]


@given(data=st.data())
def test_exactly_the_bytes_of_the_definition(data):
    layout = data.draw(layouts())
    request = data.draw(requests(len(layout[1]), layout[3]))
    copies = plan(layout, request)
    pairs = bytes_of(copies)
    assert set(pairs) == model(layout, request)
    assert len(pairs) == copies.num_bytes
    assert all(column.dtype == np.int64 for column in copies)
    assert all(column.flags.c_contiguous for column in copies)


@given(data=st.data())
def test_a_range_stays_in_one_tensor_and_one_part(data):
    layout = data.draw(layouts())
    tensors, _, part, _ = layout
    copies = plan(layout, data.draw(requests(len(layout[1]), layout[3])))
    for gpu, host, size in zip(*(each.tolist() for each in copies), strict=True):
        assert any(
            each.address <= gpu
            and gpu + size <= each.address + GPU_BLOCKS * each.stride
            for each in tensors
        )
        within = (host - part.address) % part.stride - part.offset
        assert within >= 0
        assert within + size <= part.num_bytes


def one_tensor(*, per_chunk, page=8, part_bytes=None):
    part = SlotPart(0, 4096, SLOTS, 0, part_bytes or per_chunk * page)
    return (
        [KVTensor(1 << 40, page, page, GPU_BLOCKS)],
        [[LayerRef(0, page)]],
        part,
        per_chunk,
    )


def test_neighbours_are_one_range():
    layout = one_tensor(per_chunk=4)
    copies = plan(layout, ([10, 11, 12, 13, 20, 21, 5, 6], [8], [0], [3, 4]))
    assert copies.sizes.tolist() == [32, 16, 16]


def test_a_first_block_in_the_middle_of_a_slot():
    copies = plan(one_tensor(per_chunk=4), ([10, 20, 30], [3], [7], [3, 4]))
    base = 1 << 40
    assert copies.gpu.tolist() == [base + 80, base + 160, base + 240]
    assert copies.host.tolist() == [3 * 4096 + 24, 4 * 4096, 4 * 4096 + 8]


def test_nothing_to_copy_is_no_range():
    assert plan(one_tensor(per_chunk=2), ([], [0], [5], [])).num_bytes == 0


def test_addresses_of_a_large_region_do_not_wrap():
    part = SlotPart(1 << 46, 1 << 28, 1 << 20, 0, 8)
    tensors = [KVTensor(1 << 40, 1 << 20, 8, 1 << 20)]
    layout = tensors, [[LayerRef(0, 8)]], part, 1
    copies = plan(layout, ([(1 << 20) - 1], [1], [0], [(1 << 20) - 1]))
    assert copies.gpu.tolist() == [(1 << 40) + ((1 << 20) - 1) * (1 << 20)]
    assert copies.host.tolist() == [(1 << 46) + ((1 << 20) - 1) * (1 << 28)]


def test_tensors_that_do_not_fit_into_the_part_are_refused():
    with pytest.raises(
        ConfigError, match="take 32 bytes of a block, vLLM announced 31"
    ):
        planner_of(one_tensor(per_chunk=4, part_bytes=31))


@pytest.mark.parametrize(
    "request_",
    [
        ([0], [1, 0], [0, 0], [0]),  # a group too many
        ([GPU_BLOCKS], [1], [0], [0]),
        ([-1], [1], [0], [0]),
        ([0], [1], [0], [SLOTS]),
        ([0], [1], [0], [-1]),
        ([0, 1], [2], [1], [0]),  # touches two slots
        ([0, 1], [2], [0], [0, 1]),  # touches one
        ([0, 1], [1], [0], [0]),  # a block without a group
    ],
)
def test_a_request_that_does_not_add_up_is_a_bug(request_):
    with pytest.raises(AssertionError):
        plan(one_tensor(per_chunk=2), request_)
