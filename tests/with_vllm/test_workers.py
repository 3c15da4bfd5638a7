"""Our worker with vLLM's own classes and a real region: bytes there and back."""

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)

from shmoffload.errors import BadInputError, ConfigError
from shmoffload.vllm.copies.fence import CopyKind, ResetFence
from shmoffload.vllm.copies.slots_spec import SlotsLoadStoreSpec
from shmoffload.vllm.copies.worker import bytes_of_slots, make_worker
from shmoffload.vllm.setup.settings import Settings
from shmoffload.wire import names
from shmoffload.wire.config import from_dict
from shmoffload.wire.region import PrimaryRegion

STORE, LOAD = CopyKind.STORE, CopyKind.LOAD
BLOCKS, SLOTS = 40, 16
PAGES = (512, 768, 512)
PART_PAGE_BYTES = sum(PAGES)
GROUPS = [[(0, 512), (1, 700)], [(2, 512)], [(1, 768)]]
"""Full attention over two tensors, padded in one; a window; one that shares."""


class Rank:
    """A GPU worker: KV tensors of its own, one mapping of the common region."""

    def __init__(self, session, *, rank, num_ranks, per_chunk, is_replicated=False):
        part_bytes = PART_PAGE_BYTES * per_chunk
        num_parts = 1 if is_replicated else num_ranks
        config = from_dict(
            {
                "session": {"name": session},
                "primary": {"slots": SLOTS, "block_bytes": part_bytes * num_parts},
            }
        )
        self.settings = Settings(
            config=config,
            num_ranks=num_ranks,
            rank=rank,
            is_replicated=is_replicated,
            part_bytes=part_bytes,
            blocks_per_chunk=per_chunk,
            has_events=False,
            tier_events=(),
            notes=(),
        )
        generator = torch.Generator().manual_seed(rank)
        # As vLLM's CPU platform has it: all layers in one storage.
        storage = torch.randint(
            -128,
            128,
            (BLOCKS * PART_PAGE_BYTES,),
            dtype=torch.int8,
            generator=generator,
        )
        self.tensors = [
            part.view(BLOCKS, page)
            for part, page in zip(
                storage.split([BLOCKS * page for page in PAGES]), PAGES, strict=True
            )
        ]
        self.region = PrimaryRegion.open(config)
        self.worker = make_worker(self.kv_caches(), self.region, self.settings)

    def kv_caches(self):
        return CanonicalKVCaches(
            tensors=[
                CanonicalKVCacheTensor(tensor, page)
                for tensor, page in zip(self.tensors, PAGES, strict=True)
            ],
            group_data_refs=[
                [CanonicalKVCacheRef(idx, num_bytes) for idx, num_bytes in refs]
                for refs in GROUPS
            ],
        )

    def pages(self, group, block):
        return [
            self.tensors[idx][block, :num_bytes].clone()
            for idx, num_bytes in GROUPS[group]
        ]


@pytest.fixture
def start(session_name):
    ranks = []

    def start(**settings):
        ranks.append(Rank(session_name, **settings))
        return ranks[-1]

    yield start
    for rank in ranks:
        rank.worker.shutdown()
    assert not Path(names.SHM_DIR + names.region_name(session_name)).exists()


def by_group(sizes, blocks):
    ids = iter(blocks)
    return [[next(ids) for _ in range(size)] for size in sizes]


