"""Copies between rows of vLLM's primary and slots of ours, in one thread.

Covers: a queue of copies, their end, letting go of vLLM's memory.
Does not cover: which row goes where (``jobs``); GPU copies (``copies.worker``).
Who calls it: ``jobs``, scheduler thread; the copies run in a thread of ours.

A thread, because a copy costs 100 to 120 us for each MiB (measured on two cores, 64 KiB
to 2 MiB a row): a step that stores 64 MiB would take 7 ms longer. numpy lets go of
the GIL for each row. The queue needs no bound of its own: each entry holds slots,
and those are bounded.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from shmoffload.core.types import OffloadKey

log = logging.getLogger(__name__)

_Job = TypeVar("_Job")


@dataclass(slots=True, eq=False)
class RowCopies(Generic[_Job]):
    """What is copied in one go.

    Attributes:
        job: whose copies these are.
        keys: what is copied, for the caller.
        rows: rows of the primary; co-indexed with ``slots`` and ``keys``.
        slots: slots of our region.
        to_rows: from slots to rows, or the other way.
        is_copied: the copies are done; False after a failure or a cancel.
    """

    job: _Job
    keys: Sequence[OffloadKey]
    rows: Sequence[int]
    slots: Sequence[int]
    to_rows: bool
    is_copied: bool = field(default=False)


class RowCopier(Generic[_Job]):
    """Copies rows in a thread.

    Args:
        view: vLLM's primary, two-dimensional, one row a block.
        slot_view: returns the payload of a slot of ours, as long as a row.
    """

    def __init__(
        self, view: memoryview, slot_view: Callable[[int], memoryview]
    ) -> None:
        self._rows: npt.NDArray[np.uint8] | None = np.asarray(view).view(np.uint8)
        self._slot_view = slot_view
        self._changed = threading.Condition()
        self._queue: deque[RowCopies[_Job]] = deque()
        self._done: deque[RowCopies[_Job]] = deque()
        self._is_copying = False
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._run, name="shmoffload-row-copier", daemon=True
        )
        self._thread.start()

    def submit(self, copies: RowCopies[_Job]) -> None:
        """Queue copies; once closed they come back undone. Never waits."""
        with self._changed:
            (self._done if self._is_closed else self._queue).append(copies)
            self._changed.notify_all()

    def next_done(self) -> RowCopies[_Job] | None:
        """Return the next copies that have ended; None: none yet. Never waits.

        One at a time, so that a caller that fails over one does not lose the rest.
        """
        with contextlib.suppress(IndexError):
            return self._done.popleft()  # atomic; the thread only appends
        return None

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is copied or queued; False on time-out."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Cancel what is queued, end the running copy, let go of the primary.

        Returns:
            False if the copy did not end in time: the primary is still in use.
        """
        with self._changed:
            self._is_closed = True
            self._done.extend(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join(timeout_s)
        self._rows = None
        return not self._thread.is_alive()

    def _is_idle(self) -> bool:
        return not self._queue and not self._is_copying

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
                if not self._queue:
                    return
                copies = self._queue.popleft()
                self._is_copying = True
            try:
                copies.is_copied = self._copy(copies)
            finally:
                with self._changed:
                    self._is_copying = False
                    self._done.append(copies)
                    self._changed.notify_all()

    def _copy(self, copies: RowCopies[_Job]) -> bool:
        rows = self._rows
        if rows is None:
            return False
        try:
            for row, slot in zip(copies.rows, copies.slots, strict=True):
                there = np.frombuffer(self._slot_view(slot), np.uint8)
                if copies.to_rows:
                    np.copyto(rows[row], there)
                else:
                    np.copyto(there, rows[row])
        except (ValueError, IndexError):
            # A row or slot that is not there, or of another length: a job that
            # fails, not a thread that dies with it.
            log.exception("rows %s could not be copied", list(copies.rows))
            return False
        return True
