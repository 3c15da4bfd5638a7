"""Least recently used, by request: tails go before heads.

Covers: the order of semantics 3.3 (vLLM since 0.33).
Does not cover: pins and reservations (``room``, ``stores``).
Who calls it: ``core`` only, scheduler thread.

A *rung* holds keys of one rank. An active request has one rung, taken at its
first use of a key; inside, a later position goes first. When it finishes, all its
keys move to a new rung at the young end, tail first. Ranks only grow, so a chain
of rungs in order of creation is already sorted; nothing is ever re-sorted but the
inside of a rung that has changed.

A key that leaves a rung stays in its list: ``_where`` tells whose it is. A walk
skips such entries, and a list of mostly such entries is cut. A use is only noted;
keys move when somebody asks for the order, and not at all if their request has
finished by then. Moves may come in any order, since a key only ever moves up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shmoffload.core.policies import CachePolicy
from shmoffload.core.policies.order import Chain, tail_first

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from shmoffload.core.types import OffloadKey, ReqContext

FEW: Final = 16
"""Entries that are never worth cutting."""


class _Rung:
    """Keys of one rank.

    Attributes:
        entries: (-position, key), stale ones included.
        num_keys: keys whose rung this is.
        is_sorted: ``entries`` are in the order in which they go, each once.
        is_open: its request is active, so keys may still come.
        used: keys that move here once the order is asked for.
    """

    __slots__ = ("entries", "is_open", "is_sorted", "num_keys", "rank", "used")

    def __init__(self, rank: int, *, is_open: bool) -> None:
        self.rank = rank
        self.entries: list[tuple[int, OffloadKey]] = []
        self.num_keys = 0
        self.is_sorted = True
        self.is_open = is_open
        self.used: list[OffloadKey] = []

    def in_order(self, where: dict[OffloadKey, _Rung]) -> list[tuple[int, OffloadKey]]:
        """Return the entries as they go; a new list whenever it has changed."""
        entries = self.entries
        if not self.is_sorted:
            # A key that went and came again has two equal entries.
            self.entries = entries = sorted(set(entries))
            self.is_sorted = True
        if len(entries) > 2 * self.num_keys + FEW:
            self.entries = [e for e in entries if where.get(e[1]) is self]
        return self.entries


class LruPolicy(CachePolicy):
    """``lru``, and the order inside ``auto``."""

    def __init__(self) -> None:
        self._next_rank = 0
        self._rungs: Chain[_Rung] = Chain()
        self._where: dict[OffloadKey, _Rung] = {}
        self._open: dict[str, _Rung] = {}
        self._used: dict[str, dict[OffloadKey, None]] = {}
        self._noted: dict[str, ReqContext] = {}  # whose rungs have ``used`` keys

    def __contains__(self, key: object) -> bool:
        return key in self._where

    def insert(self, key: OffloadKey, ctx: ReqContext) -> None:
        """Put a new key on its request's rung; see ``CachePolicy``."""
        self._used_by(ctx)[key] = None
        position = ctx.key_positions.get(key)
        if position is None:
            # Without a position there is no place inside a request: own rank.
            rung, position = self._new_rung(is_open=False), 0
        else:
            rung = self._rung_of(ctx)
        rung.entries.append((-position, key))
        rung.is_sorted = False
        rung.num_keys += 1
        self._where[key] = rung

    def insert_all(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        """Put new keys on their request's rung; see ``CachePolicy``."""
        if not keys:
            return
        used, positions = self._used_by(ctx), ctx.key_positions
        try:
            entries = [(-positions[key], key) for key in keys]
        except KeyError:
            for key in keys:
                self.insert(key, ctx)
            return
        rung, where = self._rung_of(ctx), self._where
        rung.entries += entries
        rung.is_sorted = False
        rung.num_keys += len(keys)
        for key in keys:
            used[key] = None
            where[key] = rung

    def access(
        self,
        key: OffloadKey,
        ctx: ReqContext,
        *,
        is_ready: bool = True,
    ) -> None:
        """Move a key up; what is still being written is no reuse yet."""
        if is_ready and key in self._where:
            self.access_all((key,), ctx)

    def access_all(self, keys: Iterable[OffloadKey], ctx: ReqContext) -> None:
        """Note that keys move up to their request's rung, never down."""
        used = self._used_by(ctx)
        new = [key for key in keys if key not in used]
        if new:
            used.update(dict.fromkeys(new))
            self._rung_of(ctx).used += new
            self._noted[ctx.req_id] = ctx

    def remove(self, key: OffloadKey, *, evicted: bool) -> None:
        """Drop a key; unknown keys are ignored."""
        rung = self._where.pop(key, None)
        if rung is not None:
            self._leave(rung)

    def finish(self, ctx: ReqContext) -> None:
        """Move what the request used to the young end, tail first."""
        where = self._where
        used = self._used.pop(ctx.req_id, {})
        rung = self._open.pop(ctx.req_id, None)
        self._noted.pop(ctx.req_id, None)
        keys = tail_first([key for key in used if key in where], ctx)
        if keys:
            last = self._new_rung(is_open=False)
            last.entries = [(place, key) for place, key in enumerate(keys)]
            last.num_keys = len(keys)
            for key in keys:
                self._leave(where[key])
                where[key] = last
        if rung is not None:
            rung.is_open = False
            rung.used = []
            if not rung.num_keys:
                self._rungs.discard(rung)

    def victims(self, may_go: Callable[[OffloadKey], bool]) -> Iterator[OffloadKey]:
        """Yield keys, oldest rung first, tails before heads."""
        where = self._where
        self._move_used()
        for rung in self._rungs:
            if rung.num_keys:
                for _, key in rung.in_order(where):
                    if where.get(key) is rung and may_go(key):
                        yield key
                        if self._noted:
                            self._move_used()

    def clear(self) -> None:
        """Forget all; ranks go on counting."""
        self._rungs.clear()
        self._where.clear()
        self._open.clear()
        self._used.clear()
        self._noted.clear()

    def _used_by(self, ctx: ReqContext) -> dict[OffloadKey, None]:
        used = self._used.get(ctx.req_id)
        if used is None:
            used = self._used[ctx.req_id] = {}
        return used

    def _rung_of(self, ctx: ReqContext) -> _Rung:
        rung = self._open.get(ctx.req_id)
        if rung is None:
            rung = self._open[ctx.req_id] = self._new_rung(is_open=True)
        return rung

    def _move_used(self) -> None:
        """Let keys that were used meanwhile go up."""
        for req_id, ctx in self._noted.items():
            rung = self._open[req_id]
            used, rung.used = rung.used, []
            self._raise([key for key in used if key in self._where], ctx)
        self._noted.clear()

    def _new_rung(self, *, is_open: bool) -> _Rung:
        rung = _Rung(self._next_rank, is_open=is_open)
        self._rungs.add(rung)
        self._next_rank += 1
        return rung

    def _raise(self, keys: Iterable[OffloadKey], ctx: ReqContext) -> None:
        """Move keys up to the request's rung; one without position to its own."""
        where, positions = self._where, ctx.key_positions
        rung: _Rung | None = None
        for key in keys:
            position = positions.get(key)
            if position is None:  # as in ``insert``
                target, position = self._new_rung(is_open=False), 0
            else:
                target = rung = rung or self._rung_of(ctx)
            before = where.get(key)
            if before is not None:
                if before.rank >= target.rank:
                    continue
                self._leave(before)
            where[key] = target
            target.entries.append((-position, key))
            target.is_sorted = False
            target.num_keys += 1

    def _leave(self, rung: _Rung) -> None:
        rung.num_keys -= 1
        if not rung.num_keys and not rung.is_open:
            self._rungs.discard(rung)
