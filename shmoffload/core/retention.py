"""Blocks that their requests want kept longer, or less long, than the order says.

Covers: ``pin``, ``priority`` and ``ttl_s`` of a request, all of them bounded.
Does not cover: pins of jobs and copies (``slots``), the order itself
(``policies``).
Who calls it: ``stores``, ``room``, ``promotions`` and ``manager``, scheduler
thread.

It shapes what a ``CachePolicy`` yields and is not seen by it. While no block has a
mark, which is the rule, the order passes untouched and nothing is paid.

- *held*: not yielded at all. A quarter of the slots at most.
- *expired*: yielded before all others, and no more written to any tier.
- *priority*: of the next ``LOOK_AHEAD`` candidates the lowest goes first, so a high
  priority delays a block for as long as others are near, never for good.
"""

from __future__ import annotations

import heapq
from itertools import count, islice
from typing import TYPE_CHECKING, Final

from shmoffload.core.request_policy import Note, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shmoffload.core.jobs import JobDesk
    from shmoffload.core.policies import CachePolicy
    from shmoffload.core.requests import Request
    from shmoffload.core.slots import Block, SlotTable
    from shmoffload.core.types import OffloadKey

HELD_SHARE: Final = 4
"""One slot in so many may be held."""

PIN_AFTER_FINISH_S: Final = 300.0
"""How long a pin outlives its request when it gave no ``ttl_s``: a next turn."""

LOOK_AHEAD: Final = 64

PIN_NOTE: Final = "shmoffload.pin"


class _Mark:
    """What is wanted of one block."""

    __slots__ = ("expires_s", "holds", "priority")

    def __init__(self) -> None:
        self.priority = 0
        self.expires_s: float | None = None
        self.holds: list[_Hold] = []


