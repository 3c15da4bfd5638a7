"""Cascades: primary to tier.

Covers: store jobs after a GPU store, store jobs of present blocks for tiers that
want the whole request or that withheld them at first, parked keys, what is shed
when a tier has no credit.
Does not cover: GPU copies (``stores``, ``loads``), which blocks a tier withholds
(``admission``).
Who calls it: ``manager``, ``stores`` and ``promotions``, scheduler thread.

A parked key is a waiter on its block: it fires when the block becomes READY, by a
store or a promotion, and is dropped when that fails. Nothing is ever rescanned.

Without credit for a whole cascade its head is sent and its tail is shed. If a
longer request has cascades that have not left yet, theirs are shed first. What
follows the shed part of a request is not sent either: without its head it is of
no use to anybody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmoffload.core.admission import KEYS_PER_SLOT, Gate
from shmoffload.core.requests import PreparedStore
from shmoffload.core.slots import READY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shmoffload.core.counters import Counters
    from shmoffload.core.jobs import Job, JobDesk
    from shmoffload.core.requests import Request
    from shmoffload.core.retention import Retention
    from shmoffload.core.slots import Block, SlotTable
    from shmoffload.core.types import JobResult


class Cascades:
    """Store jobs and parked keys.

    Args:
        table: the slots.
        desk: job table and tiers.
        retention: tells which blocks are past their time.
        counters: what happened.
        max_share: part of the slots that one tier's open cascades may pin.
        on_work_done: called when an open work of a request has ended.

    Attributes:
        num_parked: parked (request, key) pairs.
        withholds: some tier withholds blocks until they are used again.
    """

    def __init__(
        self,
        table: SlotTable,
        desk: JobDesk,
        retention: Retention,
        counters: Counters,
        *,
        max_share: float,
        on_work_done: Callable[[Request], None],
    ) -> None:
        self.num_parked = 0
        self._table = table
        self._desk = desk
        self._retention = retention
        self._counters = counters
        self._on_work_done = on_work_done
        self._gates = [
            Gate(t.withheld, max_keys=KEYS_PER_SLOT * table.num_slots)
            if t.withheld
            else None
            for t in desk.traits
        ]
        self.withholds = any(self._gates)
        # Counted by job: what two requests send of one block counts twice. So a
        # share of 1 is no bound, or it would bind while slots are left.
        bound = max(1, int(max_share * table.num_slots))
        self._max_open = bound if max_share < 1 else None
        self._num_open = [0] * len(desk.tiers)

    def send_stored(self, request: Request, blocks: Sequence[Block]) -> None:
        """Send blocks that the GPU has just written to every tier.

        A tier that wants the whole request is not asked what it would withhold.
        """
        for idx, gate in enumerate(self._gates):
            due: Sequence[Block] = blocks
            sent = request.sent.get(idx)
            if sent is not None:
                # Again only across a reset or an eviction: it has got them.
                due = [block for block in blocks if block.key not in sent]
            elif gate is not None:
                due = gate.stored(request, blocks)
                self._count_withheld(idx, len(blocks) - len(due))
            self._send(request, idx, due)

    def offer_present(self, request: Request, present: Sequence[Block]) -> None:
        """Bring offered blocks that are here to the asking tiers.

        A READY block goes now; a PENDING one is parked, unless this request
        writes it: then ``complete_store`` brings it anyway.
        """
        ready = []
        for block in present:
            if block.state == READY:
                ready.append(block)
                continue
            owner = block.owner
            if isinstance(owner, PreparedStore) and owner.request is request:
                continue
            if any(block.key not in request.sent[idx] for idx in request.asking):
                self.park(request, block)
        if ready:
            self.send_present(request, ready)

    def send_present(self, request: Request, blocks: Sequence[Block]) -> None:
        """Send READY blocks to the asking tiers, each key once per request.

        What a tier had no credit for stays unsent: a later offer may bring it.
        """
        for idx in request.asking:
            sent = request.sent[idx]
            self._send(request, idx, [b for b in blocks if b.key not in sent])

    def send_used(self, request: Request, blocks: Sequence[Block]) -> None:
        """Send READY blocks that a request uses to the tiers that withheld them."""
        for idx, gate in enumerate(self._gates):
            if gate is not None and idx not in request.sent:
                self._send(request, idx, gate.used(request, blocks))

    def park(self, request: Request, block: Block) -> None:
        """Let a request's cascade wait until ``block`` is READY."""
        if block.waiters is None:
            block.waiters = []
        elif request in block.waiters:
            return
        block.waiters.append(request)
        request.open_work += 1
        self.num_parked += 1

    def publish(self, blocks: Iterable[Block]) -> dict[Request, list[Block]]:
        """Make blocks readable; return whose parked keys that releases."""
        released: dict[Request, list[Block]] = {}
        publish = self._table.publish
        for block in blocks:
            if block.waiters is not None:
                for request in self.take_waiters(block):
                    released.setdefault(request, []).append(block)
            publish(block)
        return released

    def fire(self, released: dict[Request, list[Block]]) -> None:
        """Send parked keys whose blocks are READY, one job per tier and request."""
        for request, blocks in released.items():
            if request.is_closed:
                self._counters.parked_dropped += len(blocks)
            else:
                self.send_present(request, blocks)
            self._unpark(request, len(blocks))

    def drop(self, block: Block) -> None:
        """Give up keys parked on a block whose writing failed."""
        for request in self.take_waiters(block):
            self._counters.parked_dropped += 1
            self._unpark(request, 1)

    def apply(self, job: Job, result: JobResult) -> None:
        """Take the answer to a store job; a failed one is not repeated.

        Its keys count as not sent again, so that an asking tier hears of them.
        """
        self._num_open[job.tier_idx] -= len(job.blocks)
        for block in job.blocks:
            self._table.unpin(block)
        if not result.success and job.tier_idx in job.request.sent:
            failed = {block.key for block in job.blocks}
            failed.difference_update(result.successful_keys or ())
            job.request.sent[job.tier_idx] -= failed
        if not job.is_live:
            self._counters.late_replies += 1
        elif not result.success:
            self._count_failed(job.tier_idx, len(job.blocks))

    def clear(self) -> None:
        """Forget the parked keys of every request; their blocks are gone."""
        self._counters.parked_dropped += self.num_parked
        self.num_parked = 0

    @staticmethod
    def take_waiters(block: Block) -> Sequence[Request]:
        """Return and forget the requests that are parked on a block."""
        waiters, block.waiters = block.waiters, None
        return waiters or ()

    def _unpark(self, request: Request, num_keys: int) -> None:
        self.num_parked -= num_keys
        if not request.is_closed:
            request.open_work -= num_keys
        self._on_work_done(request)

    def _send(self, request: Request, tier_idx: int, blocks: Sequence[Block]) -> None:
        """Submit a store job of what the tier may have and has credit for."""
        blocks = self._allowed(request, tier_idx, blocks)
        num = len(blocks)
        if not num:
            return
        room = self._room_for(tier_idx, num)
        if room < num or tier_idx in request.shed:
            blocks = self._shed(request, tier_idx, blocks, room)
            num = len(blocks)
            if not num:
                return
        for block in blocks:
            assert block.state == READY
            if not block.pins:  # SlotTable.pin, without its call
                self._table.num_pinned += 1
            block.pins += 1
        counters = self._counters
        counters.cascade_jobs[tier_idx] += 1
        counters.cascade_blocks[tier_idx] += num
        self._num_open[tier_idx] += num
        if self._desk.submit(tier_idx, request, blocks, is_promotion=False) is None:
            self._num_open[tier_idx] -= num
            for block in blocks:
                self._table.unpin(block)
            self._count_failed(tier_idx, num)
            return
        if tier_idx in request.sent:
            request.sent[tier_idx].update(block.key for block in blocks)
        gate = self._gates[tier_idx]
        if gate is not None:
            gate.sent(blocks)

    def _allowed(
        self, request: Request, tier_idx: int, blocks: Sequence[Block]
    ) -> Sequence[Block]:
        """Return the blocks that the requests' own words let a tier have."""
        num = len(blocks)
        if request.store_to is not None and tier_idx not in request.store_to:
            blocks = ()
        elif self._retention.marks:
            blocks = self._retention.fresh(blocks)
        self._count_withheld(tier_idx, num - len(blocks))
        return blocks

    def _room_for(self, tier_idx: int, num: int) -> int:
        most = num
        if self._max_open is not None:
            most = min(num, self._max_open - self._num_open[tier_idx])
        return self._desk.room_for(tier_idx, most) if most > 0 else 0

    def _shed(
        self, request: Request, tier_idx: int, blocks: Sequence[Block], room: int
    ) -> Sequence[Block]:
        """Return the head of a cascade that has credit and nothing shed before it."""
        positions = request.ctx.key_positions
        in_order = sorted(blocks, key=lambda block: positions.get(block.key, 0))
        limit = request.shed.get(tier_idx)
        if limit is not None:
            if any(positions.get(block.key) == limit for block in blocks):
                del request.shed[tier_idx]  # what was missing has come again
            else:
                in_order = [b for b in in_order if positions.get(b.key, 0) < limit]
        if room < len(in_order):
            self._shed_longer(request, tier_idx, len(in_order) - room)
            room = self._room_for(tier_idx, len(in_order))
        kept, tail = in_order[:room], in_order[room:]
        self._note_shed(request, tier_idx, tail)
        num_shed = len(blocks) - len(kept)
        if num_shed:
            self._counters.cascade_jobs_dropped[tier_idx] += not kept
            self._counters.cascade_blocks_dropped[tier_idx] += num_shed
        return kept

    def _shed_longer(self, request: Request, tier_idx: int, num: int) -> None:
        """Take unsent ends from longer requests, of the longest first."""
        for job, lost in self._desk.withdraw(tier_idx, num, request.ctx):
            self._num_open[tier_idx] -= len(lost)
            self._counters.cascade_blocks_dropped[tier_idx] += len(lost)
            for block in lost:
                self._table.unpin(block)
            if tier_idx in job.request.sent:
                job.request.sent[tier_idx] -= {block.key for block in lost}
            self._note_shed(job.request, tier_idx, lost)

    @staticmethod
    def _note_shed(request: Request, tier_idx: int, tail: Sequence[Block]) -> None:
        positions = request.ctx.key_positions
        ends = [positions[block.key] for block in tail if block.key in positions]
        if ends:
            limit = request.shed.get(tier_idx)
            first = min(ends)
            request.shed[tier_idx] = first if limit is None else min(limit, first)

    def _count_withheld(self, tier_idx: int, num_blocks: int) -> None:
        self._counters.cascade_blocks_withheld[tier_idx] += num_blocks

    def _count_failed(self, tier_idx: int, num_blocks: int) -> None:
        self._counters.cascade_jobs_failed[tier_idx] += 1
        self._counters.cascade_blocks_failed[tier_idx] += num_blocks
