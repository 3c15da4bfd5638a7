"""A GPU worker that copies late, as an asynchronous copy engine does.

Covers: holding a transfer back for some steps, in order or not, and copying when
it completes; a worker that loses stores (a planted bug).
Does not cover: copying (the worker inside does, at once).
Who calls it: ``sched_loop``, between vLLM's connector and our worker.

The bytes move when the transfer completes, not when it is submitted. Only so does a
slot that is reused too early, or a GPU block that is freed too early, show.
"""

import itertools
from dataclasses import dataclass, field

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker


@dataclass
class _Held:
    job_id: int
    is_store: bool
    is_due_at: int
    args: tuple = field(repr=False)


class LateWorker(OffloadingWorker):
    """Wraps a worker: every transfer takes up to ``max_delay`` steps.

    With ``is_fifo`` transfers of one direction complete in the order of their
    submission, as on one CUDA stream; otherwise in any order.
    """

    def __init__(self, inner, rng, *, max_delay, is_fifo):
        self.inner = inner
        self._rng = rng
        self._max_delay = max_delay
        self._is_fifo = is_fifo
        self._held = []
        self._step = 0

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._hold(job_id, True, (src_spec, dst_spec))

    def submit_load(self, job_id, src_spec, dst_spec, expedited=False):
        if expedited:
            return self.inner.submit_load(job_id, src_spec, dst_spec, expedited=True)
        return self._hold(job_id, False, (src_spec, dst_spec))

    def _hold(self, job_id, is_store, args):
        due = self._step + self._rng.randint(0, self._max_delay)
        self._held.append(_Held(job_id, is_store, due, args))
        return True

    def get_finished(self):
        self._step += 1
        blocked = set()
        for held in list(self._held):
            if held.is_due_at < self._step and held.is_store not in blocked:
                self._copy(held)
            elif self._is_fifo:
                blocked.add(held.is_store)
        return self.inner.get_finished()

    def wait(self, job_ids):
        last = {h.is_store: h for h in self._held if h.job_id in job_ids}
        for held in list(self._held):
            is_before = self._is_fifo and held.is_store in last
            if held.job_id in job_ids or is_before:
                self._copy(held)
            if held is last.get(held.is_store):
                del last[held.is_store]
        self.inner.wait(job_ids)

    def _copy(self, held):
        self._held.remove(held)
        submit = self.inner.submit_store if held.is_store else self.inner.submit_load
        assert submit(held.job_id, *held.args)

    def shutdown(self):
        self._held.clear()
        self.inner.shutdown()


class LosingWorker(OffloadingWorker):
    """A planted bug: one store of ``one_in`` leaves its slots as they were."""

    def __init__(self, inner, get_region, *, one_in):
        self.inner = inner
        self._get_region = get_region
        self._one_in = one_in
        self._count = itertools.count(1)

    def submit_store(self, job_id, src_spec, dst_spec):
        if next(self._count) % self._one_in:
            return self.inner.submit_store(job_id, src_spec, dst_spec)
        region = self._get_region()
        slots = [int(slot) for slot in dst_spec.block_ids]
        views = [np.frombuffer(region.slot_view(slot), np.uint8) for slot in slots]
        before = [view.copy() for view in views]
        answer = self.inner.submit_store(job_id, src_spec, dst_spec)
        self.inner.wait({job_id})
        for view, old in zip(views, before, strict=True):
            view[:] = old
        return answer

    def submit_load(self, job_id, src_spec, dst_spec, **words):
        return self.inner.submit_load(job_id, src_spec, dst_spec, **words)

    def get_finished(self):
        return self.inner.get_finished()

    def wait(self, job_ids):
        self.inner.wait(job_ids)

    def shutdown(self):
        self.inner.shutdown()
