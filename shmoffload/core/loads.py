"""GPU loads: primary to GPU.

Covers: pinning what is loaded, what a load means for scans and the order.
Does not cover: promotions (``promotions``), where the bytes go (the caller).
Who calls it: ``manager`` only, scheduler thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmoffload.core.requests import CopyTable
from shmoffload.core.slots import FROM_STORE, QUARANTINED, READY
from shmoffload.core.types import NotReadableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shmoffload.core.counters import Counters
    from shmoffload.core.policies import CachePolicy
    from shmoffload.core.requests import Request
    from shmoffload.core.scans import ScanBook
    from shmoffload.core.slots import Block, SlotTable
    from shmoffload.core.types import OffloadKey, ReqContext


class GpuLoads:
    """Prepared loads.

    Attributes:
        copies: blocks that the GPU reads.
    """

    def __init__(
        self,
        table: SlotTable,
        policy: CachePolicy,
        scans: ScanBook,
        counters: Counters,
    ) -> None:
        self.copies = CopyTable()
        self._table = table
        self._policy = policy
        self._scans = scans
        self._counters = counters

    def prepare(self, keys: Sequence[OffloadKey], request: Request) -> list[Block]:
        """Pin readable blocks; decides the request's scan.

        Raises:
            NotReadableError: a key is not readable; nothing was pinned.
        """
        try:
            blocks = [self._table.blocks[key] for key in keys]
        except KeyError as error:
            raise NotReadableError(*error.args) from None
        for block in blocks:
            if block.state != READY:
                raise NotReadableError(block.key)
        self.copies.add(request.ctx.req_id, blocks)
        self._policy.access_all(keys, request.ctx)
        counters = self._counters
        counters.loads_primary += len(blocks)
        for block in blocks:
            if not block.pins:  # SlotTable.pin, without its call
                self._table.num_pinned += 1
            block.pins += 1
            if block.promoter is not None:
                self._scans.loading(block)
            if block.origin != FROM_STORE:
                counters.loads_primary -= 1
                counters.loads_tier[block.origin] += 1
                block.origin = FROM_STORE
        if request.tenant is not None:
            request.tenant.loads += len(blocks)
        request.wait_since_s = None
        self._scans.decide(request)
        return blocks

    def complete(self, keys: Iterable[OffloadKey], ctx: ReqContext) -> None:
        """Unpin what a load has read; the request may have finished since."""
        unpin = self._table.unpin
        for block in self.copies.take(ctx.req_id, keys):
            if block is None or block.state == QUARANTINED:
                self._counters.late_calls += 1
            if block is not None:
                if block.is_loading or block.promoter is not None:
                    self._scans.used(block)
                unpin(block)
