"""What is remembered of a request, and of its open GPU copies.

Covers: plain records with little behaviour.
Does not cover: decisions about them (``scans``, ``promotions``, ``cascades``,
``manager``).
Who calls it: ``core`` only, scheduler thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmoffload.core.slots import QUARANTINED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shmoffload.core.counters import TenantCounters
    from shmoffload.core.request_policy import RequestAnswer, RequestPolicy
    from shmoffload.core.slots import Block, SlotTable
    from shmoffload.core.types import LookupResult, OffloadKey, ReqContext


class Request:
    """One announced request, until its tiers were told that it is over.

    Attributes:
        seq: age; smaller = announced earlier = served first.
        is_finished: the last word was heard; open stores may still complete.
        is_closed: the tiers were told; nothing is submitted for it any more.
        open_work: prepared stores, parked keys; finalisation waits for 0.
        asking: tiers that want every offered block, by index.
        sent: per asking tier, the keys it has got of this request.
        failed: keys whose promotion failed; not tried again for this request.
        declined: tiers, by index, that were once slower than computing for it.
        scan: keys counted by the latest scan; before: by the one before, until
            the step ends. counted: the set of both as far as it was asked for,
            with num_counted keys of ``scan``.
        scan_step, scan_s: when the latest scan was.
        is_deferred: a lookup of the latest scan was answered PENDING or RETRY.
        num_promoting: its promotions on the way, queued ones included.
        landed: its promotions that have arrived and nobody has loaded.
        is_bound: the promotion share binds in this scan; None = not asked yet.
        no_room: the answer to a promotion once one found no room in this scan.
        wait_since_s: time of the first RETRY since its last load.
        wanted: what was answered RETRY for want of room: (key, tier index).
        words: what it says about its own blocks; None = nothing.
        answer: what became of each word; None = it had none.
        store_to, load_from: tiers that may get or give its blocks; None = all.
        offered: keys offered to the asking tiers, sent or not.
        shed: per tier, the position from which on it got nothing for want of
            credit; a head that is missing makes what follows useless.
        num_unpinned: blocks that it wanted pinned and that are not.
        tenant: whom it is counted for.
    """

    __slots__ = (
        "answer",
        "asking",
        "before",
        "counted",
        "ctx",
        "declined",
        "failed",
        "is_bound",
        "is_closed",
        "is_deferred",
        "is_finished",
        "landed",
        "load_from",
        "no_room",
        "num_counted",
        "num_promoting",
        "num_unpinned",
        "offered",
        "open_work",
        "scan",
        "scan_s",
        "scan_step",
        "sent",
        "seq",
        "shed",
        "store_to",
        "tenant",
        "wait_since_s",
        "wanted",
        "words",
    )

    def __init__(self, ctx: ReqContext, seq: int, asking: tuple[int, ...]) -> None:
        self.ctx = ctx
        self.seq = seq
        self.is_finished = False
        self.is_closed = False
        self.open_work = 0
        self.asking = asking
        self.sent: dict[int, set[OffloadKey]] = {idx: set() for idx in asking}
        self.failed: set[OffloadKey] = set()
        self.declined: set[int] = set()
        self.scan: list[OffloadKey] = []
        self.before: list[OffloadKey] = []
        self.counted: set[OffloadKey] | None = None
        self.num_counted = 0
        self.scan_step = -1
        self.scan_s = 0.0
        self.is_deferred = False
        self.num_promoting = 0
        self.landed: dict[Block, None] = {}
        self.is_bound: bool | None = None
        self.no_room: LookupResult | None = None
        self.wait_since_s: float | None = None
        self.wanted: list[tuple[OffloadKey, int]] = []
        self.words: RequestPolicy | None = None
        self.answer: RequestAnswer | None = None
        self.store_to: frozenset[int] | None = None
        self.load_from: frozenset[int] | None = None
        self.offered: dict[OffloadKey, None] = {}
        self.shed: dict[int, int] = {}
        self.num_unpinned = 0
        self.tenant: TenantCounters | None = None

    def counts_on(self, key: OffloadKey) -> bool:
        """Say whether the latest scans count on a key; lists are quicker to fill."""
        if self.counted is None:
            self.counted, self.num_counted = set(self.before), 0
        if self.num_counted < len(self.scan):
            self.counted.update(self.scan[self.num_counted :])
            self.num_counted = len(self.scan)
        return key in self.counted

    def may_load_from(self, tier_idx: int) -> bool:
        """Say whether a tier may serve its lookups."""
        return self.load_from is None or tier_idx in self.load_from

    def missing(self, tier_idx: int) -> list[OffloadKey]:
        """Return the offered keys that an asking tier has not got."""
        sent = self.sent[tier_idx]
        return [key for key in self.offered if key not in sent]


class PreparedStore:
    """One granted ``prepare_store``: the owner of its PENDING blocks."""

    __slots__ = ("num_open", "request")

    def __init__(self, request: Request, num_open: int) -> None:
        self.request = request
        self.num_open = num_open


class CopyTable:
    """Blocks under open GPU copies, by request and key.

    A pair can be open twice only across a reset. The older one is answered first,
    since the copy engine works in order, or never, and then it is set aside.
    """

    def __init__(self) -> None:
        self._open: dict[str, dict[OffloadKey, Block]] = {}
        # What was opened while an older copy of the pair was; oldest first.
        self._again: dict[tuple[str, OffloadKey], list[Block]] = {}
        self._aside: list[Block] = []

    def set_aside(self) -> None:
        """Match no later answer with what is open now; all of it is quarantined."""
        self._aside = list(self)
        self._open.clear()
        self._again.clear()

    def add(self, req_id: str, blocks: Iterable[Block]) -> None:
        """Note that copies of ``blocks`` are open."""
        of_request = self._open.get(req_id)
        if of_request is None:
            of_request = self._open[req_id] = {}
        for block in blocks:
            key = block.key
            if key in of_request:
                self._again.setdefault((req_id, key), []).append(block)
            else:
                of_request[key] = block

    def take(self, req_id: str, keys: Iterable[OffloadKey]) -> list[Block | None]:
        """Return the blocks whose copies have ended; None: no such copy is open."""
        of_request = self._open.get(req_id)
        if of_request is None:
            return [None for _ in keys]
        pop = of_request.pop
        if self._again:
            taken = [self._take_one(req_id, of_request, key) for key in keys]
        else:
            taken = [pop(key, None) for key in keys]
        if not of_request:
            del self._open[req_id]
        return taken

    def _take_one(
        self, req_id: str, of_request: dict[OffloadKey, Block], key: OffloadKey
    ) -> Block | None:
        block = of_request.pop(key, None)
        later = self._again.get((req_id, key))
        if later:
            of_request[key] = later.pop(0)
            if not later:
                del self._again[req_id, key]
        return block

    def release_quarantined(self, table: SlotTable) -> None:
        """Forget copies from before a reset; none of them runs any more."""
        for block in self._aside:
            table.unpin(block)
        self._aside.clear()
        for req_id, of_request in list(self._open.items()):
            for key in list(of_request):
                blocks = [of_request.pop(key), *self._again.pop((req_id, key), ())]
                for block in blocks:
                    if block.state == QUARANTINED:
                        table.unpin(block)
                    else:
                        self.add(req_id, (block,))
            if not of_request:
                del self._open[req_id]

    def __iter__(self) -> Iterator[Block]:
        for of_request in self._open.values():
            yield from of_request.values()
        for later in self._again.values():
            yield from later
        yield from self._aside
