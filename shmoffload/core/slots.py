"""Slots and the blocks in them.

Covers: which slot is free, which block has which slot, pins, quarantine.
Does not cover: who may evict what (``room``, ``stores``), the shared slot
table (a ``SlotSink``).
Who calls it: ``core`` only, scheduler thread.

    absent -- reserve --> PENDING -- publish --> READY -- evict --> absent
                             |                    | pin / unpin
                          abandon                 |
                             v                    v
                           absent       detach: QUARANTINED until nobody holds it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from shmoffload.core.types import SlotState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shmoffload.core.interfaces import SlotSink
    from shmoffload.core.requests import Request
    from shmoffload.core.types import OffloadKey, SlotArray

FREE: Final = 0
PENDING: Final = 1
READY: Final = 2
QUARANTINED: Final = 3

_FREE: Final = SlotState.FREE

FROM_STORE: Final = -1
"""Origin of a block that the GPU wrote; otherwise the index of its tier."""


class Block:
    """A key in a slot; the object outlives the key while somebody holds it.

    Attributes:
        state: one of ``FREE`` (object is dead), ``PENDING``, ``READY``,
            ``QUARANTINED``.
        pins: open readers; in quarantine also the writer.
        owner: what writes it while PENDING.
        origin: tier index, ``FROM_STORE``; the first load resets it.
        told_step: last step in which a lookup counted it.
        promoter: request whose share of promotions it counts in.
        is_loading: it counts in that share until its first load has ended.
        waiters: requests whose cascade waits for it to become READY.
    """

    __slots__ = (
        "is_loading",
        "key",
        "origin",
        "owner",
        "pins",
        "promoter",
        "slot",
        "state",
        "told_step",
        "waiters",
    )

    def __init__(self, key: OffloadKey, slot: int, owner: object) -> None:
        self.key = key
        self.slot = slot
        self.state = PENDING
        self.pins = 0
        self.owner: object = owner
        self.origin = FROM_STORE
        self.told_step = -1
        self.is_loading = False
        self.promoter: Request | None = None
        self.waiters: list[Request] | None = None


class SlotTable:
    """All slots of the primary.

    Attributes:
        blocks: key -> PENDING or READY block.
        num_pinned: READY blocks that somebody reads.
        version: grows whenever a slot or a victim may have become available.
    """

    def __init__(self, num_slots: int, block_bytes: int, sink: SlotSink) -> None:
        self.num_slots = num_slots
        self.num_pending = 0
        self.num_pinned = 0
        self.num_quarantined = 0
        self.version = 0
        self.blocks: dict[OffloadKey, Block] = {}
        self._block_bytes = block_bytes
        self._sink = sink
        self._next_unused = 0
        self._returned: list[int] = []
        self._generations = [0] * num_slots

    @property
    def num_free(self) -> int:
        """Slots that can be handed out at once."""
        return self.num_slots - self._next_unused + len(self._returned)

    def slots_of(self, keys: Iterable[OffloadKey]) -> SlotArray:
        """Return the slots of READY blocks; a mere look.

        Raises:
            KeyError: a block is not READY.
        """
        slots = []
        for key in keys:
            block = self.blocks[key]
            if block.state != READY:
                raise KeyError(key)
            slots.append(block.slot)
        return np.array(slots, dtype=np.int32)

    def adopt(
        self, blocks: Sequence[tuple[OffloadKey, int]], generations: Sequence[int]
    ) -> None:
        """Begin with readable blocks in their slots; see ``core.adoption``.

        Every block is handed out and published as if it were new, in the order
        that a SIGKILL in between does not harm.
        """
        assert not self.blocks
        assert self._next_unused == 0
        assert len(generations) == self.num_slots
        self._generations = list(generations)
        held = {slot for _, slot in blocks}
        self._next_unused = self.num_slots
        # The last one is taken first: the lowest, as with slots never used.
        self._returned = [
            slot for slot in reversed(range(self.num_slots)) if slot not in held
        ]
        for slot in self._returned:
            self._sink.set_state(slot, self._generations[slot], _FREE)
        for key, slot in blocks:
            block = self.blocks[key] = Block(key, slot, None)
            block.state = READY
            generation = self._generations[slot] = self._generations[slot] + 1
            self._sink.hand_out(slot, generation, key, self._block_bytes)
            self._sink.publish(slot, generation)

    def reserve(self, key: OffloadKey, owner: object) -> Block:
        """Hand out a free slot to an absent key; there must be one.

        Never-used slots go first, in order, then the last one returned (P1).
        """
        assert key not in self.blocks
        if self._next_unused < self.num_slots:
            slot = self._next_unused
            self._next_unused += 1
        else:
            slot = self._returned.pop()
        self._generations[slot] += 1
        block = self.blocks[key] = Block(key, slot, owner)
        self.num_pending += 1
        self._sink.hand_out(slot, self._generations[slot], key, self._block_bytes)
        return block

    def reserve_all(self, keys: Sequence[OffloadKey], owner: object) -> list[Block]:
        """Hand out free slots to absent keys, as ``reserve``; there must be enough."""
        first, num = self._next_unused, len(keys)
        num_unused = min(num, self.num_slots - first)
        slots = list(range(first, first + num_unused))
        self._next_unused = first + num_unused
        pop = self._returned.pop
        slots += [pop() for _ in range(num - num_unused)]
        self.num_pending += num
        blocks, generations = self.blocks, self._generations
        hand_out, num_bytes = self._sink.hand_out, self._block_bytes
        reserved = []
        for key, slot in zip(keys, slots, strict=True):
            generation = generations[slot] = generations[slot] + 1
            block = blocks[key] = Block(key, slot, owner)
            hand_out(slot, generation, key, num_bytes)
            reserved.append(block)
        return reserved

    def publish(self, block: Block) -> None:
        """Make a written block readable; in quarantine its slot is let go."""
        if block.state == QUARANTINED:
            self.unpin(block)
            return
        assert block.state == PENDING
        block.state = READY
        block.owner = None
        self.num_pending -= 1
        self.version += 1
        self._sink.publish(block.slot, self._generations[block.slot])

    def abandon(self, block: Block) -> None:
        """Take back a block whose writing failed or was given up."""
        if block.state == QUARANTINED:
            self.unpin(block)
            return
        assert block.state == PENDING
        del self.blocks[block.key]
        self.num_pending -= 1
        self.version += 1
        self._free(block)

    def evict(self, block: Block) -> None:
        """Take the slot of an idle block; the caller reuses it at once."""
        assert block.state == READY
        assert block.pins == 0
        del self.blocks[block.key]
        # As ``_free``, without its calls: the hot half of a store.
        block.state, slot = FREE, block.slot
        self._returned.append(slot)
        self._sink.set_state(slot, self._generations[slot], _FREE)

    def pin(self, block: Block) -> None:
        """Add a reader of a READY block."""
        assert block.state == READY
        if not block.pins:
            self.num_pinned += 1
        block.pins += 1

    def unpin(self, block: Block) -> None:
        """Remove a reader, or the last holder of a quarantined slot."""
        assert block.pins > 0
        block.pins -= 1
        if block.pins == 0:
            self.version += 1
            if block.state == QUARANTINED:
                self.num_quarantined -= 1
                self._free(block)
            else:
                self.num_pinned -= 1

    def detach(self, block: Block) -> None:
        """Make the key absent; the slot is free, or quarantined while held."""
        del self.blocks[block.key]
        if block.state == PENDING:
            self.num_pending -= 1
            block.pins = 1  # the writer
        elif block.pins:
            self.num_pinned -= 1
        if block.pins:
            block.state = QUARANTINED
            self.num_quarantined += 1
            self._set(block, SlotState.QUARANTINED)
        else:
            self.version += 1
            self._free(block)

    def check_integrity(self) -> None:
        """Assert that every slot is in exactly one place (INV-1, 2, 3)."""
        free = list(range(self._next_unused, self.num_slots)) + self._returned
        held = [block.slot for block in self.blocks.values()]
        assert len(set(free)) == len(free) == self.num_free
        assert len(set(held)) == len(held)
        assert not set(free) & set(held)
        assert all(0 <= slot < self.num_slots for slot in free + held)
        pending = [b for b in self.blocks.values() if b.state == PENDING]
        assert len(pending) == self.num_pending
        pinned = [b for b in self.blocks.values() if b.state == READY and b.pins]
        assert len(pinned) == self.num_pinned
        assert all(b.pins == 0 and b.owner is not None for b in pending)
        assert all(
            b.owner is None and b.waiters is None and b.pins >= 0
            for b in self.blocks.values()
            if b.state == READY
        )
        assert all(key == b.key for key, b in self.blocks.items())
        assert len(free) + len(held) + self.num_quarantined == self.num_slots

    def _free(self, block: Block) -> None:
        block.state = FREE
        block.owner = None
        self._returned.append(block.slot)
        self._set(block, SlotState.FREE)

    def _set(self, block: Block, state: SlotState) -> None:
        self._sink.set_state(block.slot, self._generations[block.slot], state)
