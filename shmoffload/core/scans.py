"""Scans: which blocks a waiting request counts on, and the promotion share.

Covers: reservations, when a scan is decided, how many slots promotions hold.
Does not cover: finding room (``room``).
Who calls it: ``core`` only, scheduler thread.

A *scan* is what one request looks up in one step. It is *undecided* from the first
PENDING or RETRY on: the caller will ask again, and counts on the blocks that it
was told about. If another promotion, or a later one of the same scan, could evict
them, two scans (or one with a prefix longer than the primary) would push each
other's blocks out for ever (vLLM 0.32 and 0.33 do: semantics 0.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shmoffload.core.requests import Request
    from shmoffload.core.slots import Block, SlotTable
    from shmoffload.core.types import OffloadKey


class ScanBook:
    """Scans of all requests.

    Attributes:
        table: the slots.
        step: number of the current step.
        undecided: requests that wait, in the order in which they began to.
        num_promoting: promotions on the way, queued ones included.
        num_landed: promotions that have arrived for an undecided scan and that
            nobody has loaded yet.
        num_loading: those of them that are on their way to the GPU.
        share_limit: what all three together may hold while the share binds.
    """

    def __init__(
        self, table: SlotTable, *, promotion_share: float, scan_hold_s: float
    ) -> None:
        self.step = 0
        self.undecided: dict[Request, None] = {}
        self.num_promoting = 0
        self.num_landed = 0
        self.num_loading = 0
        self.share_limit = max(1, int(promotion_share * table.num_slots))
        self.table = table
        self._scan_hold_s = scan_hold_s
        self._scanned: list[Request] = []
        self._refused: dict[Request, int] = {}
        self._reserved: dict[OffloadKey, int] | None = None

    def begin(self, request: Request, now_s: float) -> None:
        """Open this step's scan; it replaces the last one when the step ends."""
        request.scan_step = self.step
        request.scan_s = now_s
        # Kept until the step ends: the promotion of an early key must not evict
        # a later one that is about to be counted again.
        request.before, request.scan = request.scan, []
        request.counted = None
        request.is_deferred = False
        request.is_bound = None
        request.no_room = None
        self._scanned.append(request)

    def defer(self, request: Request) -> None:
        """Note that the scan was answered PENDING or RETRY: it will come again."""
        request.is_deferred = True
        self.undecided[request] = None

    def decide(self, request: Request) -> None:
        """Lift a request's reservations: it loads, is finished or has gone."""
        self.undecided.pop(request, None)
        request.scan, request.before = [], []
        request.counted = None
        self.num_landed -= len(request.landed)
        for block in request.landed:
            block.promoter = None
        request.landed.clear()
        self._changed()

    def end_step(self, now_s: float) -> None:
        """Drop what this step's scans have replaced, decide what is definite."""
        for request in self._scanned:
            request.before = []
            request.counted = None
            if not request.is_deferred:
                self.decide(request)
        self._scanned.clear()
        for request in [
            r for r in self.undecided if now_s - r.scan_s > self._scan_hold_s
        ]:
            self.decide(request)
        self.step += 1
        for request in [r for r, s in self._refused.items() if s < self.step - 1]:
            del self._refused[request]
        self._changed()

    def refused_store(self, request: Request) -> None:
        """Note that a request was refused a store for want of room."""
        self._refused[request] = self.step

    def forget(self, request: Request) -> None:
        """Drop a finished request."""
        self.decide(request)
        self._refused.pop(request, None)

    def reserved(self) -> dict[OffloadKey, int]:
        """Return key -> age of the oldest undecided scan that counts it.

        Built once per step and on a decision; what this step's lookups add is
        guarded by ``Block.told_step``.
        """
        if self._reserved is None:
            oldest: dict[OffloadKey, int] = {}
            for request in self.undecided:
                seq = request.seq
                for keys in (request.scan, request.before):
                    for key in keys:
                        if oldest.get(key, seq) >= seq:
                            oldest[key] = seq
            self._reserved = oldest
        return self._reserved

    @property
    def num_sharing(self) -> int:
        """Blocks that count in the promotion share."""
        return self.num_promoting + self.num_landed + self.num_loading

    def share_binds(self, request: Request) -> bool:
        """Say whether others need what promotions would take.

        That is another request that waits, or had a store refused in this step or
        the last one.
        """
        if request.is_bound is None:
            request.is_bound = self.others_refused(request) or any(
                other is not request for other in self.undecided
            )
        return request.is_bound

    def others_refused(self, request: Request) -> bool:
        """Say whether another request had a store refused just now."""
        return any(other is not request for other in self._refused)

    def older_waits(self, request: Request) -> bool:
        """Say whether an older scan waits."""
        return any(other.seq < request.seq for other in self.undecided)

    def started(self, block: Block, request: Request) -> None:
        """Count a promotion; also when one request takes over from another."""
        if block.promoter is not None:
            self.stopped(block)
        block.promoter = request
        request.num_promoting += 1
        self.num_promoting += 1

    def stopped(self, block: Block) -> None:
        """Stop counting a promotion on the way: failed, dropped or reset."""
        request = block.promoter
        assert request is not None
        block.promoter = None
        request.num_promoting -= 1
        self.num_promoting -= 1

    def landed(self, block: Block) -> None:
        """Count a promotion as landed, if its scan still waits for it."""
        request = block.promoter
        assert request is not None
        self.stopped(block)
        if request in self.undecided:
            block.promoter = request
            request.landed[block] = None
            self.num_landed += 1

    def loading(self, block: Block) -> None:
        """Count a landed block as being loaded; until then it is in the way."""
        if block.promoter is not None:
            self.used(block)
            block.is_loading = True
            self.num_loading += 1

    def used(self, block: Block) -> None:
        """Stop counting a block: its load has ended, it is evicted or reset."""
        if block.is_loading:
            block.is_loading = False
            self.num_loading -= 1
        request = block.promoter
        if request is not None:
            block.promoter = None
            del request.landed[block]
            self.num_landed -= 1

    def clear(self) -> None:
        """Drop every scan; the primary is empty."""
        for request in list(self.undecided):
            self.decide(request)
        for request in self._scanned:
            self.decide(request)
        self._refused.clear()

    def check_integrity(self) -> None:
        """Assert the counts."""
        landed = sum(len(r.landed) for r in self.undecided)
        assert landed == self.num_landed
        assert all(b.promoter is r for r in self.undecided for b in r.landed)
        loading = sum(block.is_loading for block in self.table.blocks.values())
        assert loading == self.num_loading

    def _changed(self) -> None:
        self._reserved = None
        self.table.version += 1
