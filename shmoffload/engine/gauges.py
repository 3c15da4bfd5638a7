"""What the session page shows of the engine.

Covers: copying the core's counters into the engine's words, once per step.
Does not cover: the workers' and the supervisor's words; they write their own.
Who calls it: ``Engine``, in the scheduler's thread.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shmoffload.wire.session import MAX_WORD, TierWord, Word

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmoffload.core.mailbox import MailboxTier
    from shmoffload.core.manager import TieringOffloadingManager
    from shmoffload.wire.config import Config
    from shmoffload.wire.session import SessionPage


class Gauges:
    """Writes the engine's words of the session page.

    Attributes:
        num_requests: requests announced so far.
    """

    def __init__(
        self,
        config: Config,
        page: SessionPage,
        manager: TieringOffloadingManager,
        tiers: Sequence[MailboxTier],
    ) -> None:
        """Remember who writes where; show what stays as it is."""
        self.num_requests = 0
        self._num_steps = page.get(Word.STEPS)
        self._page = page
        self._words = page.words
        self._manager = manager
        self._tiers = tiers
        page.set(Word.NUM_SLOTS, config.num_slots)
        page.set(Word.STRIDE_BYTES, config.stride)
        page.set(Word.BLOCK_BYTES, config.block_bytes)

    def publish(self, *, num_steps: int) -> None:
        """Show how things stand; about 5 us for two tiers, no system call."""
        words, manager = self._words, self._manager
        counters, table = manager.counters, manager.table
        words[Word.ENGINE_HEARTBEAT_NS] = time.monotonic_ns()
        # Not read back: others can write the page, and may have.
        self._num_steps = (self._num_steps + num_steps) & MAX_WORD
        words[Word.STEPS] = self._num_steps
        words[Word.SLOTS_PENDING] = table.num_pending
        words[Word.SLOTS_QUARANTINED] = table.num_quarantined
        words[Word.SLOTS_READY] = len(table.blocks) - table.num_pending
        words[Word.REQUESTS] = self.num_requests
        words[Word.LOOKUPS] = (
            counters.hits_primary
            + counters.hits_pending
            + counters.retries
            + counters.misses
        )
        words[Word.HITS_PRIMARY] = counters.loads_primary
        words[Word.MISSES] = counters.misses
        words[Word.STORED_BLOCKS] = counters.stores_prepared - counters.stores_failed
        words[Word.LOADED_BLOCKS] = counters.loads_primary + sum(counters.loads_tier)
        words[Word.EVICTED_BLOCKS] = counters.evictions
        words[Word.STORES_REFUSED] = counters.stores_refused
        words[Word.ALLOCATION_FAILURES] = counters.allocation_failures
        for i, tier in enumerate(self._tiers):
            base = self._page.tier_base(i)
            failed = counters.cascade_jobs_failed[i] + counters.promotion_jobs_failed[i]
            words[base + TierWord.HITS] = counters.loads_tier[i]
            words[base + TierWord.STORE_JOBS] = counters.cascade_jobs[i]
            words[base + TierWord.STORE_BLOCKS] = counters.cascade_blocks[i]
            words[base + TierWord.LOAD_JOBS] = counters.promotion_jobs[i]
            words[base + TierWord.LOAD_BLOCKS] = counters.hits_tier[i]
            words[base + TierWord.JOBS_FAILED] = failed
            words[base + TierWord.JOBS_DROPPED] = counters.cascade_jobs_dropped[i]
            words[base + TierWord.BLOCKS_DROPPED] = counters.cascade_blocks_dropped[i]
            words[base + TierWord.BLOCKS_DECLINED] = counters.promotions_declined[i]
            words[base + TierWord.LATE_REPLIES] = tier.late_replies
            words[base + TierWord.IN_FLIGHT_BYTES] = tier.open_store_bytes
            words[base + TierWord.ENGINE_TIER_UP] = int(tier.is_up)
