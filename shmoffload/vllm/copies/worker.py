"""vLLM's OffloadingWorker over our slots.

Covers: choosing a copier by platform, vLLM's types at the border, tickets, shutdown.
Does not cover: plans (``vllm.copies.transfer``), copies (``vllm.copies.host``,
``vllm.copies.cuda``).
Who calls it: ``vllm.spec`` in each GPU worker; vLLM then calls the worker in that
process's main thread. Of a replicated cache (W6) vLLM lets only rank 0 store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from shmoffload.errors import BadInputError
from shmoffload.vllm.copies.fence import CopyKind, TicketLog
from shmoffload.vllm.copies.host import HostCopier
from shmoffload.vllm.copies.transfer import (
    KVTensor,
    LayerRef,
    SlotPart,
    Transfer,
    TransferPlanner,
)
from shmoffload.wire import names

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray
    from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec

    from shmoffload.vllm.copies.slots_spec import SlotsLoadStoreSpec
    from shmoffload.vllm.copies.transfer import Copier
    from shmoffload.vllm.setup.settings import Settings
    from shmoffload.wire.region import PrimaryRegion


class ShmOffloadingWorker(OffloadingWorker):
    """Moves blocks between one rank's KV cache and the region.

    There is no failure path in vLLM (W8): what cannot be is an assertion, and a CUDA
    error an exception that ends the server with its reason.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        region: PrimaryRegion,
        settings: Settings,
        *,
        planner: TransferPlanner,
        copier: Copier,
    ) -> None:
        """Take over ``region``; use ``make_worker``."""
        self._kv_caches: CanonicalKVCaches | None = kv_caches  # owns the addresses
        self._region: PrimaryRegion | None = region
        self._session = settings.config.session.name
        self._planner = planner
        self._copier = copier
        self._tickets = TicketLog(region, settings.rank)

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: SlotsLoadStoreSpec
    ) -> bool:
        """Copy GPU blocks to slots; True always."""
        self._submit(job_id, CopyKind.STORE, src_spec, dst_spec, is_expedited=False)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: SlotsLoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Copy slots to GPU blocks; True always.

        Args:
            job_id: vLLM's.
            src_spec: slots.
            dst_spec: GPU blocks.
            expedited: vLLM 0.33: it will be waited for in this very step.
        """
        self._submit(job_id, CopyKind.LOAD, dst_spec, src_spec, is_expedited=expedited)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return what has ended since the last call; does not block."""
        results = []
        for each in self._copier.take_finished():
            # First the ticket: once vLLM has the result, the scheduler may rely on
            # every earlier ticket of this rank as well.
            self._tickets.done(each.kind, each.ticket)
            results.append(
                TransferResult(
                    job_id=each.job_id,
                    success=True,
                    transfer_size=each.num_bytes,
                    transfer_time=each.time_s,
                )
            )
        return results

    def wait(self, job_ids: Collection[int]) -> None:
        """Block until exactly these have ended (W4); unknown ids are ignored."""
        self._copier.wait(job_ids)

    def shutdown(self) -> None:
        """Let copies end, give up the region, remove what nobody holds. Twice is fine.

        Blocks for the copies in flight. Where the GPU may still reach the memory it
        stays mapped, and its name, until the process ends.
        """
        if self._region is None or not self._copier.close():
            return
        self._kv_caches = None
        self._region.close()
        self._region = None
        names.sweep(self._session)

    def _submit(
        self,
        job_id: int,
        kind: CopyKind,
        gpu: GPULoadStoreSpec,
        slots: SlotsLoadStoreSpec,
        *,
        is_expedited: bool,
    ) -> None:
        assert self._region is not None, "a transfer after shutdown"
        copies = self._planner.plan(
            gpu_blocks=gpu.block_ids,
            group_sizes=gpu.group_sizes,
            block_indices=gpu.block_indices,
            slots=slots.block_ids,
        )
        self._copier.submit(
            Transfer(job_id, kind, slots.ticket, copies), is_expedited=is_expedited
        )


def make_worker(
    kv_caches: CanonicalKVCaches, region: PrimaryRegion, settings: Settings
) -> ShmOffloadingWorker:
    """Return the worker for where the KV cache lies; it takes over ``region``.

    After a failure ``region`` is still the caller's.

    Raises:
        BadInputError: a platform or a KV layout that cannot be offloaded.
    """
    part = SlotPart(
        address=region.address(0),
        stride=region.stride,
        num_slots=region.num_slots,
        offset=settings.part_offset,
        num_bytes=settings.part_bytes,
    )
    tensors = [each.tensor for each in kv_caches.tensors]
    planner = TransferPlanner(
        [_described(each) for each in kv_caches.tensors],
        [
            [LayerRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ],
        part=part,
        blocks_per_chunk=settings.blocks_per_chunk,
    )
    platform = {tensor.device.type for tensor in tensors}
    if platform == {"cpu"}:
        copier: Copier = HostCopier()
    elif platform == {"cuda"}:
        copier = _cuda_copier(tensors, region, part)
    else:
        raise BadInputError(
            f"the KV cache lies on {sorted(platform)}, CPU or CUDA was needed: remove "
            f"--kv-transfer-config on this platform"
        )
    return ShmOffloadingWorker(
        kv_caches, region, settings, planner=planner, copier=copier
    )


def _cuda_copier(tensors: list[Any], region: PrimaryRegion, part: SlotPart) -> Copier:
    """Import and join what only a GPU needs."""
    from shmoffload.vllm.copies.cuda import CudaCopier
    from shmoffload.vllm.copies.cuda_device import TorchCudaDevice
    from shmoffload.vllm.copies.pinning import Pinning, TorchHostRegister

    device = TorchCudaDevice(tensors, bytes_of_slots(region))
    pinning = Pinning(TorchHostRegister(device.device.index or 0), part)
    return CudaCopier(device, pinning)


def bytes_of_slots(region: PrimaryRegion) -> NDArray[np.uint8]:
    """Return all slots as one writable array that keeps the region mapped."""
    first = np.frombuffer(region.slot_view(0), dtype=np.uint8)
    # The view ends with slot 0's payload, the mapping with the last slot's header.
    return np.lib.stride_tricks.as_strided(
        first, shape=(region.num_slots * region.stride,), strides=(1,)
    )


def _described(each: Any) -> KVTensor:  # noqa: ANN401  (vLLM has no types here)
    """Return the addresses of one of vLLM's KV tensors.

    Raises:
        BadInputError: it is not rows of bytes.
    """
    tensor = each.tensor
    num_blocks = tensor.shape[0]
    item_bytes = tensor.element_size()
    row = tensor[0] if num_blocks else tensor
    if not row.is_contiguous() or row.numel() * item_bytes != each.page_size_bytes:
        raise BadInputError(
            f"a KV tensor has shape {tuple(tensor.shape)} and strides "
            f"{tuple(tensor.stride())}, whole pages of {each.page_size_bytes} bytes "
            f"were needed: this KV layout cannot be offloaded; remove "
            f"--kv-transfer-config, and report the model"
        )
    return KVTensor(
        address=tensor.data_ptr(),
        stride=tensor.stride(0) * item_bytes,
        page_bytes=each.page_size_bytes,
        num_blocks=num_blocks,
    )
