"""Keys in order of use, with pins: what every bounded tier keeps.

Covers: recency, pins of readers, victims. Pure; no lock, no I/O.
Does not cover: where a value lies (slab slot, file, bytes): values are opaque.
Who calls it: the tiers, under their own lock.

A block of a request is of use only together with all blocks before it. So of the
keys of one call, which come in that order, the last is the first to go: calls for
several keys touch and pin the last one first, and tiers insert so.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

V = TypeVar("V")


class Entry(Generic[V]):
    """One resident block; ``gone`` once it left the index, pinned or not."""

    __slots__ = ("gone", "pins", "value")

    def __init__(self, value: V) -> None:
        self.value = value
        self.pins = 0
        self.gone = False


class PinnedLru(Generic[V]):
    """Key -> value, least recently used first.

    Pins count on the entry and not on the key: a key that was removed under a
    reader and stored anew is another entry, and the reader's unpin must not free
    the new one.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, Entry[V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[bytes]:
        """Keys, least recently used first."""
        return iter(self._entries)

    def items(self) -> Iterator[tuple[bytes, V]]:
        """Keys and values, least recently used first."""
        return ((key, entry.value) for key, entry in self._entries.items())

    def insert(self, key: bytes, value: V) -> None:
        """Add an absent key as the most recently used."""
        assert key not in self._entries
        self._entries[key] = Entry(value)

    def fill(self, values: Mapping[bytes, V]) -> None:
        """Start from keys and values, least recently used first."""
        assert not self._entries
        entries = map(Entry, values.values())
        self._entries = OrderedDict(zip(values, entries, strict=True))

    def touch(self, key: bytes) -> bool:
        """Make a key the most recently used; False if it is absent."""
        if key not in self._entries:
            return False
        self._entries.move_to_end(key)
        return True

    def pin(self, key: bytes) -> Entry[V] | None:
        """Forbid eviction of a key until ``unpin``; counts as a use."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.pins += 1
            self._entries.move_to_end(key)
        return entry

    def touch_all(self, keys: Sequence[bytes]) -> list[bool]:
        """``touch`` the keys of one request, so that its first is the most recent."""
        return [self.touch(key) for key in reversed(keys)][::-1]

    def pin_all(self, keys: Sequence[bytes]) -> list[Entry[V] | None]:
        """``pin`` the keys of one request, so that its first is the most recent."""
        return [self.pin(key) for key in reversed(keys)][::-1]

    def unpin(self, entry: Entry[V]) -> bool:
        """Drop a pin; True when the value is nobody's now and may be reused."""
        entry.pins -= 1
        assert entry.pins >= 0
        return entry.gone and entry.pins == 0

    def remove(self, key: bytes) -> Entry[V] | None:
        """Take a key out; a pinned entry's value is free only after ``unpin``."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            entry.gone = True
        return entry

    def evict(self) -> tuple[bytes, V] | None:
        """Take out the least recently used unpinned key; None if there is none.

        Walks over pinned ones, of which there are few: those being read now.
        """
        for key, entry in self._entries.items():
            if entry.pins == 0:
                del self._entries[key]
                entry.gone = True
                return key, entry.value
        return None
