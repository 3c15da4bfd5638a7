"""From parts on the queue to whole jobs that are safe to run.

Covers: epochs, key lengths, slots in range and distinct, parts in order, bounds;
notices of keys that will not come.
Pure: decides, touches no memory of the region.
Does not cover: decoding (``wire.messages``), running (``executor``).
Who calls it: the worker's main thread.

Slices of memory clip silently in Python, so nothing unchecked may pass here.
"""

from __future__ import annotations

import array
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shmoffload.core.types import GROUP_BYTES, MAX_KEY_BYTES
from shmoffload.wire.messages import MAX_KEYS_PER_JOB

if TYPE_CHECKING:
    from shmoffload.wire.messages import Incomplete, JobPart

_LATEST_S: Final = 4e9
"""126 years after boot. NaN would never pass, infinity overflows a wait."""


@dataclass(slots=True)
class Job:
    """One whole store or load, or a use that nobody asked for.

    Attributes:
        num_keys: keys that the answer speaks of, also where ``keys`` is cut short.
        error: why it must not run; "" when it may.
        req_id: on whose behalf.
        is_use: it moves no block and is not answered, see ``uses``.
    """

    job_id: int
    is_promotion: bool
    deadline_s: float
    keys: list[bytes] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    num_keys: int = 0
    error: str = ""
    req_id: str = ""
    is_use: bool = False


class BadPartError(Exception):
    """A part that no answer can be given to; the caller counts it and goes on."""


class Intake:
    """Puts the parts of a job together; holds one unfinished job at most."""

    def __init__(self, *, num_slots: int, engine_epoch: int, worker_epoch: int) -> None:
        self._num_slots = num_slots
        self._epochs = (engine_epoch, worker_epoch)
        self._open: Job | None = None
        self._cut: list[Job] = []
        self._num_left = 0

    def add(self, part: JobPart) -> Job | None:
        """Return the job when ``part`` was its last, else None.

        A job with a bad part comes out with ``error`` set, so that it is answered
        and its slots return to the engine at once rather than at the deadline.

        Raises:
            BadPartError: of another incarnation, or not the part that is due.
        """
        if (part.engine_epoch, part.worker_epoch) != self._epochs:
            raise BadPartError("a job of another incarnation")
        job = self._open
        if job is None:
            if part.start:
                raise BadPartError("the head of a job is missing")
            job = Job(
                part.job_id, part.is_promotion, part.deadline_s, req_id=part.req_id
            )
        elif (job.job_id, job.is_promotion) != (part.job_id, part.is_promotion):
            job.error = job.error or "its last parts are missing"
            self._cut.append(job)
            self._open = None
            return self.add(part)  # nothing is open: the head of a job, or refused
        elif part.num_left != self._num_left - len(part.keys):
            job.error = job.error or "parts of the job are missing"
        job.num_keys += len(part.keys)
        job.error = job.error or self._fault(part) or self._take(job, part)
        if part.num_left > 0:
            self._open, self._num_left = job, part.num_left
            return None
        self._open = None
        if not job.error and not _all_distinct(job):
            job.error = "a key or a slot occurs twice"
        return job

    def take_cut(self) -> list[Job]:
        """Return jobs that another one began in the middle of, to be refused."""
        cut, self._cut = self._cut, []
        return cut

    def note(self, notice: Incomplete) -> list[bytes]:
        """Return the keys that a request will not bring.

        Raises:
            BadPartError: something in it is no key.
        """
        if not _are_keys(notice.keys):
            raise BadPartError("a notice names what is no key")
        return notice.keys

    def _fault(self, part: JobPart) -> str:
        if not _are_keys(part.keys):
            return f"a key has not {GROUP_BYTES + 1} to {MAX_KEY_BYTES} bytes"
        if len(part.slots) != 4 * len(part.keys):
            return "keys and slots differ in number"
        if not abs(part.deadline_s) <= _LATEST_S:
            return f"its deadline is {part.deadline_s}, which is no time"
        return ""

    def _take(self, job: Job, part: JobPart) -> str:
        if job.num_keys > MAX_KEYS_PER_JOB:
            job.keys.clear()
            job.slots.clear()
            return f"more than {MAX_KEYS_PER_JOB} keys in a job"
        slots = array.array("i", part.slots)
        if sys.byteorder == "big":
            slots.byteswap()
        if slots and (min(slots) < 0 or max(slots) >= self._num_slots):
            return f"a slot is outside 0 to {self._num_slots - 1}"
        job.keys += part.keys
        job.slots += slots
        return ""


def _are_keys(keys: list[bytes]) -> bool:
    return all(GROUP_BYTES < len(key) <= MAX_KEY_BYTES for key in keys)


def _all_distinct(job: Job) -> bool:
    return len(set(job.keys)) == len(job.keys) and len(set(job.slots)) == len(job.slots)
