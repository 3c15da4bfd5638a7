"""Tickets: a rank publishes no gap, a reset waits for every rank and only then."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmoffload.vllm.copies.fence import CopyKind, ResetFence, TicketLog

STORE, LOAD = CopyKind.STORE, CopyKind.LOAD


class Words:
    """What a region has: words that start at 0; writes are kept in order."""

    def __init__(self):
        self.words = {}
        self.writes = []

    def copies_done(self, rank, kind):
        return self.words.get((rank, kind), 0)

    def set_copies_done(self, rank, kind, ticket):
        self.words[rank, kind] = ticket
        self.writes.append((rank, kind, ticket))


def test_tickets_count_from_one_by_kind():
    fence = ResetFence(Words(), num_ranks=1, num_store_ranks=1)
    assert [fence.next_ticket(STORE), fence.next_ticket(STORE)] == [1, 2]
    assert fence.next_ticket(LOAD) == 1


def test_a_ticket_ahead_of_its_turn_waits_for_those_before():
    words = Words()
    log = TicketLog(words, 3)
    log.done(LOAD, 2)
    log.done(LOAD, 4)
    assert words.writes == []
    log.done(LOAD, 1)
    log.done(LOAD, 3)
    log.done(STORE, 1)
    assert words.writes == [(3, LOAD, 2), (3, LOAD, 4), (3, STORE, 1)]


@pytest.mark.parametrize("again", [1, 2, 4])
def test_a_ticket_done_twice_is_our_bug(again):
    log = TicketLog(Words(), 0)
    for ticket in (1, 2, 4):
        log.done(LOAD, ticket)
    with pytest.raises(AssertionError, match="done twice"):
        log.done(LOAD, again)


@given(order=st.integers(1, 12).flatmap(lambda n: st.permutations(range(1, n + 1))))
def test_published_is_what_has_no_gap_below(order):
    words = Words()
    log = TicketLog(words, 0)
    seen = set()
    for ticket in order:
        log.done(STORE, ticket)
        seen.add(ticket)
        full = next(n for n in range(len(order) + 1) if n + 1 not in seen)
        assert words.copies_done(0, STORE) == full
    assert not any(log._early.values())


def test_without_a_reset_nothing_passes():
    assert not ResetFence(Words(), num_ranks=1, num_store_ranks=1).is_passed()


def test_nothing_in_flight_passes_at_once_and_once():
    fence = ResetFence(Words(), num_ranks=4, num_store_ranks=4)
    fence.hold()
    assert fence.is_passed()
    assert not fence.is_passed()


def test_every_rank_and_kind_must_be_past():
    words = Words()
    fence = ResetFence(words, num_ranks=2, num_store_ranks=2)
    logs = [TicketLog(words, rank) for rank in range(2)]
    store, load = fence.next_ticket(STORE), fence.next_ticket(LOAD)
    fence.hold()
    for log, kind, ticket in (
        (logs[1], STORE, store),
        (logs[0], LOAD, load),
        (logs[1], LOAD, load),
    ):
        assert not fence.is_passed()
        log.done(kind, ticket)
    assert not fence.is_passed()
    logs[0].done(STORE, store)
    assert fence.is_passed()
    assert not fence.is_passed()


def test_of_a_replicated_cache_only_rank_0_stores():
    words = Words()
    fence = ResetFence(words, num_ranks=3, num_store_ranks=1)
    fence.next_ticket(STORE)
    fence.hold()
    TicketLog(words, 0).done(STORE, 1)
    assert fence.is_passed()
    fence.next_ticket(LOAD)
    fence.hold()
    for rank in range(3):
        assert not fence.is_passed()
        TicketLog(words, rank).done(LOAD, 1)
    assert fence.is_passed()


def test_tickets_after_the_reset_are_not_waited_for():
    words = Words()
    fence = ResetFence(words, num_ranks=1, num_store_ranks=1)
    log = TicketLog(words, 0)
    fence.next_ticket(STORE)
    fence.hold()
    fence.next_ticket(STORE)
    log.done(STORE, 1)
    assert fence.is_passed()


def test_a_second_reset_waits_for_its_own_tickets_too():
    words = Words()
    fence = ResetFence(words, num_ranks=1, num_store_ranks=1)
    log = TicketLog(words, 0)
    fence.next_ticket(STORE)
    fence.hold()
    fence.next_ticket(STORE)
    fence.hold()
    log.done(STORE, 1)
    assert not fence.is_passed()
    log.done(STORE, 2)
    assert fence.is_passed()
    assert not fence.is_passed()
