"""What eviction orders are made of.

Covers: a set in order of age whose walk survives changes; tails before heads.
Does not cover: any policy.
Who calls it: ``policies`` only, scheduler thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from shmoffload.core.types import GROUP_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shmoffload.core.types import OffloadKey, ReqContext

T = TypeVar("T")


class _Link(Generic[T]):
    """A member; out of the chain once ``before`` is None."""

    __slots__ = ("after", "before", "item")

    def __init__(self, item: T, before: _Link[T] | None, after: _Link[T]) -> None:
        self.item = item
        self.before = before
        self.after = after


class _End(_Link[T]):
    """Before the oldest and after the youngest."""

    def __init__(self) -> None:
        self.before = self
        self.after = self


class Chain(Generic[T]):
    """An ordered set, oldest first; a walk goes on while members come and go.

    An OrderedDict stops its iterators at any change, and a copy per walk would
    cost as much as the primary is large. A removed link still knows what came
    after it, so a walk that stands on it finds its way back: links are never
    used again. Whoever keeps a walk therefore keeps what was removed since.
    """

    __slots__ = ("_end", "_links")

    def __init__(self) -> None:
        self._links: dict[T, _Link[T]] = {}
        self._end: _Link[T] = _End()

    def __contains__(self, item: object) -> bool:
        return item in self._links

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[T]:
        end = self._end
        link = end.after
        while link is not end:
            if link.before is not None:
                yield link.item
            link = link.after

    def add(self, item: T) -> None:
        """Put a new item at the young end; one that is here stays where it is."""
        if item not in self._links:
            end = self._end
            youngest = end.before
            assert youngest is not None
            link = self._links[item] = _Link(item, youngest, end)
            youngest.after = end.before = link

    def discard(self, item: T) -> bool:
        """Take an item out; False if it is not here."""
        link = self._links.pop(item, None)
        if link is None:
            return False
        before, after = link.before, link.after
        assert before is not None
        before.after = after
        after.before = before
        link.before = None
        return True

    def renew(self, item: T) -> bool:
        """Move an item to the young end; False if it is not here."""
        if not self.discard(item):
            return False
        self.add(item)
        return True

    def clear(self) -> None:
        """Take all out; walks that were begun before are void."""
        self._links.clear()
        self._end = _End()


def tail_first(keys: Iterable[OffloadKey], ctx: ReqContext) -> list[OffloadKey]:
    """Order the keys of one request: the deeper a block, the earlier.

    KV groups are merged by position if every key has one; else each group is
    reversed by itself, in the order in which the groups came.
    """
    keys, positions = list(keys), ctx.key_positions
    if all(key in positions for key in keys):
        return sorted(keys, key=lambda key: (-positions[key], key))
    groups: dict[bytes, list[OffloadKey]] = {}
    for key in keys:
        groups.setdefault(key[-GROUP_BYTES:], []).append(key)
    return [key for group in groups.values() for key in reversed(group)]
