"""From GPU block ids and slot ids to the byte ranges that are copied.

Covers: where a GPU block's page lies in a slot, partial first and last blocks,
several KV groups, merging neighbours; the seam between worker and copier.
Does not cover: copying (``vllm.copies.host``, ``vllm.copies.cuda``).
Who calls it: ``vllm.copies.worker``, in a GPU worker's main thread. Pure: it computes
addresses and never follows one, so the plan for a GPU is tested without one.

A slot is rank-major (W10): each rank has one part. In a part each KV tensor has
its area, in the order that vLLM lists them, and an area has ``blocks_per_chunk``
pages: ``[t0 page 0][t0 page 1]..[t1 page 0]..``. A block of a KV group fills only
the areas of its own layers; nobody reads the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

from shmoffload.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from shmoffload.vllm.copies.fence import CopyKind

    Ints = NDArray[np.int64]


class KVTensor(NamedTuple):
    """Where one KV tensor of the GPU lies: block ``b`` at ``address + b * stride``."""

    address: int
    stride: int
    page_bytes: int
    """Padded page, which is what its area in a slot is made for."""
    num_blocks: int


class LayerRef(NamedTuple):
    """What a KV group has in one tensor."""

    tensor_idx: int
    num_bytes: int
    """Of a page without padding: what is copied."""


class SlotPart(NamedTuple):
    """Where this rank's part of each slot lies."""

    address: int
    """Of slot 0, in this process."""
    stride: int
    num_slots: int
    offset: int
    """Of the part inside a slot."""
    num_bytes: int


class Copies(NamedTuple):
    """Byte ranges, one an index; which side is the source is the caller's choice."""

    gpu: Ints
    host: Ints
    sizes: Ints

    @property
    def num_bytes(self) -> int:
        """Bytes of all ranges."""
        return int(self.sizes.sum())


_NOTHING: Final = Copies(*(np.empty(0, dtype=np.int64) for _ in Copies._fields))


class Transfer(NamedTuple):
    """One job of vLLM's for a copier."""

    job_id: int
    kind: CopyKind
    ticket: int
    copies: Copies


class Finished(NamedTuple):
    """A transfer whose bytes are all there."""

    job_id: int
    kind: CopyKind
    ticket: int
    num_bytes: int
    time_s: float


class Copier(Protocol):
    """What moves the bytes; all calls from the GPU worker's main thread."""

    def submit(self, transfer: Transfer, *, is_expedited: bool) -> None:
        """Begin a transfer; in order inside its queue."""

    def take_finished(self) -> list[Finished]:
        """Return what ended since the last call; does not block."""

    def wait(self, job_ids: Collection[int]) -> None:
        """Block until exactly these have ended (W4); unknown ids are ignored."""

    def close(self) -> bool:
        """Let everything end, give up device and views; never raises.

        False: the slots have to stay mapped until the process ends.
        """


