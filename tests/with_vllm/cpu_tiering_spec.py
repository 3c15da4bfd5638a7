"""vLLM's own ``TieringOffloadingSpec`` on the host platform, for tests.

Covers: GPU copies by numpy where vLLM's worker refuses to run without a GPU.
Does not cover: anything else; manager, primary and tiers are vLLM's own.
Who calls it: a server under test: ``"spec_name": "CpuTieringSpec",
"spec_module_path": "cpu_tiering_spec"`` with this folder on PYTHONPATH.
"""

from unittest import mock

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.tiering import spec as vllm_spec


class HostRowsWorker(OffloadingWorker):
    """Copies at once, in the calling thread."""

    def __init__(
        self,
        kv_caches,
        blocks_per_chunk,
        num_cpu_chunks,
        mmap_region,
        canonical_layout=False,
    ):
        assert not canonical_layout
        self._blocks_per_chunk = blocks_per_chunk
        self._region = mmap_region
        self._kv = [tensor.tensor.numpy() for tensor in kv_caches.tensors]
        self._rows = [
            mmap_region.create_next_worker_view(kv.shape[1] * blocks_per_chunk).numpy()
            for kv in self._kv
        ]
        self._groups = [
            [ref.tensor_idx for ref in refs] for refs in kv_caches.group_data_refs
        ]
        self._finished = []

    def submit_store(self, job_id, src_spec, dst_spec):
        num_bytes = 0
        for kv, row in self._pairs(src_spec, dst_spec):
            row[:] = kv
            num_bytes += kv.nbytes
        return self._end(job_id, num_bytes)

    def submit_load(self, job_id, src_spec, dst_spec, expedited=False):
        num_bytes = 0
        for kv, row in self._pairs(dst_spec, src_spec):
            kv[:] = row
            num_bytes += kv.nbytes
        return self._end(job_id, num_bytes)

    def get_finished(self):
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids):
        pass

    def shutdown(self):
        self._rows.clear()
        self._region.cleanup()

    def _end(self, job_id, num_bytes):
        self._finished.append(
            TransferResult(
                job_id=job_id,
                success=True,
                transfer_size=num_bytes,
                transfer_time=1e-4,
            )
        )
        return True

    def _pairs(self, gpu_spec, cpu_spec):
        """Yield (GPU block, its place in a row), one pair a block and tensor."""
        per_chunk = self._blocks_per_chunk
        blocks = iter(gpu_spec.block_ids.tolist())
        chunks = cpu_spec.chunk_ids.tolist()
        for group, size, first in zip(
            self._groups, gpu_spec.group_sizes, gpu_spec.block_indices, strict=True
        ):
            if not size:
                continue
            skip = first % per_chunk
            num_chunks = -(-(skip + size) // per_chunk)
            mine, chunks = chunks[:num_chunks], chunks[num_chunks:]
            for place in range(skip, skip + size):
                block, chunk = next(blocks), mine[place // per_chunk]
                for idx in group:
                    page = self._kv[idx].shape[1]
                    begin = place % per_chunk * page
                    row = self._rows[idx][chunk, begin : begin + page]
                    yield self._kv[idx][block], row


class CpuTieringSpec(vllm_spec.TieringOffloadingSpec):
    def get_worker(self, kv_caches):
        if not self._worker:
            with mock.patch.object(vllm_spec, "CPUOffloadingWorker", HostRowsWorker):
                self._worker = self.create_worker(kv_caches)
        return self._worker
