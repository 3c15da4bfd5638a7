"""Which block lies in which slab slot, and which slots may be written.

Covers: key -> slab slot, recency, pins, free runs, the life of a slot. Pure.
Does not cover: the slab's bytes (``slab_file``), the index on disk
(``slab_index``).
Who calls it: ``slab``, under its lock.

A slab slot is *free*, *reserved* (a put writes it), *resident*, or *stale*: its
block has left the table but its row may still be in the index on disk. Only when
the row is gone does a stale slot become free. So at any SIGKILL a row never names
a slot that was overwritten with another block. (Checksums would catch it; order
makes it a non-event.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmoffload.worker.tiers.extents import FreeExtents
from shmoffload.worker.tiers.lru import Entry, PinnedLru

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class SlabTable:
    """The slab's slots and who is in them."""

    def __init__(self, num_slots: int, rows: Iterable[tuple[bytes, int]]) -> None:
        """Start from the index's rows, least recently used first.

        Of two rows that name one key or one slot, the later holds; slots of
        others become stale so that their rows go.
        """
        self.num_slots = num_slots
        self.lru: PinnedLru[int] = PinnedLru()
        self._stale: set[int] = set()
        rows = list(rows)
        slot_by_key = dict(rows)
        used: Iterable[int] = slot_by_key.values()
        if len(slot_by_key) < len(rows) or len(set(used)) < len(rows):
            slot_by_key, self._stale = _last_of_each(rows)
            used = self._stale.union(slot_by_key.values())
        self.lru.fill(slot_by_key)
        self._free = FreeExtents.from_used(used, num_slots)

    def make_room(self, num_slots: int) -> list[bytes]:
        """Evict until ``num_slots`` are free or stale, or nothing is evictable.

        Returns the victims. Stale slots still have to pass ``release_stale``.
        """
        victims = []
        while self._free.num_free + len(self._stale) < num_slots:
            victim = self.lru.evict()
            if victim is None:
                break
            victims.append(victim[0])
            self._stale.add(victim[1])
        return victims

    def stale(self) -> list[int]:
        """Slots whose rows have to leave the index before they are free."""
        return sorted(self._stale)

    def release_stale(self, slots: Sequence[int]) -> None:
        """The index no longer names ``slots``: they are free."""
        for slot in slots:
            self._stale.remove(slot)
            self._free.add(slot)

    def reserve(self, num_slots: int) -> list[tuple[int, int]]:
        """Take up to ``num_slots`` free slots, as (start, length) runs."""
        return self._free.take(min(num_slots, self._free.num_free))

    def insert(self, key: bytes, slot: int) -> None:
        """A reserved slot now holds ``key``, and the index says so."""
        self.lru.insert(key, slot)

    def give_up(self, slots: Iterable[int]) -> None:
        """Reserved slots were not filled; the index may name them or not."""
        self._stale.update(slots)

    def remove(self, key: bytes) -> None:
        """Forget a key; its slot is stale at once, or after the last reader."""
        entry = self.lru.remove(key)
        if entry is not None and entry.pins == 0:
            self._stale.add(entry.value)

    def unpin(self, entry: Entry[int]) -> None:
        """A reader of ``entry`` is through."""
        if self.lru.unpin(entry):
            self._stale.add(entry.value)


def _last_of_each(
    rows: Iterable[tuple[bytes, int]],
) -> tuple[dict[bytes, int], set[int]]:
    """Return key -> slot where neither occurs twice, and the slots left over."""
    key_by_slot: dict[int, bytes] = {}
    slot_by_key: dict[bytes, int] = {}
    for key, slot in rows:
        slot_by_key.pop(key_by_slot.get(slot, b""), None)
        old = slot_by_key.pop(key, None)
        if old is not None:
            del key_by_slot[old]
        slot_by_key[key] = slot
        key_by_slot[slot] = key
    return slot_by_key, {slot for _, slot in rows} - key_by_slot.keys()