class TransferPlanner:
    """Plans copies for the KV tensors of one GPU worker.

    Args:
        tensors: in vLLM's order, which is the order of the areas.
        groups: for each KV group its layers; two of one group in one tensor are
            one copy.
        part: of this rank.
        blocks_per_chunk: GPU blocks in a slot.

    Raises:
        ConfigError: the tensors need more than the part has.
    """

    def __init__(
        self,
        tensors: Sequence[KVTensor],
        groups: Sequence[Sequence[LayerRef]],
        *,
        part: SlotPart,
        blocks_per_chunk: int,
    ) -> None:
        needed = sum(tensor.page_bytes for tensor in tensors) * blocks_per_chunk
        if needed > part.num_bytes:
            raise ConfigError(
                f"this worker's KV cache has {len(tensors)} tensors that take {needed} "
                f"bytes of a block, vLLM announced {part.num_bytes}: this KV layout "
                f"cannot be offloaded; remove --kv-transfer-config, and report the "
                f"model"
            )
        self._part = part
        self._per_chunk = blocks_per_chunk
        self._num_blocks = min((tensor.num_blocks for tensor in tensors), default=0)
        self._groups = [
            _LayersOfGroup(tensors, refs, blocks_per_chunk) for refs in groups
        ]

    def plan(
        self,
        *,
        gpu_blocks: NDArray[np.int32],
        group_sizes: Sequence[int],
        block_indices: Sequence[int],
        slots: NDArray[np.int32],
    ) -> Copies:
        """Return what one transfer copies, neighbours merged.

        Args:
            gpu_blocks: those of group 0, then of group 1, and so on.
            group_sizes: how many of each group.
            block_indices: of each group the place of its first GPU block in the
                request, in GPU blocks; it may be in the middle of a slot.
            slots: in the same order; a group takes as many as its blocks touch.
        """
        assert len(group_sizes) == len(block_indices) == len(self._groups), (
            f"{len(group_sizes)} group sizes and {len(block_indices)} indices for "
            f"{len(self._groups)} KV groups"
        )
        self._check(gpu_blocks, slots)
        parts = [_NOTHING]
        first_block = first_slot = 0
        for layers, size, index in zip(
            self._groups, group_sizes, block_indices, strict=True
        ):
            if not size:
                continue
            skipped = index % self._per_chunk
            end_block = first_block + size
            end_slot = first_slot + -(-(skipped + size) // self._per_chunk)
            assert end_slot <= len(slots), (
                f"{end_slot} slots touched, {len(slots)} given"
            )
            place = np.arange(skipped, skipped + size, dtype=np.int64)
            row = slots[first_slot + place // self._per_chunk].astype(np.int64)
            parts.append(
                layers.ranges(
                    gpu_blocks[first_block:end_block].astype(np.int64),
                    self._part.address + self._part.offset + row * self._part.stride,
                    place % self._per_chunk,
                )
            )
            first_block, first_slot = end_block, end_slot
        assert (first_block, first_slot) == (len(gpu_blocks), len(slots)), (
            f"{first_block} of {len(gpu_blocks)} GPU blocks and {first_slot} of "
            f"{len(slots)} slots are spoken for"
        )
        return Copies(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def _check(self, gpu_blocks: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        """Refuse ids that lead out of the memory; a copy would be a wild write."""
        for ids, limit, what in (
            (gpu_blocks, self._num_blocks, "GPU block"),
            (slots, self._part.num_slots, "slot"),
        ):
            assert not len(ids) or (ids.min() >= 0 and ids.max() < limit), (
                f"{what} ids {ids.min()}..{ids.max()} are not all in 0..{limit - 1}"
            )


class _LayersOfGroup:
    """A KV group's layers as columns, to be broadcast against its blocks."""

    def __init__(
        self,
        tensors: Sequence[KVTensor],
        refs: Sequence[LayerRef],
        blocks_per_chunk: int,
    ) -> None:
        widest: dict[int, int] = {}
        for ref in refs:
            assert ref.num_bytes <= tensors[ref.tensor_idx].page_bytes, (
                f"{ref} is larger than the page of {tensors[ref.tensor_idx]}"
            )
            widest[ref.tensor_idx] = max(widest.get(ref.tensor_idx, 0), ref.num_bytes)
        area = 0
        areas = []
        for tensor in tensors:
            areas.append(area)
            area += tensor.page_bytes * blocks_per_chunk
        used = list(widest)
        self._address = _column([tensors[idx].address for idx in used])
        self._stride = _column([tensors[idx].stride for idx in used])
        self._page = _column([tensors[idx].page_bytes for idx in used])
        self._area = _column([areas[idx] for idx in used])
        self._size = _column(list(widest.values()))

    def ranges(self, blocks: Ints, parts: Ints, pages: Ints) -> Copies:
        """Return one range a layer and run of blocks."""
        gpu = self._address + blocks * self._stride
        host = self._area + pages * self._page + parts
        sizes = np.broadcast_to(self._size, gpu.shape)
        # Within a layer only: two KV tensors may be allocations that lie side by
        # side by chance, and a CUDA copy must not span two.
        begins = np.ones(gpu.shape, dtype=bool)
        begins[:, 1:] = (gpu[:, 1:] != gpu[:, :-1] + sizes[:, :-1]) | (
            host[:, 1:] != host[:, :-1] + sizes[:, :-1]
        )
        first = np.flatnonzero(begins)
        return Copies(
            gpu.ravel()[first],
            host.ravel()[first],
            np.add.reduceat(sizes.ravel(), first) if len(first) else first,
        )


def _column(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64).reshape(-1, 1)
