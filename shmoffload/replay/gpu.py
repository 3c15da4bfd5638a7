"""What plays the GPU: block tables, contents, copies to and from slots.

Covers: GPU block ids, what each GPU block holds, both copies, verification.
Does not cover: when to copy (``live``).
Who calls it: one replay, one thread; copies do not wait for anybody.

A computed GPU block holds ``bytes_of(key)`` by definition, so only its key is kept
and the bytes are made when they are copied to a slot. A loaded block counts as its
key only after every byte was compared in the buffer behind the copy; one that was
overwritten or came back wrong holds nothing, and storing it stores zeros: as on a
real GPU, a mistake spreads instead of healing itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmoffload.replay.content import BlockContent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shmoffload.core.planner_types import TransferJob
    from shmoffload.core.types import OffloadKey


class SimulatedGpu:
    """GPU memory without a limit, one GPU block per offloaded block.

    Args:
        block_bytes: payload of a block.
        slot_view: the engine's; writable payload of a slot.
        on_load: called with each load job before its slots are read, for tests.

    Attributes:
        bytes_stored: copied to slots.
        bytes_loaded: copied out of slots.
        num_bad: loaded blocks with a wrong byte.
    """

    def __init__(
        self,
        block_bytes: int,
        slot_view: Callable[[int], memoryview],
        on_load: Callable[[TransferJob], None] | None = None,
    ) -> None:
        self.bytes_stored = 0
        self.bytes_loaded = 0
        self.num_bad = 0
        self._content = BlockContent(block_bytes)
        self._slot_view = slot_view
        self._on_load = on_load
        self._holds: list[OffloadKey | None] = [None]  # block 0 is the null block
        self._free: list[int] = []
        self._landing = bytearray(block_bytes)

    def allocate(self, num_blocks: int) -> list[int]:
        """Return GPU block ids, the most recently freed first."""
        ids = [self._free.pop() for _ in range(min(num_blocks, len(self._free)))]
        while len(ids) < num_blocks:
            ids.append(len(self._holds))
            self._holds.append(None)
        return ids

    def free(self, block_ids: Sequence[int]) -> None:
        """Take GPU blocks back; they keep their content until written again."""
        self._free.extend(reversed(block_ids))

    def compute(self, block_id: int, key: OffloadKey | None) -> None:
        """Write KV into a GPU block; None: it is not complete."""
        self._holds[block_id] = key

    def store(self, job: TransferJob) -> None:
        """Copy GPU blocks to slots."""
        for block_id, slot in zip(job.gpu_block_ids, job.slots.tolist(), strict=True):
            key = self._holds[block_id]
            view = self._slot_view(slot)
            if key is None:
                view[:] = bytes(len(view))
            else:
                self._content.fill(view, key)
            self.bytes_stored += len(view)

    def load(self, job: TransferJob) -> int:
        """Copy slots to GPU blocks and compare every byte there.

        Returns:
            Blocks that were right.
        """
        if self._on_load is not None:
            self._on_load(job)
        num_right = 0
        for block_id, slot, key in zip(
            job.gpu_block_ids, job.slots.tolist(), job.keys, strict=True
        ):
            self._landing[:] = self._slot_view(slot)
            self.bytes_loaded += len(self._landing)
            is_right = self._content.verify(self._landing, key)
            self._holds[block_id] = key if is_right else None
            num_right += is_right
        self.num_bad += len(job.keys) - num_right
        return num_right
