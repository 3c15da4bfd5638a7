"""Tickets: how the scheduler knows that no GPU worker still writes a freed slot.

Covers: publishing what a GPU worker has done, waiting for all ranks after a reset.
Does not cover: what becomes of the slots (the core keeps them QUARANTINED), the
words in memory (``wire.region``).
Who calls it: ``TicketLog`` a GPU worker (``vllm.copies.worker``), ``ResetFence`` the
scheduler's manager (``vllm.manager``); each in its process's main thread. Nothing
here blocks or makes a system call.

Why: after ``reset_cache`` vLLM forgets the transfers in flight, and 0.32 never says
when they have ended; a slot given away before that is written by two. So each
transfer carries a ticket, counted by kind from 1 without holes; each rank publishes
the highest ticket up to which all are done. Words have one writer each and only
grow, so that a late look is an old truth and never a wrong one.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol


class CopyKind(IntEnum):
    """Direction of a transfer; an index of the region's words."""

    STORE = 0
    LOAD = 1


class CopyWords(Protocol):
    """The part of ``PrimaryRegion`` that is used here."""

    def copies_done(self, rank: int, kind: int) -> int:
        """Return the last ticket that a rank has published; 0 before any."""

    def set_copies_done(self, rank: int, kind: int, ticket: int) -> None:
        """Publish a ticket."""


class TicketLog:
    """What one GPU worker has done.

    Bounded: only tickets of transfers in flight wait here.
    """

    def __init__(self, region: CopyWords, rank: int) -> None:
        """Write for ``rank`` alone."""
        self._region = region
        self._rank = rank
        self._published = dict.fromkeys(CopyKind, 0)
        self._early: dict[CopyKind, set[int]] = {kind: set() for kind in CopyKind}

    def done(self, kind: CopyKind, ticket: int) -> None:
        """Note a finished transfer; call it before vLLM hears of the end.

        Two load queues and the waits of a flush end out of order: a ticket ahead of
        its turn waits for those before it.
        """
        last = self._published[kind]
        early = self._early[kind]
        is_new = ticket > last and ticket not in early
        assert is_new, f"{kind.name} ticket {ticket} is done twice"
        early.add(ticket)
        while last + 1 in early:
            last += 1
            early.remove(last)
        if last > self._published[kind]:
            self._published[kind] = last
            self._region.set_copies_done(self._rank, kind, last)


class ResetFence:
    """Counts tickets out, and after a reset tells when all of them have come back."""

    def __init__(
        self, region: CopyWords, *, num_ranks: int, num_store_ranks: int
    ) -> None:
        """Expect loads on ``num_ranks`` ranks and stores on the first few of them."""
        self._region = region
        self._num_ranks = {
            CopyKind.STORE: num_store_ranks,
            CopyKind.LOAD: num_ranks,
        }
        self._issued = dict.fromkeys(CopyKind, 0)
        self._is_held = False
        self._behind: list[tuple[int, CopyKind, int]] = []

    def next_ticket(self, kind: CopyKind) -> int:
        """Return the ticket of a transfer that will reach the GPU workers."""
        self._issued[kind] += 1
        return self._issued[kind]

    def hold(self) -> None:
        """Wait for every ticket up to now; a second reset waits for its own, later."""
        self._is_held = True
        self._behind = [
            (rank, kind, ticket)
            for kind, ticket in self._issued.items()
            for rank in range(self._num_ranks[kind])
        ]

    def is_passed(self) -> bool:
        """Say True once after ``hold``: when no rank is behind any more."""
        if not self._is_held:
            return False
        while self._behind:
            rank, kind, ticket = self._behind[-1]
            if self._region.copies_done(rank, kind) < ticket:
                return False
            self._behind.pop()
        self._is_held = False
        return True
