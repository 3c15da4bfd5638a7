"""Slots as vLLM's scheduler hands them to its GPU workers.

Covers: the one LoadStoreSpec of ours.
Does not cover: what is copied (``transfer``), tickets (``fence``).
Who calls it: ``vllm.manager`` makes one for each transfer; vLLM carries it to its
workers, through its own message queue and serialiser, so that the class has to be
importable there and holds plain values only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class SlotsLoadStoreSpec(BlockIDsLoadStoreSpec):
    """The slots of one transfer, in the order of its keys.

    Attributes:
        block_ids: slot ids, int32; vLLM's name for them.
        ticket: of the transfer, counted by kind (``vllm.copies.fence``).
    """

    block_ids: NDArray[np.int32]

    def __init__(self, slots: NDArray[np.int32], ticket: int) -> None:
        """Copy ``slots``, which may be a view of something that changes."""
        super().__init__(slots)
        self.ticket = ticket

    def __repr__(self) -> str:
        """Show both, for vLLM's debug log."""
        return f"SlotsLoadStoreSpec({self.block_ids.tolist()}, ticket={self.ticket})"
