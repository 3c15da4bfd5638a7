"""A GPU as ``vllm.copies.cuda`` sees it: torch's streams and events, vLLM's copies.

Covers: torch.cuda behind the seam; batched copies where vLLM has them, else torch's.
Does not cover: queues and order (``vllm.copies.cuda``).
Who calls it: ``vllm.copies.worker`` makes one, ``vllm.copies.cuda`` uses it; the GPU
worker's main thread. **Not run on a GPU yet**: tests put stand-ins under both.

Only the copy engines are used, never vLLM's Triton kernel: that one follows host
pointers on the GPU, which is an illegal access in memory that is not pinned yet.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import torch

from shmoffload.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    from numpy.typing import NDArray

    from shmoffload.vllm.copies.transfer import Copies

    BatchCopy = Callable[[Copies, bool], None]


class TensorCopies:
    """Copies by torch tensors, one call a range: slow, but everywhere.

    Args:
        tensors: KV tensors; their whole storages are reachable.
        host: the bytes of all slots.
    """

    def __init__(self, tensors: Iterable[Any], host: NDArray[np.uint8]) -> None:
        storages = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = torch.empty(
                0, dtype=torch.uint8, device=tensor.device
            ).set_(storage)
        self._addresses = sorted(storages)
        self._storages = [storages[address] for address in self._addresses]
        self._host = torch.from_numpy(host)

    def __call__(self, copies: Copies, is_store: bool) -> None:
        """Queue ``copies`` in the current stream."""
        for gpu, host, num_bytes in zip(
            *(column.tolist() for column in copies), strict=True
        ):
            idx = bisect_right(self._addresses, gpu) - 1
            on_gpu = self._storages[idx].narrow(
                0, gpu - self._addresses[idx], num_bytes
            )
            on_host = self._host.narrow(0, host - self._host.data_ptr(), num_bytes)
            if is_store:
                on_host.copy_(on_gpu, non_blocking=True)
            else:
                on_gpu.copy_(on_host, non_blocking=True)


def batch_copy() -> BatchCopy | None:
    """Return vLLM's batched copy (one driver call for all ranges), None if absent."""
    try:
        from vllm import _custom_ops as ops
    except ImportError:
        return None
    call = getattr(ops, "swap_blocks_batch", None)
    # The Python function is there on every platform, the kernel is not.
    kernels = getattr(torch.ops, "_C_cache_ops", None)
    if call is None or not hasattr(kernels, "swap_blocks_batch"):
        return None
    has_order = "is_src_access_order_any" in inspect.signature(call).parameters

    def copy(copies: Copies, is_store: bool) -> None:
        gpu, host, sizes = (torch.from_numpy(column) for column in copies)
        source, target = (gpu, host) if is_store else (host, gpu)
        # A load's source is a slot that nobody writes while it is pinned by the
        # core, so it may be read early. The source of a store is written by the
        # compute stream: only stream order is right there.
        order = {"is_src_access_order_any": not is_store} if has_order else {}
        call(source, target, sizes, **order)

    return copy


class TorchCudaDevice:
    """``cuda.Device`` on torch.cuda.

    Raises:
        ConfigError: the KV tensors lie on several GPUs.
    """

    def __init__(self, tensors: list[Any], host: NDArray[np.uint8]) -> None:
        """Find the best way to copy; ``tensors`` and ``host`` are kept to ``close``."""
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1:
            raise ConfigError(
                f"the KV cache of this worker lies on {sorted(map(str, devices))}, one "
                f"GPU was expected: remove --kv-transfer-config for this model"
            )
        (self.device,) = devices
        self._cuda: Any = torch.cuda  # half of it has no types
        self._copy: BatchCopy | None = batch_copy() or TensorCopies(tensors, host)

    def new_stream(self) -> Any:  # noqa: ANN401  (torch has no types here)
        """See ``Device``."""
        return self._cuda.Stream(device=self.device)

    def new_event(self) -> Any:  # noqa: ANN401
        """See ``Device``."""
        return self._cuda.Event(enable_timing=True)

    def wait_for_compute(self, stream: Any) -> None:  # noqa: ANN401
        """See ``Device``."""
        stream.wait_stream(self._cuda.current_stream(self.device))

    def record(self, event: Any, stream: Any) -> None:  # noqa: ANN401
        """See ``Device``."""
        event.record(stream)

    def copy(self, copies: Copies, stream: Any, *, is_store: bool) -> None:  # noqa: ANN401
        """See ``Device``."""
        assert self._copy is not None, "a copy after close"
        with self._cuda.stream(stream):
            self._copy(copies, is_store)

    def is_past(self, event: Any) -> bool:  # noqa: ANN401
        """See ``Device``."""
        return bool(event.query())

    def wait(self, event: Any) -> None:  # noqa: ANN401
        """See ``Device``."""
        event.synchronize()

    def time_between_s(self, start: Any, end: Any) -> float:  # noqa: ANN401
        """See ``Device``."""
        return float(start.elapsed_time(end)) / 1000

    def close(self) -> None:
        """See ``Device``."""
        self._copy = None
