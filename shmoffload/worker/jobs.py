"""The worker's two bounded queues, loads before stores.

Covers: waiting jobs, how I/O threads take them, how stores give way to loads, uses
that wait among the stores, the two ways to stop.
Does not cover: running a job (``executor``).
Who calls it: the main thread puts, I/O threads take; every wait is bounded.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shmoffload.worker.intake import Job

MAX_JOBS: Final = 4096
"""Per direction: as many as the engine's outbox holds by default."""
MAX_USE_KEYS: Final = 1 << 19
"""Of the uses that wait; one more is dropped, and costs an order at most."""
_TAKE_WAIT_S: Final = 1.0


class JobQueues:
    """Loads and stores that wait for an I/O thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._loads: deque[Job] = deque()
        self._stores: deque[Job] = deque()
        self._num_uses = 0
        self._num_use_keys = 0
        self._num_running = 0
        self.stopping = False
        """Running pieces end, nothing new starts; queued jobs are answered."""
        self.abandoned = False
        """Nobody is there to be answered."""

    def __len__(self) -> int:
        """Jobs that wait or run; uses are none."""
        num_waiting = len(self._loads) + len(self._stores) - self._num_uses
        return num_waiting + self._num_running

    def put(self, job: Job) -> bool:
        """Queue a job; False when its queue is full. Never waits."""
        with self._changed:
            queue = self._loads if job.is_promotion else self._stores
            if job.is_use:
                if self._num_use_keys + len(job.keys) > MAX_USE_KEYS:
                    return False
                self._count_use(job, 1)
            elif len(queue) - (queue is self._stores) * self._num_uses >= MAX_JOBS:
                return False
            queue.append(job)
            self._changed.notify_all()
        return True

    def _count_use(self, job: Job, sign: int) -> None:
        self._num_uses += sign
        self._num_use_keys += sign * len(job.keys)

    def take(self, *, is_promotion: bool) -> Job | None:
        """Wait for a job of one direction; None when stopping and none is left.

        The caller says ``done`` when it is through with the job, if it is no use.
        """
        queue = self._loads if is_promotion else self._stores
        with self._changed:
            while not queue:
                if self.stopping:
                    return None
                self._changed.wait(_TAKE_WAIT_S)
            job = queue.popleft()
            if job.is_use:
                self._count_use(job, -1)
            else:
                self._num_running += 1
            if not self._loads:
                self._changed.notify_all()  # a store may be giving way
        return job

    def done(self) -> None:
        """A taken job was answered."""
        with self._changed:
            self._num_running -= 1

    def give_way(self, *, timeout_s: float) -> None:
        """Wait while loads wait for a thread; the store thread, between pieces."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._loads or self.stopping, timeout=timeout_s
            )

    def stop(self, *, abandon: bool) -> None:
        """End the threads: with answers, or without when the engine is gone."""
        with self._changed:
            self.stopping = True
            if abandon:
                self.abandoned = True
                self._loads.clear()
                self._stores.clear()
                self._num_uses = self._num_use_keys = 0
            self._changed.notify_all()
