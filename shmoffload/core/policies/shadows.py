"""Shadows: what the primary would hold under another policy.

Covers: metadata-only caches of one policy each, fed with whole requests.
Does not cover: choosing one (``auto``), slots, pins.
Who calls it: ``auto`` only, scheduler thread.

A shadow holds keys, no bytes. All of them are bounded by a multiple of the slots;
together they take 1 KB per slot (measured), beside blocks of 34 to 160 MiB of an 8B
to 70B model. What one request uses is *protected*: it does not push its own blocks
out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from itertools import filterfalse, islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from shmoffload.core.types import OffloadKey

GHOSTS_PER_SLOT: Final = 2
"""Measured: twice the slots is the best guide for ``auto``."""
REMEMBERED_PER_SLOT: Final = 4
"""Keys of which a first use is remembered. Not more: "used twice of late" is worth
more than "used twice ever" (conversation at 1 %: 29,359 against 24,234 hits)."""


class Shadow(ABC):
    """A cache of keys that hears every request."""

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abstractmethod
    def use(
        self, keys: Sequence[OffloadKey], protected: Container[OffloadKey]
    ) -> Sequence[OffloadKey]:
        """Let a request use keys, heads first, and return what had to go.

        Of more keys than fit, the heads come in. Afterwards the heads are the
        youngest.
        """

    @abstractmethod
    def settle(self, keys: Iterable[OffloadKey]) -> None:
        """Renew what is held of a finished request; ``keys`` have tails first."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all."""

    def run_length(self, keys: Sequence[OffloadKey]) -> int:
        """Count the leading keys that are held."""
        for num, key in enumerate(keys):
            if key not in self:
                return num
        return len(keys)


class LruShadow(Shadow):
    """Least recently used, tails first."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._order: OrderedDict[OffloadKey, None] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def use(
        self, keys: Sequence[OffloadKey], protected: Container[OffloadKey]
    ) -> Sequence[OffloadKey]:
        """See ``Shadow``."""
        order = self._order
        wanted = self._wanted(keys)
        victims = _oldest(order, len(order) + len(wanted) - self._num_slots, protected)
        for key in victims:
            del order[key]
        for key in wanted[: self._num_slots - len(order)]:
            order[key] = None
        for key in reversed(keys):
            if key in order:
                order.move_to_end(key)
        return victims

    def settle(self, keys: Iterable[OffloadKey]) -> None:
        """See ``Shadow``."""
        for key in keys:
            if key in self._order:
                self._order.move_to_end(key)

    def clear(self) -> None:
        """See ``Shadow``."""
        self._order.clear()

    def _wanted(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the absent keys that shall come in, heads first."""
        return [key for key in keys if key not in self._order]


class SecondUseShadow(LruShadow):
    """LRU of what was used twice of late; a scan of new blocks leaves no trace."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._max_remembered = num_slots * REMEMBERED_PER_SLOT
        self._remembered: OrderedDict[OffloadKey, bool] = OrderedDict()

    def clear(self) -> None:
        """See ``Shadow``."""
        super().clear()
        self._remembered.clear()

    def _wanted(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        remembered = self._remembered
        for key in keys:
            if key in remembered:
                remembered[key] = True
                remembered.move_to_end(key)
            else:
                remembered[key] = False
        while len(remembered) > self._max_remembered:
            remembered.popitem(last=False)
        return [key for key in super()._wanted(keys) if remembered.get(key)]


class ArcShadow(Shadow):
    """ARC as published, request by request; see ``arc``."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._max_ghosts = num_slots * GHOSTS_PER_SLOT
        self._target = 0.0
        self._t1: OrderedDict[OffloadKey, None] = OrderedDict()
        self._t2: OrderedDict[OffloadKey, None] = OrderedDict()
        self._b1: OrderedDict[OffloadKey, None] = OrderedDict()
        self._b2: OrderedDict[OffloadKey, None] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._t1 or key in self._t2

    def use(
        self, keys: Sequence[OffloadKey], protected: Container[OffloadKey]
    ) -> Sequence[OffloadKey]:
        """See ``Shadow``."""
        t1, t2, b1, b2 = self._t1, self._t2, self._b1, self._b2
        absent = [key for key in keys if key not in t1 and key not in t2]
        self._learn(absent)
        num_held = len(t1) + len(t2)
        victims = self._evict(num_held + len(absent) - self._num_slots, protected)
        num_free = self._num_slots - num_held + len(victims)
        new = set(absent[:num_free])
        for key in reversed(keys):
            if key in new:
                if key in b1 or key in b2:
                    b1.pop(key, None)
                    b2.pop(key, None)
                    t2[key] = None
                else:
                    t1[key] = None
            elif key in t1:
                del t1[key]
                t2[key] = None
            elif key in t2:
                t2.move_to_end(key)
        return victims

    def settle(self, keys: Iterable[OffloadKey]) -> None:
        """See ``Shadow``."""
        for key in keys:
            if key in self._t1:
                self._t1.move_to_end(key)
            elif key in self._t2:
                self._t2.move_to_end(key)

    def clear(self) -> None:
        """See ``Shadow``."""
        self._target = 0.0
        for keys in (self._t1, self._t2, self._b1, self._b2):
            keys.clear()

    def _learn(self, absent: Sequence[OffloadKey]) -> None:
        """Move the target towards the list whose ghosts come back."""
        b1, b2 = self._b1, self._b2
        for key in reversed(absent):
            if key in b1:
                more = max(1.0, len(b2) / len(b1))
                self._target = min(self._target + more, self._num_slots)
            elif key in b2:
                less = max(1.0, len(b1) / len(b2))
                self._target = max(self._target - less, 0.0)

    def _evict(
        self, num: int, protected: Container[OffloadKey]
    ) -> Sequence[OffloadKey]:
        """Take up to ``num`` keys out, from T1 while it is above its target."""
        if num <= 0:
            return ()
        t1, t2 = self._t1, self._t2
        above = max(0, len(t1) - int(self._target) + 1)
        from_t1 = _oldest(t1, min(num, above), protected)
        from_t2 = _oldest(t2, num - len(from_t1), protected)
        missing = num - len(from_t1) - len(from_t2)
        if missing:
            from_t1 = _oldest(t1, len(from_t1) + missing, protected)
        for held, ghosts, gone in ((t1, self._b1, from_t1), (t2, self._b2, from_t2)):
            for key in gone:
                del held[key]
                ghosts[key] = None
            while len(ghosts) > self._max_ghosts:
                ghosts.popitem(last=False)
        return from_t1 + from_t2


def _oldest(
    order: Iterable[OffloadKey], num: int, protected: Container[OffloadKey]
) -> list[OffloadKey]:
    """Return up to ``num`` keys that are not protected, in order."""
    if num <= 0:
        return []
    return list(islice(filterfalse(protected.__contains__, order), num))