class _Hold:
    """What one request pins."""

    __slots__ = ("blocks", "is_over", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.blocks: dict[Block, None] = {}
        self.is_over = False


class Retention:
    """Marks of blocks.

    Attributes:
        marks: block -> what is wanted of it; empty while nobody wants anything.
        num_held: blocks that do not go.
        max_held: bound of it.
    """

    def __init__(self, table: SlotTable, desk: JobDesk) -> None:
        self.marks: dict[Block, _Mark] = {}
        self.num_held = 0
        self.max_held = table.num_slots // HELD_SHARE
        self._table = table
        self._desk = desk
        self._holds: dict[Request, _Hold] = {}
        self._expired: dict[Block, None] = {}
        # Ends in order of time; what has ended earlier is skipped when it is due.
        self._ends: list[tuple[float, int, _Hold | Block]] = []
        self._next_end = count()

    # Marks ----------------------------------------------------------------------

    def stored(self, request: Request, blocks: Sequence[Block]) -> None:
        """Mark blocks that have just got their slots for a request."""
        words = request.words
        if words is None or not words.shapes_eviction:
            return
        for block in blocks:
            mark = self.marks[block] = _Mark()
            mark.priority = words.priority
            if words.ttl_s is not None:
                self._expire_at(block, mark, self._desk.now_s + words.ttl_s)
            self._tidy(block, mark)
        if words.pin:
            self._hold(request, blocks)

    def used(self, request: Request, blocks: Iterable[Block]) -> None:
        """Mark blocks that a request found here; its words replace earlier ones.

        A lifetime is only ever made longer by it: what another one needs has
        proven its worth.
        """
        words = request.words
        if words is None and not self.marks:
            return
        for block in blocks:
            mark = self.marks.get(block)
            if mark is None:
                if words is None or not words.priority:
                    continue
                mark = self.marks[block] = _Mark()
            mark.priority = words.priority if words else 0
            if mark.expires_s is not None:
                self._prolong(block, mark, words.ttl_s if words else None)
            self._tidy(block, mark)
        if words is not None and words.pin:
            self._hold(request, blocks)

    def finish(self, request: Request) -> None:
        """Start the last stretch of a finished request's pin."""
        hold = self._holds.get(request)
        words = request.words
        if hold is not None and not hold.blocks:
            self._release(hold)  # its stores have failed: it must not use a place up
        elif hold is not None and words is not None and words.ttl_s is None:
            self._end_at(self._desk.now_s + PIN_AFTER_FINISH_S, hold)

    def forget(self, block: Block) -> None:
        """Drop a block that is absent from now on."""
        mark = self.marks.pop(block, None)
        if mark is None:
            return
        self._expired.pop(block, None)
        if mark.holds:
            self.num_held -= 1
        for hold in mark.holds:
            hold.blocks.pop(block, None)
            if hold.request.is_finished and not hold.blocks:
                self._release(hold)

    def clear(self) -> None:
        """Forget all; the primary is empty."""
        self.marks.clear()
        self.num_held = 0
        self._holds.clear()
        self._expired.clear()
        self._ends.clear()

    def end_step(self) -> None:
        """Let go of what has come to its time."""
        ends, now_s = self._ends, self._desk.now_s
        while ends and ends[0][0] <= now_s:
            due_s, _, item = heapq.heappop(ends)
            if isinstance(item, _Hold):
                self._release(item)
                continue
            mark = self.marks.get(item)
            if mark is not None and mark.expires_s == due_s:
                self._expired[item] = None
                self._table.version += 1

    # The order ------------------------------------------------------------------

    def victims(
        self, policy: CachePolicy, may_go: Callable[[OffloadKey], bool]
    ) -> Iterator[OffloadKey]:
        """Yield keys that may go, as ``CachePolicy.victims``, shaped by the marks."""
        if not self.marks:
            return policy.victims(may_go)
        return self._shaped(policy, may_go)

    def _shaped(
        self, policy: CachePolicy, may_go: Callable[[OffloadKey], bool]
    ) -> Iterator[OffloadKey]:
        blocks, marks = self._table.blocks, self.marks
        yielded: set[OffloadKey] = set()

        def is_candidate(key: OffloadKey) -> bool:
            block = blocks.get(key)
            if block is None or key in yielded:
                return False
            mark = marks.get(block)
            return (mark is None or not mark.holds) and may_go(key)

        for block in list(self._expired):
            if is_candidate(block.key):
                yielded.add(block.key)
                yield block.key
        ahead = policy.victims(is_candidate)
        window = list(islice(ahead, LOOK_AHEAD))
        while window:
            key = window.pop(self._lowest(window))
            window.extend(islice(ahead, 1))
            # Again: it may have been told to somebody while it was in the window.
            if is_candidate(key):
                yielded.add(key)
                yield key

    def _lowest(self, window: Sequence[OffloadKey]) -> int:
        lowest_idx, lowest = 0, None
        for idx, key in enumerate(window):
            block = self._table.blocks.get(key)
            mark = self.marks.get(block) if block is not None else None
            priority = mark.priority if mark is not None else 0
            if lowest is None or priority < lowest:
                lowest_idx, lowest = idx, priority
            if lowest == 0:
                break
        return lowest_idx

    def fresh(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """Return the blocks that have not expired; only those are cascaded."""
        now_s, marks = self._desk.now_s, self.marks
        return [
            block
            for block in blocks
            if (mark := marks.get(block)) is None
            or mark.expires_s is None
            or mark.expires_s > now_s
        ]

    # Pins -----------------------------------------------------------------------

    def _hold(self, request: Request, blocks: Iterable[Block]) -> None:
        hold = self._holds.get(request)
        num_refused = 0
        for block in blocks:
            mark = self.marks.get(block)
            if mark is not None and hold in mark.holds:
                continue
            is_first = mark is None or not mark.holds
            if (is_first and self.num_held >= self.max_held) or (
                hold is None and len(self._holds) >= self.max_held
            ):
                num_refused += 1
                continue
            if hold is None:
                hold = self._start_hold(request)
            if mark is None:
                mark = self.marks[block] = _Mark()
            mark.holds.append(hold)
            hold.blocks[block] = None
            self.num_held += is_first
        if num_refused and request.answer is not None:
            request.num_unpinned += num_refused
            why = f"{request.num_unpinned} are not held: {self.max_held} blocks at most"
            request.answer.note(Note(PIN_NOTE, Verdict.CLIPPED, why))

    def _start_hold(self, request: Request) -> _Hold:
        hold = self._holds[request] = _Hold(request)
        words = request.words
        if words is not None and words.ttl_s is not None:
            self._end_at(self._desk.now_s + words.ttl_s, hold)
        return hold

    def _release(self, hold: _Hold) -> None:
        hold.is_over = True
        self._holds.pop(hold.request, None)
        for block in hold.blocks:
            mark = self.marks[block]
            mark.holds.remove(hold)
            self.num_held -= not mark.holds
            self._tidy(block, mark)
        hold.blocks.clear()
        self._table.version += 1

    # Time -----------------------------------------------------------------------

    def _prolong(self, block: Block, mark: _Mark, ttl_s: float | None) -> None:
        """Let a block live as long as its new user wants, if that is longer."""
        ends_s = None if ttl_s is None else self._desk.now_s + ttl_s
        assert mark.expires_s is not None
        if ends_s is not None and ends_s <= mark.expires_s:
            return
        self._expired.pop(block, None)
        mark.expires_s = None
        if ends_s is not None:
            self._expire_at(block, mark, ends_s)

    def _expire_at(self, block: Block, mark: _Mark, time_s: float) -> None:
        mark.expires_s = time_s
        self._end_at(time_s, block)

    def _end_at(self, time_s: float, item: _Hold | Block) -> None:
        heapq.heappush(self._ends, (time_s, next(self._next_end), item))
        if len(self._ends) > 4 * self._table.num_slots + 64:
            self._drop_stale_ends()

    def _drop_stale_ends(self) -> None:
        """Keep the queue as short as what it is about: most blocks die before."""
        live: list[tuple[float, int, _Hold | Block]] = []
        for end in self._ends:
            item = end[2]
            if isinstance(item, _Hold):
                if not item.is_over:
                    live.append(end)
            elif item in self.marks and self.marks[item].expires_s == end[0]:
                live.append(end)
        self._ends = live
        heapq.heapify(self._ends)

    def _tidy(self, block: Block, mark: _Mark) -> None:
        """Drop a mark that says nothing."""
        if not mark.priority and mark.expires_s is None and not mark.holds:
            del self.marks[block]

    def check_integrity(self) -> None:
        """Assert the counts, and that only blocks with a slot have marks."""
        blocks = self._table.blocks
        assert all(blocks.get(b.key) is b for b in self.marks), "a mark of the dead"
        held = [block for block, mark in self.marks.items() if mark.holds]
        assert len(held) == self.num_held <= self.max_held, "pinned beyond the bound"
        for hold in self._holds.values():
            assert all(hold in self.marks[block].holds for block in hold.blocks)
        assert self._expired.keys() <= self.marks.keys()
