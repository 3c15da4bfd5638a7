"""Offers after a reset that must not be stored: their GPU blocks may be another's.

Covers: which requests vLLM may offer with GPU blocks that they no longer own.
Does not cover: the reset itself (``vllm.manager``), slots under old copies
(``vllm.copies.fence``).
Who calls it: ``vllm.manager``, in the scheduler process, one thread.

Why: with a sliding window a running request gives back GPU blocks that its window
has left. vLLM blanks them in its own table, but only from the block on that it
would store next. ``reset_cache`` sets that to 0, so that all blocks are offered
again, those among them that were given back, belong to another request by now and
have its bytes (0.32 and 0.33, ``offloading/scheduler.py``: ``_update_req_states``
and ``reset_cache``; found by tests/with_vllm/test_scheduler_loop_groups.py). The bytes
would be stored under the first request's keys. vLLM does not tell a manager which
groups have a window (0.33 does), nor which GPU blocks it offers. So a request that
has run at a reset stores nothing more, until it is preempted: then it starts again
with a fresh table. One that has never run has given nothing back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class StaleOffers:
    """The requests whose offers are answered "I want none".

    Bounded: it knows requests between their first step and their last word only.
    """

    def __init__(self, *, may_have_window: bool) -> None:
        """Distrust nobody where no group has a window."""
        self._may_have_window = may_have_window
        self._known: set[str] = set()
        self._stale: set[str] = set()

    def began(self, req_ids: Iterable[str]) -> None:
        """Note requests that run for the first time."""
        self._known.update(req_ids)

    def forget(self, req_id: str) -> None:
        """Hear a request's last word."""
        self._known.discard(req_id)
        self._stale.discard(req_id)

    def reset(self) -> None:
        """Distrust what every request that has run will offer."""
        if self._may_have_window:
            self._stale.update(self._known)

    def restart(self, req_ids: Iterable[str]) -> None:
        """Trust preempted requests again: they get new GPU blocks."""
        if self._stale:
            self._stale.difference_update(req_ids)

    def are_of(self, req_id: str) -> bool:
        """Say whether an offer of this request must not be stored."""
        return req_id in self._stale
