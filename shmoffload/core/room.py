"""Room for promotions: whose slot may go for whose block.

Covers: the victim of one promotion, or whether waiting for one will help.
Does not cover: GPU stores; they take any idle block (``stores``).
Who calls it: ``promotions`` only, scheduler thread.

In this order: a free slot; the first idle block in eviction order that nobody
counts on; what only younger scans count on. Two scans that do not fit together
therefore end, the older one first: nothing of a younger one stops it for longer
than a promotion is on its way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmoffload.core.slots import READY
from shmoffload.core.types import LookupResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shmoffload.core.policies import CachePolicy
    from shmoffload.core.requests import Request
    from shmoffload.core.retention import Retention
    from shmoffload.core.scans import ScanBook
    from shmoffload.core.slots import Block
    from shmoffload.core.types import OffloadKey

_MISS = LookupResult.MISS
_RETRY = LookupResult.RETRY


class _Search:
    """One walk along the eviction order on behalf of one request.

    It is carried on key after key while nothing became evictable, so that a scan
    of many keys walks the order once.
    """

    __slots__ = (
        "has_failed",
        "order",
        "passed_other",
        "passed_own",
        "request",
        "version",
    )

    def __init__(
        self, request: Request, version: int, order: Iterator[OffloadKey]
    ) -> None:
        self.request = request
        self.version = version
        self.order = order
        self.passed_own = False
        self.passed_other = False
        self.has_failed = False


class Room:
    """Finds slots for promotions."""

    def __init__(
        self,
        scans: ScanBook,
        policy: CachePolicy,
        retention: Retention,
        *,
        evict: Callable[[Block], None],
        take_queued: Callable[[Request], bool],
    ) -> None:
        self._scans = scans
        self._table = scans.table
        self._policy = policy
        self._retention = retention
        self._evict = evict
        self._take_queued = take_queued
        self._search: _Search | None = None

    def make(self, request: Request) -> LookupResult | None:
        """Free a slot for a promotion; None: there is one.

        Otherwise RETRY if waiting will help, MISS if not: what is in the way is
        the request's own scan, or stores and pins of others.
        """
        scans, table = self._scans, self._table
        if scans.num_sharing >= scans.share_limit and scans.share_binds(request):
            if self._take_from_younger(request, promoted_only=True):
                return None
            if scans.num_promoting > request.num_promoting or scans.num_loading:
                return _RETRY  # they land, or are loaded
            if scans.older_waits(request):
                return _RETRY  # it is served first
            if scans.others_refused(request):
                return _MISS  # stores come before promotions
            # Only younger ones wait. What two scans both count on may hold the
            # share for good, so the older goes beyond it: it has to end.
        if table.num_free:
            return None
        search = self._search
        if search is None or search.version != table.version:
            search = None
        elif search.has_failed and search.request.seq <= request.seq:
            # Whatever is closed to an older request is closed to a younger one.
            return self._verdict(request, search)
        elif search.request is not request:
            search = None
        if search is None:
            search = self._begin(request)
        victim = next(search.order, None)
        if victim is not None:
            self._evict(table.blocks[victim])
            return None
        if self._take_from_younger(request, promoted_only=False):
            return None
        search.has_failed = True
        return self._verdict(request, search)

    def end_step(self) -> None:
        """Let go of the step's walk; it would keep what is evicted from now on."""
        self._search = None

    def _begin(self, request: Request) -> _Search:
        """Start a walk over the idle blocks that nobody counts on."""
        blocks, step = self._table.blocks, self._scans.step
        reserved = self._scans.reserved()

        def may_go(key: OffloadKey) -> bool:
            block = blocks.get(key)
            if block is None or block.pins or block.state != READY:
                return False
            if block.told_step != step and key not in reserved:
                return True
            if request.counts_on(key):
                search.passed_own = True
            else:
                search.passed_other = True
            return False

        order = self._retention.victims(self._policy, may_go)
        search = _Search(request, self._table.version, order)
        self._search = search
        return search

    def _take_from_younger(self, request: Request, *, promoted_only: bool) -> bool:
        """Free a slot that only younger undecided scans count on.

        Their queued promotions go first: no byte has moved for them yet.
        """
        seq = request.seq
        if not any(
            other.seq > seq and (other.scan or other.before)
            for other in self._scans.undecided
        ):
            return False  # the common case: many wait and count on nothing yet
        if self._take_queued(request):
            return True
        reserved, step = self._scans.reserved(), self._scans.step
        if not reserved:
            return False
        blocks = self._table.blocks

        def may_go(key: OffloadKey) -> bool:
            block = blocks[key]
            return (
                not block.pins
                and block.state == READY
                and block.told_step != step
                and reserved.get(key, -1) > seq
                and (block.promoter is not None or not promoted_only)
            )

        victim = next(self._retention.victims(self._policy, may_go), None)
        if victim is None:
            return False
        self._evict(blocks[victim])
        return True

    def _verdict(self, request: Request, search: _Search) -> LookupResult:
        scans = self._scans
        in_the_way = search.passed_other or scans.num_promoting > request.num_promoting
        if search.request is not request:
            in_the_way = in_the_way or search.passed_own
        return _RETRY if in_the_way else _MISS
