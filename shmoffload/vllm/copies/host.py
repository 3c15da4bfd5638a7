"""Copies between vLLM's KV tensors in CPU memory and the slots.

Covers: the copier of vLLM's CPU platform.
Does not cover: what is copied (``vllm.copies.transfer``), GPUs (``vllm.copies.cuda``).
Who calls it: ``worker``, in the GPU worker's main thread. Blocks for as long as the
bytes take; when ``submit`` returns they are there. vLLM's CPU kernels are done
when their call returns, so there is nothing to wait for before it either (W2).

The same address plan drives both platforms: what cannot run without a GPU is at
least planned by code that does.
"""

from __future__ import annotations

import time
from ctypes import memmove
from typing import TYPE_CHECKING

from shmoffload.vllm.copies.fence import CopyKind
from shmoffload.vllm.copies.transfer import Finished

if TYPE_CHECKING:
    from collections.abc import Collection

    from shmoffload.vllm.copies.transfer import Transfer


class HostCopier:
    """Copies at once (``vllm.copies.transfer.Copier``).

    The owner keeps KV tensors and region mapped until ``close``: addresses alone
    hold no memory.
    """

    def __init__(self) -> None:
        self._finished: list[Finished] = []

    def submit(self, transfer: Transfer, *, is_expedited: bool) -> None:
        """Copy now; FIFO by itself, and nothing is faster than at once."""
        started = time.perf_counter()
        gpu, host, sizes = (column.tolist() for column in transfer.copies)
        sources, targets = (
            (gpu, host) if transfer.kind is CopyKind.STORE else (host, gpu)
        )
        # 2.3 us for 16 KiB, 0.3 of it the call; numpy indexing with arrays of ids
        # makes a copy first and took 27 (measured).
        for source, target, num_bytes in zip(sources, targets, sizes, strict=True):
            memmove(target, source, num_bytes)
        self._finished.append(
            Finished(
                transfer.job_id,
                transfer.kind,
                transfer.ticket,
                transfer.copies.num_bytes,
                time.perf_counter() - started,
            )
        )

    def take_finished(self) -> list[Finished]:
        """Return everything since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: Collection[int]) -> None:
        """Return: whatever was submitted is done."""

    def close(self) -> bool:
        """Return True: nothing is in flight, and nothing is held."""
        return True
