"""GPU stores: GPU to primary.

Covers: granting slots to an offer, and what the end of the copy means.
Does not cover: store jobs to tiers (``cascades``).
Who calls it: ``manager`` only, scheduler thread.
"""

from __future__ import annotations

from itertools import islice, takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shmoffload.core.requests import CopyTable, PreparedStore
from shmoffload.core.slots import PENDING, READY
from shmoffload.core.types import PrepareStoreOutput

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from shmoffload.core.cascades import Cascades
    from shmoffload.core.counters import Counters
    from shmoffload.core.offers import OfferRule
    from shmoffload.core.policies import CachePolicy
    from shmoffload.core.promotions import Promotions
    from shmoffload.core.requests import Request
    from shmoffload.core.slots import Block, SlotTable
    from shmoffload.core.types import OffloadKey, ReqContext


class Granted(NamedTuple):
    """An answer, and the offered blocks that were here before."""

    output: PrepareStoreOutput
    present: Sequence[Block]


class GpuStores:
    """Prepared stores.

    Attributes:
        copies: blocks that the GPU writes.
    """

    def __init__(
        self,
        table: SlotTable,
        policy: CachePolicy,
        promotions: Promotions,
        cascades: Cascades,
        counters: Counters,
        *,
        accepts_prefix: bool,
        offer_rule: OfferRule,
    ) -> None:
        self.copies = CopyTable()
        self._accepts_prefix = accepts_prefix
        self._offers = offer_rule.make_counts()
        self._retention = promotions.retention
        self._table = table
        self._policy = policy
        self._promotions = promotions
        self._scans = promotions.scans
        self._cascades = cascades
        self._counters = counters
        self._room: tuple[int, int, int] = (-1, -1, 0)

    def prepare(self, keys: Iterable[OffloadKey], request: Request) -> Granted | None:
        """Grant slots for the absent keys of an offer: all, none, or a prefix."""
        table, counters = self._table, self._counters
        offered = dict.fromkeys(keys)
        absent: Sequence[OffloadKey]
        absent = [key for key in offered if key not in table.blocks]
        num_present = len(offered) - len(absent)
        candidates = list(offered)
        if self._offers is not None:
            absent, candidates = self._often_offered(offered, absent)
        num_absent = len(absent)
        # A block that is not stored cannot be cascaded, so nothing is refused that
        # a tier would have got; the policy may let it go first.
        absent = self._policy.offer(
            candidates,
            absent,
            request.ctx,
            may_refuse=counters.num_tiers == 0,
        )
        num_wanted = len(absent) - table.num_free
        victims = self._victims(offered, request, num_wanted)
        left_out: Sequence[OffloadKey] = ()
        if len(victims) < num_wanted:
            self._scans.refused_store(request)
            num_fit = table.num_free + len(victims)
            if not self._accepts_prefix or not num_fit:
                counters.stores_refused += 1
                return None
            absent, left_out = absent[:num_fit], absent[num_fit:]
            counters.stores_shortened += 1
        counters.blocks_not_admitted += num_absent - len(absent) - len(left_out)
        present: list[Block] = []
        if num_present:
            present = [
                table.blocks[key]
                for key in _before(offered, left_out)
                if key in table.blocks
            ]
        for block in victims:
            self._promotions.evict(block)
        granted = self._reserve(absent, request)
        self._policy.insert_all(absent, request.ctx)
        ready = [block.key for block in present if block.state == READY]
        self._policy.access_all(ready, request.ctx)
        for block in present:
            if block.state != READY:
                self._policy.access(block.key, request.ctx, is_ready=False)
        output = PrepareStoreOutput(
            keys_to_store=absent,
            slots=np.array([block.slot for block in granted], dtype=np.int32),
            evicted_keys=[block.key for block in victims],
            left_out=left_out,
        )
        return Granted(output, present)

    def _often_offered(
        self, offered: dict[OffloadKey, None], absent: Sequence[OffloadKey]
    ) -> tuple[Sequence[OffloadKey], list[OffloadKey]]:
        """Count an offer; return it without the absent keys that are too new.

        Nobody hears of those: a policy would learn of a use that is none yet.
        """
        assert self._offers is not None
        self._offers.count(offered)
        often = self._offers.often_enough(absent)
        self._counters.stores_skipped += len(absent) - len(often)
        too_new = set(absent).difference(often)
        return often, [key for key in offered if key not in too_new]

    def _reserve(self, keys: Sequence[OffloadKey], request: Request) -> list[Block]:
        """Hand out slots to absent keys; they are free."""
        if not keys:
            return []
        prepared = PreparedStore(request, len(keys))
        granted = self._table.reserve_all(keys, prepared)
        self.copies.add(request.ctx.req_id, granted)
        request.open_work += 1
        self._counters.stores_prepared += len(keys)
        if request.words is not None:
            self._retention.stored(request, granted)
            if request.tenant is not None:
                request.tenant.stores_prepared += len(keys)
        return granted

    def complete(
        self, keys: Collection[OffloadKey], ctx: ReqContext, *, success: bool
    ) -> list[Request]:
        """End a copy: blocks go to every tier, or vanish.

        Returns:
            Requests of which a prepared store has ended.
        """
        written = self._take(keys, ctx)
        by_request: dict[Request, list[Block]] = {}
        ended: list[Request] = []
        prepared: PreparedStore | None = None
        for block in written:
            if block.owner is not prepared:
                assert isinstance(block.owner, PreparedStore)
                prepared = block.owner
                same = by_request.setdefault(prepared.request, [])
            assert prepared is not None
            same.append(block)
            prepared.num_open -= 1
            if prepared.num_open == 0 and not prepared.request.is_closed:
                ended.append(prepared.request)
        if success:
            released = self._cascades.publish(written)
            for request, blocks in by_request.items():
                if not request.is_closed:
                    self._cascades.send_stored(request, blocks)
            self._cascades.fire(released)
        else:
            self._fail(written)
        for request in ended:
            request.open_work -= 1
        return ended

    def check_integrity(self) -> None:
        """Assert that what a prepared store owns is under an open copy."""
        copied = {block for block in self.copies if block.state == PENDING}
        assert copied == {
            block
            for block in self._table.blocks.values()
            if block.state == PENDING and isinstance(block.owner, PreparedStore)
        }

    def _take(self, keys: Iterable[OffloadKey], ctx: ReqContext) -> list[Block]:
        """Return the blocks whose copy has ended; let stale ones go."""
        written = []
        for block in self.copies.take(ctx.req_id, dict.fromkeys(keys)):
            if block is not None and block.state == PENDING:
                written.append(block)
                continue
            self._counters.late_calls += 1
            if block is not None:
                self._table.unpin(block)  # of before a reset
        return written

    def _victims(
        self, offered: dict[OffloadKey, None], request: Request, num: int
    ) -> list[Block]:
        """Return ``num`` blocks that may go, or as many as do; changes nothing."""
        if num <= 0:
            return []
        table, step = self._table, self._scans.step
        version, of_step, most = self._room
        if (version, of_step) == (table.version, step) and num > most:
            return []  # nothing has become evictable since the last refusal
        blocks, num_own = table.blocks, 0
        # The rest of a shortened offer must not push out the head that was taken
        # of it; with a tier behind, the head has gone there.
        kept: Collection[OffloadKey] = ()
        if self._accepts_prefix and not self._counters.num_tiers:
            kept = request.ctx.key_positions

        def may_go(key: OffloadKey) -> bool:
            nonlocal num_own
            block = blocks[key]
            if block.pins or block.state != READY or block.told_step == step:
                return False
            if key in offered or key in kept:
                num_own += 1
                return False
            return True

        order = self._retention.victims(self._policy, may_go)
        victims = list(islice(order, num))
        if len(victims) < num and not self._accepts_prefix:
            self._room = (table.version, step, len(victims) + num_own)
        return [blocks[key] for key in victims]

    def _fail(self, blocks: Sequence[Block]) -> None:
        self._counters.stores_failed += len(blocks)
        for block in blocks:
            if self._retention.marks:
                self._retention.forget(block)
            self._policy.remove(block.key, evicted=False)
            self._table.abandon(block)
        for block in blocks:
            self._cascades.drop(block)


def _before(
    offered: Iterable[OffloadKey], left_out: Sequence[OffloadKey]
) -> Iterable[OffloadKey]:
    """Return what an offer has before the first key that is left out."""
    if not left_out:
        return offered
    return takewhile(lambda key: key != left_out[0], offered)
