"""The seams of the control plane: manager, tier, slot table.

Covers: who calls what, in which order, and what each answer promises.
Does not cover: implementations (``manager``, ``mailbox``; ``wire.region`` for the
slot table).
Who calls it: the scheduler process, one thread. No method here waits; time comes
in from outside.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from shmoffload.core.events import OffloadingEvent
    from shmoffload.core.types import (
        JobMetadata,
        JobResult,
        LookupResult,
        OffloadKey,
        PrepareStoreOutput,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
        SlotArray,
        SlotState,
    )


class OffloadingManager(abc.ABC):
    """Decides where blocks are; what a connector scheduler talks to.

    A step is: ``lookup`` per waiting request, ``prepare_load`` for admitted ones,
    ``prepare_store``, ``on_request_finished``, then ``on_schedule_end``. Calls
    are atomic: they raise before a change, or complete. Unknown, repeated and
    late calls change nothing but a counter.
    (vLLM ``kv_offload/base.py``, 0.23 to 0.33.)
    """

    @abc.abstractmethod
    def on_new_request(self, ctx: ReqContext) -> RequestOffloadingContext:
        """Announce a request before any other call for it."""

    @abc.abstractmethod
    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        """Say whether the block can be loaded; may start its promotion.

        A HIT stays true until ``on_schedule_end``.
        """

    @abc.abstractmethod
    def prepare_load(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> SlotArray:
        """Pin blocks that were answered HIT in this step, for a copy to the GPU.

        Returns:
            int32 slots, co-indexed with ``keys``; a repeated key is pinned twice.

        Raises:
            NotReadableError: a key is not readable; nothing was pinned.
        """

    @abc.abstractmethod
    def complete_load(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        """Take back the pins of one ``prepare_load``; the copy has ended."""

    @abc.abstractmethod
    def prepare_store(
        self, keys: Collection[OffloadKey], ctx: ReqContext
    ) -> PrepareStoreOutput | None:
        """Take slots for the absent keys of an offer, all of them or none.

        Returns:
            The keys to copy and their slots, or None: refused, nothing changed,
            worth offering again. No keys to store is a success.
        """

    @abc.abstractmethod
    def complete_store(
        self, keys: Collection[OffloadKey], ctx: ReqContext, success: bool = True
    ) -> None:
        """End one ``prepare_store``; on success the blocks cascade to the tiers.

        Args:
            keys: its ``keys_to_store``.
            ctx: the request that prepared it; it may have finished since.
            success: False: the blocks become absent and their slots free.
        """

    def on_request_finished(self, ctx: ReqContext) -> None:
        """Take the last word of a request; its open stores may still complete."""

    def on_schedule_end(self, ctx: ScheduleEndContext) -> None:
        """End the step: promotions queued by lookups leave now."""

    def has_pending_work(self) -> bool:
        """Say whether the engine has to step although nothing is scheduled."""
        return False

    def reset_cache(self) -> None:
        """Forget every block of the primary, without waiting for anybody."""

    def touch(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        """Mark blocks as used by the request without reading them."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return what became readable or went since the last call; each once.

        Of the primary first, then of the tiers, in order; what a tier has to say
        may come in pieces over several calls.
        """
        return ()

    def shutdown(self) -> None:
        """Stop using tiers and memory; nothing is called after it."""


class SecondaryTierManager(abc.ABC):
    """One tier behind the primary, as the manager sees it.

    For each request: announce < store and load jobs < finished, each once, in
    one order; nothing after it. A job's slots belong to it until its result was
    taken by ``get_finished_jobs``; each job is answered exactly once.
    (vLLM ``kv_offload/tiering/base.py``, 0.23 to 0.33.)

    Attributes:
        worker_epoch: incarnation of who does the work; with a new one the manager
            forgets how fast the tier was.
    """

    worker_epoch: int = 0

    def __init__(self, name: str) -> None:
        self.name = name

    @abc.abstractmethod
    def on_new_request(self, ctx: ReqContext) -> RequestOffloadingContext:
        """Say which blocks of the request this tier wants."""

    @abc.abstractmethod
    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        """Answer HIT (a load now would work), MISS, or RETRY (unknown yet).

        Anything else reads as MISS.
        """

    @abc.abstractmethod
    def submit_store(self, job: JobMetadata) -> None:
        """Accept a cascade; its slots are readable and pinned until answered."""

    @abc.abstractmethod
    def submit_load(self, job: JobMetadata) -> None:
        """Accept a promotion; its slots are PENDING and the job's until answered."""

    @abc.abstractmethod
    def get_finished_jobs(self) -> list[JobResult]:
        """Return answers since the last call; each job once, ever."""

    def on_request_incomplete(
        self, ctx: ReqContext, keys: Sequence[OffloadKey]
    ) -> None:
        """Hear which offered keys will not come, if it asked for all of them.

        Once per request, right before ``on_request_finished``; not called when
        nothing is missing.
        """

    def on_request_finished(self, ctx: ReqContext) -> None:
        """Forget the request; its jobs may still be running."""

    def on_schedule_end(self, ctx: ScheduleEndContext) -> None:
        """End the step, after its last ``submit_load``."""

    def has_pending_work(self) -> bool:
        """Say whether the tier needs the engine to keep stepping."""
        return False

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return which keys came and went; ``tier`` is set by whoever asks."""
        return ()

    def on_mirrors_cleared(self) -> None:
        """Hear that who followed the events knows nothing any more.

        At a reset of the primary vLLM announces that all is gone, everywhere; what
        the tier still holds has to be told again.
        """

    def drain_jobs(self) -> None:
        """Bring every job to its result. Never called by our manager."""

    def shutdown(self) -> None:
        """Stop touching primary memory before returning."""

    def admits(self, num_blocks: int) -> bool:
        """Say whether a cascade of ``num_blocks`` has credit now.

        The manager drops and counts what has none; it never queues it.
        """
        return True

    def room_for(self, num_blocks: int) -> int:
        """Return how many blocks of a cascade have credit, ``num_blocks`` at most."""
        return num_blocks if self.admits(num_blocks) else 0

    def withdraw(
        self, num_blocks: int, ctx: ReqContext
    ) -> Sequence[tuple[int, Collection[OffloadKey]]]:
        """Give back cascades that have not left, for the sake of a shorter request.

        Takes the ends of the cascades of requests longer than ``ctx``, of the
        longest first, ``num_blocks`` blocks at most.

        Returns:
            Job ids with the keys that were taken off them. A job that has lost
            all its keys is not answered any more.
        """
        return ()


class SlotSink(Protocol):
    """Where slot states are published; the slot table of the primary region.

    Written by the scheduler only. The generation of a slot rises by one at each
    ``hand_out``. Write order is the crash contract: see ``hand_out``.
    """

    def hand_out(
        self, slot: int, generation: int, key: OffloadKey, num_bytes: int
    ) -> None:
        """Write the word PENDING, then key and length; a job is sent only after."""

    def publish(self, slot: int, generation: int) -> None:
        """Write the word READY; the slot's last writer has answered."""

    def set_state(self, slot: int, generation: int, state: SlotState) -> None:
        """Write the word FREE or QUARANTINED."""


class NullSink:
    """A sink that keeps nothing, for tests and simulations."""

    def hand_out(
        self, slot: int, generation: int, key: OffloadKey, num_bytes: int
    ) -> None:
        """Ignore it."""

    def publish(self, slot: int, generation: int) -> None:
        """Ignore it."""

    def set_state(self, slot: int, generation: int, state: SlotState) -> None:
        """Ignore it."""
