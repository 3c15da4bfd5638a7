"""Which block has to go next, and which need not come in.

Covers: the interface of an eviction order.
Does not cover: whether a block may go (pins, reservations: ``stores``, ``room``).
Who calls it: ``core`` only. A third party may implement it: docs/configuration.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from shmoffload.core.types import OffloadKey, ReqContext


class CachePolicy(ABC):
    """An order over the keys that have a slot, evictable or not.

    Pure and total: no method raises or waits, and none may be called from more
    than the scheduler's thread. A pin or a finished transfer does not change the
    order; only uses do, once per request and key.

    One store: ``offer``, ``victims``, ``remove`` of those taken, ``insert`` of the
    new keys, ``access`` of the others; then, some time, ``finish``. A promotion:
    ``observe``, ``victims``, ``remove``, ``insert``, and ``access`` when loaded.
    """

    def offer(
        self,
        keys: Sequence[OffloadKey],
        absent: Sequence[OffloadKey],
        ctx: ReqContext,
        *,
        may_refuse: bool,
    ) -> Sequence[OffloadKey]:
        """Hear what a request wants to store, before room is sought.

        The order must not change: the offer may yet be refused for want of room,
        and be repeated.

        Args:
            keys: the offer, distinct, heads first.
            absent: those of them without a slot.
            ctx: the request; it has the positions.
            may_refuse: False if every absent key has to be admitted.

        Returns:
            The keys of ``absent`` that shall get a slot, in its order.
        """
        return absent

    def observe(self, key: OffloadKey, ctx: ReqContext) -> None:
        """Hear of an absent key that a tier has and that will get a slot."""

    @abstractmethod
    def insert(self, key: OffloadKey, ctx: ReqContext) -> None:
        """Take in a key that has just got a slot, on behalf of a request."""

    @abstractmethod
    def access(
        self, key: OffloadKey, ctx: ReqContext, *, is_ready: bool = True
    ) -> None:
        """Note that a request used a key; counts once per request and key.

        Args:
            key: ignored if it has no slot.
            ctx: the request.
            is_ready: its bytes are there; False while they are being written.
        """

    def insert_all(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        """Take in new keys, in the order of an offer; see ``insert``."""
        for key in keys:
            self.insert(key, ctx)

    def access_all(self, keys: Iterable[OffloadKey], ctx: ReqContext) -> None:
        """Note that a request found readable keys and offers or loads them.

        Unlike ``access`` by itself, a policy need not count a key that this very
        request has brought.
        """
        for key in keys:
            self.access(key, ctx)

    @abstractmethod
    def remove(self, key: OffloadKey, *, evicted: bool) -> None:
        """Drop a key that has lost its slot; unknown keys are ignored.

        Args:
            key: what is absent from now on.
            evicted: to make room; False if its bytes never came.
        """

    @abstractmethod
    def finish(self, ctx: ReqContext) -> None:
        """Give the keys of a finished request their lasting places."""

    @abstractmethod
    def victims(self, may_go: Callable[[OffloadKey], bool]) -> Iterator[OffloadKey]:
        """Yield the keys that may go, first to go first.

        Changes nothing. Stays usable while keys are removed or inserted: a removed
        key is skipped, an inserted one may be missed. ``may_go`` is asked for each
        key at most twice.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget every key and every request."""
