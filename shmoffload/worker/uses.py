"""What each request has used of a tier, until its last word: one use of it all.

Covers: the keys of open requests, their order over several jobs, bounds.
Pure: decides, touches no tier.
Does not cover: when the use is noted (``jobs``, ``executor``).
Who calls it: the worker's main thread.

A tier orders the keys of one call. Of a request in several jobs, as chunked prefill
makes them, the first job is the older one: its blocks, the head, would be evicted
first and leave a tail that is of no use. So a request that ends is used once more, as
a whole. What does not fit in the bounds keeps the order of its jobs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shmoffload.worker.intake import Job

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_KEYS: Final = 1 << 19
"""Of all open requests; 39 MiB, where the tier holds none of them."""
MAX_KEYS_PER_REQUEST: Final = 1 << 16
"""A million tokens in blocks of 16."""
MAX_REQUESTS: Final = 1 << 16


@dataclass(slots=True)
class _Request:
    """What is known of one; ``is_whole`` until it exceeded a bound."""

    jobs: list[tuple[list[bytes], bool]] = field(default_factory=list)
    num_keys: int = 0
    is_whole: bool = True


class Uses:
    """The open requests of one worker."""

    def __init__(
        self,
        *,
        max_keys: int = MAX_KEYS,
        max_keys_per_request: int = MAX_KEYS_PER_REQUEST,
        max_requests: int = MAX_REQUESTS,
    ) -> None:
        """Remember at most so much.

        Args:
            max_keys: of all requests.
            max_keys_per_request: of one.
            max_requests: that were announced and have not ended.
        """
        self._max_keys = max_keys
        self._max_keys_per_request = max_keys_per_request
        self._max_requests = max_requests
        self._requests: dict[str, _Request] = {}
        self.num_keys = 0

    def __len__(self) -> int:
        """Open requests."""
        return len(self._requests)

    def announce(self, req_id: str) -> None:
        """Hear the first word about a request."""
        if len(self._requests) < self._max_requests:
            self._requests.setdefault(req_id, _Request())

    def note(self, job: Job) -> None:
        """Hear that a job will run; its keys are not copied and must not change."""
        request = self._requests.get(job.req_id)
        if request is None or not request.is_whole:
            return
        num = len(job.keys)
        if (
            request.num_keys + num > self._max_keys_per_request
            or self.num_keys + num > self._max_keys
        ):
            # A half of it would be ordered wrongly: rather none.
            self._forget(request)
            return
        request.jobs.append((job.keys, job.is_promotion))
        request.num_keys += num
        self.num_keys += num

    def finish(self, req_id: str) -> Job | None:
        """Hear the last word about a request; return its use, to be queued.

        None where it had one job, whose order is right, or none, or too much.
        """
        request = self._requests.pop(req_id, None)
        if request is None:
            return None
        jobs = request.jobs
        self._forget(request)
        if len(jobs) < 2:
            return None
        keys = in_order(jobs)
        return Job(0, False, 0.0, keys, num_keys=len(keys), req_id=req_id, is_use=True)

    def _forget(self, request: _Request) -> None:
        self.num_keys -= request.num_keys
        request.jobs, request.num_keys, request.is_whole = [], 0, False


def in_order(jobs: Iterable[tuple[Sequence[bytes], bool]]) -> list[bytes]:
    """Return the keys of a request's jobs, each once, its head first.

    Each job is in order. A request goes on where it stopped, so a job of new keys
    comes after the earlier ones; but a load of new keys comes before what was stored,
    and what a job has before a known key comes before that key: both are the head
    that a request finds again after it was preempted.

    Args:
        jobs: keys, and whether they were loaded, in the order of arrival.
    """
    order: dict[bytes, None] = {}
    has_stored = False
    for keys, is_load in jobs:
        before: dict[bytes, list[bytes]] = {}
        new: list[bytes] = []
        is_known = False
        for key in keys:
            if key not in order:
                new.append(key)
                continue
            is_known = True
            if new:
                before[key], new = new, []
        if before:
            order = {k: None for key in order for k in (*before.get(key, ()), key)}
        if is_load and has_stored and not is_known:
            order = dict.fromkeys((*new, *order))
        else:
            order.update(dict.fromkeys(new))
        has_stored = has_stored or not is_load
    return list(order)
