"""Copies between a GPU and the slots: streams, events, order.

Covers: the copier of CUDA platforms; queues, timing, draining, errors.
Does not cover: what is copied (``vllm.copies.transfer``), the calls into torch and vLLM
(``vllm.copies.cuda_device``), pinning (``vllm.copies.pinning``).
Who calls it: ``worker``, in the GPU worker's main thread. ``submit`` does not block
once the slots are pinned; before, the driver may copy within the call.
**Not run on a GPU yet**: the tests drive it with a device that records the order.

Three queues: stores, loads, expedited loads. Each is one stream, so that in a queue
a copy begins when the one before has ended, and across queues there is no order
(W1). Every copy waits first for what the compute stream was given until now: a store
reads what the model writes, a load writes where the model may still be zeroing (W2).
"""

from __future__ import annotations

import logging
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from shmoffload.errors import ShmoffloadError
from shmoffload.vllm.copies.fence import CopyKind
from shmoffload.vllm.copies.transfer import Finished, Transfer

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from shmoffload.vllm.copies.pinning import Pinning
    from shmoffload.vllm.copies.transfer import Copies

_log = logging.getLogger(__name__)

Stream = Any
"""A device's own; opaque here."""
Event = Any


class Device(Protocol):
    """The few things asked of a GPU. Each may raise RuntimeError: a CUDA error,
    perhaps of an earlier call.
    """

    def new_stream(self) -> Stream:
        """Return a stream beside the compute stream."""

    def new_event(self) -> Event:
        """Return an event that keeps the time."""

    def wait_for_compute(self, stream: Stream) -> None:
        """Let ``stream`` wait for what the compute stream has been given."""

    def record(self, event: Event, stream: Stream) -> None:
        """Mark this point of ``stream``."""

    def copy(self, copies: Copies, stream: Stream, *, is_store: bool) -> None:
        """Queue copies in ``stream``, in no order among themselves.

        The caller keeps ``copies`` until they have ended.
        """

    def is_past(self, event: Event) -> bool:
        """Say whether the stream has come past ``event``; does not block."""

    def wait(self, event: Event) -> None:
        """Block until ``is_past``. No limit: CUDA has none to give, and a GPU that
        hangs stops the model as well.
        """

    def time_between_s(self, start: Event, end: Event) -> float:
        """Return the time from one event to another, both past."""

    def close(self) -> None:
        """Drop tensors and views."""


class _InFlight(NamedTuple):
    transfer: Transfer
    start: Event
    end: Event


class CudaCopier:
    """Copies in the background (``vllm.copies.transfer.Copier``).

    Raises:
        ShmoffloadError: from every method but ``close``, at a CUDA error. vLLM has no
            way to fail one transfer (W8), and after a CUDA error the process has to
            go: the sentence in the log is all that can be done. The slots concerned
            are never reported as done.
    """

    def __init__(self, device: Device, pinning: Pinning | None) -> None:
        """Make the queues; pin from the first transfer on."""
        self._device = device
        self._pinning = pinning
        self._free_events: list[Event] = []
        self._end_of: dict[int, Event] = {}
        with _said("making CUDA streams"):
            self._stores = _Queue(device, self._free_events)
            self._loads = _Queue(device, self._free_events)
            self._expedited = _Queue(device, self._free_events)
        self._queues = (self._stores, self._loads, self._expedited)

    def submit(self, transfer: Transfer, *, is_expedited: bool) -> None:
        """Queue a transfer behind those of its kind."""
        if self._pinning is not None:
            self._pinning.start()
        if transfer.kind is CopyKind.STORE:
            queue = self._stores
        else:
            queue = self._expedited if is_expedited else self._loads
        with _said(f"queueing {_words_for(transfer)}"):
            self._end_of[transfer.job_id] = queue.submit(transfer)

    def take_finished(self) -> list[Finished]:
        """Return what has ended, in order within a queue; does not block."""
        finished = []
        for queue in self._queues:
            finished += queue.take_finished()
        for each in finished:
            del self._end_of[each.job_id]
        return finished

    def wait(self, job_ids: Collection[int]) -> None:
        """Block until exactly these have ended; they are still to be taken."""
        for job_id in job_ids:
            event = self._end_of.get(job_id)
            if event is not None:
                with _said(f"waiting for transfer {job_id}"):
                    self._device.wait(event)

    def close(self) -> bool:
        """Wait for everything in flight, unpin, drop the tensors.

        False if the GPU may still reach the slots.
        """
        is_quiet = True
        for queue in self._queues:
            try:
                queue.drain()
            except RuntimeError as error:
                _log.warning("copies in flight ended with a CUDA error: %s", error)
                is_quiet = False
        self._end_of.clear()
        self._free_events.clear()
        if self._pinning is not None:
            is_quiet &= self._pinning.close()
        self._device.close()
        return is_quiet


class _Queue:
    """One stream and what is in it, oldest first."""

    def __init__(self, device: Device, free_events: list[Event]) -> None:
        self._device = device
        self._free_events = free_events
        self._stream = device.new_stream()
        self._in_flight: deque[_InFlight] = deque()

    def submit(self, transfer: Transfer) -> Event:
        """Queue it and return the event at its end."""
        start, end = self._event(), self._event()
        self._device.wait_for_compute(self._stream)
        self._device.record(start, self._stream)
        if len(transfer.copies.sizes):
            self._device.copy(
                transfer.copies,
                self._stream,
                is_store=transfer.kind is CopyKind.STORE,
            )
        self._device.record(end, self._stream)
        self._in_flight.append(_InFlight(transfer, start, end))
        return end

    def take_finished(self) -> list[Finished]:
        finished = []
        while self._in_flight:
            transfer, start, end = self._in_flight[0]
            with _said(_words_for(transfer)):
                if not self._device.is_past(end):
                    break
                time_s = self._device.time_between_s(start, end)
            self._in_flight.popleft()
            self._free_events += (start, end)
            finished.append(
                Finished(
                    transfer.job_id,
                    transfer.kind,
                    transfer.ticket,
                    transfer.copies.num_bytes,
                    time_s,
                )
            )
        return finished

    def drain(self) -> None:
        """Block until the stream is empty; the last event is after all others."""
        if self._in_flight:
            last = self._in_flight[-1]
            self._in_flight.clear()
            self._device.wait(last.end)

    def _event(self) -> Event:
        return (
            self._free_events.pop() if self._free_events else self._device.new_event()
        )


def _words_for(transfer: Transfer) -> str:
    return (
        f"a {transfer.kind.name.lower()} of {transfer.copies.num_bytes} bytes "
        f"(transfer {transfer.job_id})"
    )


@contextmanager
def _said(what: str) -> Iterator[None]:
    """Turn a CUDA error into the sentence that ends this server."""
    try:
        yield
    except RuntimeError as error:
        raise ShmoffloadError(
            f"{what} failed with a CUDA error: {error}. The GPU worker cannot go on "
            f"and vLLM stops; start the server again, with CUDA_LAUNCH_BLOCKING=1 if "
            f"it happens again, to see which call is at fault"
        ) from error