def slots_touched(sizes, indices, per_chunk):
    return sum(
        len({(index + i) // per_chunk for i in range(size)})
        for size, index in zip(sizes, indices, strict=True)
    )


@pytest.mark.parametrize("per_chunk", [1, 2, 4])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_stored_blocks_come_back_in_other_blocks(start, per_chunk, num_ranks, seed):
    rng = np.random.default_rng(seed)
    ranks = [
        start(rank=rank, num_ranks=num_ranks, per_chunk=per_chunk)
        for rank in range(num_ranks)
    ]
    sizes, indices = [5, 3, 2], [int(each) for each in rng.integers(0, 9, 3)]
    old, new = (rng.permutation(BLOCKS - 1)[:10] + 1 for _ in range(2))
    old[1] = old[0] + 1 if old[0] + 1 not in old else old[1]  # neighbours, maybe
    num_slots = slots_touched(sizes, indices, per_chunk)
    slots = rng.permutation(SLOTS)[:num_slots].astype(np.int32)
    kept = [
        [
            rank.pages(group, block)
            for group, blocks in enumerate(by_group(sizes, old))
            for block in blocks
        ]
        for rank in ranks
    ]
    for rank in ranks:
        gpu = GPULoadStoreSpec([int(each) for each in old], sizes, indices)
        assert rank.worker.submit_store(1, gpu, SlotsLoadStoreSpec(slots, 1)) is True
    for rank in ranks:
        for tensor in rank.tensors:
            tensor.zero_()
        gpu = GPULoadStoreSpec([int(each) for each in new], sizes, indices)
        assert rank.worker.submit_load(2, SlotsLoadStoreSpec(slots, 1), gpu) is True
    for rank, pages in zip(ranks, kept, strict=True):
        there = [
            rank.pages(group, block)
            for group, blocks in enumerate(by_group(sizes, new))
            for block in blocks
        ]
        for is_, was in zip(there, pages, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(is_, was, strict=True))
        results = rank.worker.get_finished()
        assert [each.job_id for each in results] == [1, 2]
        assert all(each.success for each in results)
        assert all(
            each.transfer_size == 5 * 1212 + 3 * 512 + 2 * 768 for each in results
        )
        assert all(each.transfer_time > 0 for each in results)
        assert rank.worker.get_finished() == []


def test_of_a_replicated_cache_all_load_what_rank_0_stored(start):
    ranks = [
        start(rank=rank, num_ranks=2, per_chunk=2, is_replicated=True)
        for rank in range(2)
    ]
    gpu = GPULoadStoreSpec([3, 4], [2, 0, 0], [0, 0, 0])
    spec = SlotsLoadStoreSpec(np.array([7], dtype=np.int32), 1)
    ranks[0].worker.submit_store(1, gpu, spec)
    ranks[1].worker.submit_load(2, spec, gpu)
    for block in (3, 4):
        for a, b in zip(
            ranks[0].pages(0, block), ranks[1].pages(0, block), strict=True
        ):
            assert torch.equal(a, b)


def test_a_ticket_is_published_before_vllm_hears_of_the_end(start):
    rank = start(rank=0, num_ranks=1, per_chunk=1)
    fence = ResetFence(rank.region, num_ranks=1, num_store_ranks=1)
    slots = np.array([2], dtype=np.int32)
    gpu = GPULoadStoreSpec([3], [1, 0, 0], [0, 0, 0])
    spec = SlotsLoadStoreSpec(slots, fence.next_ticket(STORE))
    fence.hold()
    rank.worker.submit_store(9, gpu, spec)
    rank.worker.wait({9, 10})
    assert not fence.is_passed()
    assert [each.job_id for each in rank.worker.get_finished()] == [9]
    assert rank.region.copies_done(0, STORE) == 1
    assert rank.region.copies_done(0, LOAD) == 0
    assert fence.is_passed()


def test_an_expedited_load_is_a_load(start):
    rank = start(rank=0, num_ranks=1, per_chunk=1)
    gpu = GPULoadStoreSpec([3], [1, 0, 0], [0, 0, 0])
    spec = SlotsLoadStoreSpec(np.array([2], dtype=np.int32), 1)
    assert rank.worker.submit_load(1, spec, gpu, expedited=True) is True
    assert rank.region.copies_done(0, LOAD) == 0
    assert [each.job_id for each in rank.worker.get_finished()] == [1]
    assert rank.region.copies_done(0, LOAD) == 1


def test_shutdown_gives_memory_and_name_back_and_twice_is_fine(start, session_name):
    path = Path(names.SHM_DIR + names.region_name(session_name))
    first = start(rank=0, num_ranks=2, per_chunk=1)
    second = start(rank=1, num_ranks=2, per_chunk=1)
    first.worker.shutdown()
    first.worker.shutdown()
    assert first.region.fd == -1
    assert path.exists()  # the other one holds it
    second.worker.shutdown()
    assert not path.exists()
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_the_array_of_slots_reaches_exactly_to_the_end_and_keeps_the_memory(
    session_name,
):
    config = from_dict(
        {
            "session": {"name": session_name},
            "primary": {"slots": 3, "block_bytes": 5000},
        }
    )
    region = PrimaryRegion.open(config)
    array = bytes_of_slots(region)
    assert array.nbytes == 3 * region.stride
    region.header_view(2)[-1] = 77
    assert array[-1] == 77
    array[region.stride] = 78
    assert region.slot_view(1)[0] == 78
    region.unlink()
    region.close()
    assert array[-1] == 77


def test_pages_that_do_not_fit_are_refused_and_the_region_stays_ours(start):
    rank = start(rank=0, num_ranks=1, per_chunk=2)
    settings = dataclasses.replace(rank.settings, part_bytes=3583)
    with pytest.raises(ConfigError, match=r"take 3584 bytes.*announced 3583"):
        make_worker(rank.kv_caches(), rank.region, settings)
    assert rank.region.fd >= 0


def test_a_tensor_that_is_no_row_of_bytes_is_refused(start):
    rank = start(rank=0, num_ranks=1, per_chunk=1)
    caches = rank.kv_caches()
    caches.tensors[1].tensor = caches.tensors[1].tensor.t()
    with pytest.raises(BadInputError, match="a KV tensor has shape"):
        make_worker(caches, rank.region, rank.settings)


def test_another_platform_is_refused(start):
    rank = start(rank=0, num_ranks=1, per_chunk=1)
    caches = rank.kv_caches()
    for tensor, page in zip(caches.tensors, PAGES, strict=True):
        tensor.tensor = torch.empty((BLOCKS, page), dtype=torch.int8, device="meta")
    with pytest.raises(BadInputError, match=r"lies on \['meta'\]"):
        make_worker(caches, rank.region, rank.settings)


def test_the_spec_survives_vllms_way_to_its_workers():
    slots = np.array([5, 1, 9], dtype=np.int64)
    spec = SlotsLoadStoreSpec(slots, 12)
    slots[:] = 0
    assert spec.block_ids.dtype == np.int32
    # What vLLM's message queue does with a class is what a deep copy does; the
    # servers of the other tests take the whole way.
    arrived = copy.deepcopy(spec)
    assert isinstance(arrived, SlotsLoadStoreSpec)
    assert arrived.block_ids.tolist() == [5, 1, 9]
    assert arrived.ticket == 12
    assert repr(arrived) == "SlotsLoadStoreSpec([5, 1, 9], ticket=12)"
