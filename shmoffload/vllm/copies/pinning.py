"""Pinning the slots for the GPU, piece by piece, behind the server's back.

Covers: cudaHostRegister of the whole region in bounded pieces, and its undoing.
Does not cover: copying (``vllm.copies.cuda``), making the region (``wire.region``).
Who calls it: ``vllm.copies.cuda``, in the GPU worker's main thread; the registering
runs in a thread of its own. **Not run on a GPU yet**, only with a stand-in.

Pinning makes copies faster and truly asynchronous; they are right without it, also
while it is under way, because a piece ends where a slot ends and so no copy lies in
two. It begins with the first transfer and not at the start: vLLM captures its CUDA
graphs in between, in a mode in which such a call from any thread breaks the capture
(vllm-project/vllm issue 46933: error 900, or a hang).

Every rank pins the whole region, because it is a mapping of its own in each process.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmoffload.vllm.copies.transfer import SlotPart

_log = logging.getLogger(__name__)

MAX_PIECE_BYTES: Final = 256 << 20
"""What one call takes; meanwhile the driver may hold back other threads' calls."""
JOIN_TIMEOUT_S: Final = 30.0
_PORTABLE: Final = 1  # cudaHostRegisterPortable: for every context of the process
_GIB: Final = 1 << 30


class HostRegister(Protocol):
    """What the CUDA runtime does for us."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin a range for this process's GPU; RuntimeError with the reason."""

    def unregister(self, address: int) -> None:
        """Let go of a range that begins at ``address``; RuntimeError likewise."""


class TorchHostRegister:
    """``HostRegister`` through torch, which gives up the GIL in both calls."""

    def __init__(self, device_idx: int) -> None:
        """Work for one GPU."""
        import torch

        self._cuda: Any = torch.cuda  # half of it has no types
        self._device_idx = device_idx

    def register(self, address: int, num_bytes: int) -> None:
        """See ``HostRegister``."""
        # The current device belongs to the thread: without this a thread of rank 1
        # would make a context, hundreds of MiB, on GPU 0.
        with self._cuda.device(self._device_idx):
            runtime = self._cuda.cudart()
            self._check(runtime.cudaHostRegister(address, num_bytes, _PORTABLE))

    def unregister(self, address: int) -> None:
        """See ``HostRegister``."""
        with self._cuda.device(self._device_idx):
            self._check(self._cuda.cudart().cudaHostUnregister(address))

    def _check(self, result: Any) -> None:  # noqa: ANN401  (torch's enum)
        code = int(result)
        if code:
            raise self._cuda.CudaError(code)


class Pinning:
    """The pinned pieces of one process.

    A failure is one warning; what is pinned until then stays, the rest is copied as
    pageable memory.
    """

    def __init__(
        self,
        host: HostRegister,
        part: SlotPart,
        *,
        max_piece_bytes: int = MAX_PIECE_BYTES,
    ) -> None:
        """Plan the pieces; nothing is pinned before ``start``."""
        self._host = host
        self._part = part
        self._slots_per_piece = max(1, max_piece_bytes // part.stride)
        self._pinned: list[int] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin in the background; again does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="shmoffload-pinning", daemon=True
            )
            self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether pieces are still being pinned."""
        return self._thread is not None and self._thread.is_alive()

    def close(self, *, timeout_s: float = JOIN_TIMEOUT_S) -> bool:
        """Stop and unpin; call it when no copy is in flight, before unmapping.

        Blocks for the piece that is under way, ``timeout_s`` at most; then, or when
        the driver refuses, False: the memory must stay mapped.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                _log.warning(
                    "the CUDA driver has pinned host memory for %.0f s and goes on: "
                    "the memory is left to the end of this process",
                    timeout_s,
                )
                return False
        are_gone = True
        while self._pinned:
            try:
                self._host.unregister(self._pinned.pop())
            except RuntimeError as error:
                _log.warning("host memory could not be unpinned: %s", error)
                are_gone = False
        return are_gone

    def _pieces(self) -> Iterator[tuple[int, int]]:
        for first in range(0, self._part.num_slots, self._slots_per_piece):
            num_slots = min(self._slots_per_piece, self._part.num_slots - first)
            start = self._part.address + first * self._part.stride
            yield start, num_slots * self._part.stride

    def _run(self) -> None:
        """Pin piece after piece; the one thread that appends to ``_pinned``."""
        started = time.monotonic()
        pinned_bytes = 0
        total_bytes = self._part.num_slots * self._part.stride
        for address, num_bytes in self._pieces():
            if self._stop.is_set():
                return
            try:
                self._host.register(address, num_bytes)
            except RuntimeError as error:
                # CUDA remembers the error for this thread alone, and it ends here:
                # no later call of vLLM's is blamed for it.
                _log.warning(
                    "only %.2f of %.2f GiB of host memory could be pinned (%s): copies "
                    "to and from the rest are slower; raise the limits on locked "
                    "memory (ulimit -l, the container's memory) or lower "
                    "cpu_bytes_to_use",
                    pinned_bytes / _GIB,
                    total_bytes / _GIB,
                    error,
                )
                return
            self._pinned.append(address)
            pinned_bytes += num_bytes
        _log.info(
            "%.2f GiB of host memory pinned in %.1f s",
            total_bytes / _GIB,
            time.monotonic() - started,
        )
