"""Pinning the slots for the GPU, piece by piece, behind the server's back.

Covers: cudaHostRegister of the whole region in bounded pieces, and its undoing.
Does not cover: copying (``vllm.copies.cuda``), making the region (``wire.region``).
Who calls it: ``vllm.copies.cuda``, in the GPU worker's main thread. **Not run on a GPU
yet**, only with a stand-in.

All calls to the driver are made by one thread of our own. CUDA remembers an error for
the thread that made it, and torch cannot ask it to forget one (its ``cudart`` has no
cudaGetLastError): in the main thread the next call of vLLM's would be blamed.

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
    from collections.abc import Callable, Iterator

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

    Args:
        host: the driver; called by this object's thread alone.
        part: of the region; all of it is pinned.
        max_piece_bytes: of one call, a slot at least.
        clock: for tests.
    """

    def __init__(
        self,
        host: HostRegister,
        part: SlotPart,
        *,
        max_piece_bytes: int = MAX_PIECE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._part = part
        self._slots_per_piece = max(1, max_piece_bytes // part.stride)
        self._clock = clock
        self._pinned: list[int] = []
        self._num_calls = 0
        self._are_gone = True
        self._stop = threading.Event()
        self._is_done = threading.Event()
        self._has_started = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin in the background; again does nothing. Never raises."""
        if self._has_started:
            return
        self._has_started = True
        thread = threading.Thread(
            target=self._run, name="shmoffload-pinning", daemon=True
        )
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            _log.warning(
                "host memory is not pinned, for no thread could be started (%s): "
                "copies to and from it are slower; raise the limits on threads "
                "(ulimit -u, the container's pids) and memory",
                error,
            )
            return
        self._thread = thread

    @property
    def is_running(self) -> bool:
        """Whether pieces are still being pinned."""
        return self._thread is not None and not self._is_done.is_set()

    def close(self, *, timeout_s: float = JOIN_TIMEOUT_S) -> bool:
        """Stop and unpin; call it when no copy is in flight, before unmapping.

        Blocks for the piece that is being pinned and for the unpinning, ``timeout_s``
        at most for each call of the driver; then, or when the driver refuses, False:
        the memory must stay mapped. Never raises.
        """
        self._stop.set()
        while self._thread is not None and self._thread.is_alive():
            num_calls = self._num_calls
            self._thread.join(timeout_s)
            if self._thread.is_alive() and self._num_calls == num_calls:
                _log.warning(
                    "the CUDA driver has been pinning or unpinning host memory for %g "
                    "s and goes on: the memory is left to the end of this process",
                    timeout_s,
                )
                return False
        return self._are_gone and not self._pinned

    def _pieces(self) -> Iterator[tuple[int, int]]:
        for first in range(0, self._part.num_slots, self._slots_per_piece):
            num_slots = min(self._slots_per_piece, self._part.num_slots - first)
            start = self._part.address + first * self._part.stride
            yield start, num_slots * self._part.stride

    def _run(self) -> None:
        """Pin, wait for the end, unpin: all that touches the driver."""
        try:
            self._pin()
        finally:
            self._is_done.set()
        self._stop.wait()  # no limit: it lasts as long as the server, and holds nothing
        self._unpin()

    def _pin(self) -> None:
        started = self._clock()
        pinned_bytes = 0
        total_bytes = self._part.num_slots * self._part.stride
        pause_s = 0.0
        for address, num_bytes in self._pieces():
            # As long as the driver held back the server's calls, they go before ours.
            if self._stop.wait(pause_s):
                return
            began = self._clock()
            try:
                self._host.register(address, num_bytes)
            except Exception as error:  # noqa: BLE001  (nothing depends on pinning)
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
            finally:
                self._num_calls += 1
            self._pinned.append(address)
            pinned_bytes += num_bytes
            pause_s = self._clock() - began
        _log.info(
            "%.2f GiB of host memory pinned in %.1f s",
            total_bytes / _GIB,
            self._clock() - started,
        )

    def _unpin(self) -> None:
        while self._pinned:
            try:
                self._host.unregister(self._pinned.pop())
            except Exception as error:  # noqa: BLE001  (the rest has to be let go of)
                _log.warning("host memory could not be unpinned: %s", error)
                self._are_gone = False
            self._num_calls += 1
