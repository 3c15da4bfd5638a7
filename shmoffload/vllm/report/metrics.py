"""Our figures on vLLM's ``/metrics``.

Covers: names, definitions, what has changed since vLLM asked last.
Does not cover: counting (``core.counters``, the session page), vLLM's own figures of
GPU copies and requests, publishing (vLLM).
Who calls it: ``spec`` (definitions; also in API servers), ``manager`` (the rest;
scheduler thread). No system call.

vLLM asks every step and sends the answer to its API server, where a name that was
not declared, or a wrong number of labels, ends the server. So declaration and
emission come from one table, the first answer has everything, zeros included, and
later ones only what has changed. Counters are differences of totals: an answer that
nobody takes loses nothing. Totals before this server's start are not its own.

Where vLLM has a name for the same thing we use it; "chunk" is its word for a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload import base as vllm_base

import shmoffload
from shmoffload.vllm.report.metric_names import (
    ALLOCATION_BUCKETS,
    ALLOCATION_SIZE,
    DEFINITIONS,
    PRIMARY_LABEL,
    Kind,
)
from shmoffload.wire.session import Fault, TierWord, Word

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shmoffload.core.types import OffloadKey
    from shmoffload.engine.handle import Engine
    from shmoffload.vllm.setup.settings import Settings

    Number = int | float

_CONFIG_INFO_KEYS: Final = ("policy", "slots", "block_bytes", "tiers", "version")

METHODS: Final = (
    "lookup",
    "prepare_load",
    "get_load_source",
    "touch",
    "complete_load",
    "prepare_store",
    "complete_store",
    "on_new_request",
    "on_request_finished",
    "on_schedule_end",
    "has_pending_work",
    "take_events",
    "reset_cache",
    "on_reset_flushed",
    "get_stats",
    "shutdown",
)
_MAX_ALLOCATIONS: Final = 10_000
"""Observations that wait for vLLM to ask; the rest is not observed."""

_TIER: Final = "vllm:kv_offload_tiering_"
_CPU: Final = "vllm:kv_offload_cpu_cache_"
_OURS: Final = "vllm:shmoffload_"


def metric_definitions(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return every name that ``Metrics`` may emit, as vLLM wants them declared.

    The same for every configuration; never raises.
    """
    made: dict[str, Any] = {}
    for name, (kind, labels, text) in DEFINITIONS.items():
        if kind is Kind.COUNTER:
            made[name] = vllm_base.OffloadingCounterMetadata(
                documentation=text, labelnames=labels
            )
        elif kind is Kind.GAUGE:
            made[name] = vllm_base.OffloadingGaugeMetadata(
                documentation=text, labelnames=labels
            )
        else:
            made[name] = vllm_base.OffloadingHistogramMetadata(
                documentation=text, labelnames=labels, buckets=ALLOCATION_BUCKETS
            )
    return made


def config_info_keys(extra_config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels of ``vllm:kv_offload_config_info`` (0.33)."""
    return _CONFIG_INFO_KEYS


def config_info(settings: Settings) -> dict[str, str | int | float | bool]:
    """Return the one series of ``vllm:kv_offload_config_info``."""
    config = settings.config
    values = (
        config.primary.policy,
        config.num_slots,
        config.block_bytes,
        ",".join(labels_of(settings)) or "none",
        shmoffload.__version__,
    )
    return dict(zip(_CONFIG_INFO_KEYS, values, strict=True))


def labels_of(settings: Settings) -> list[str]:
    """Return vLLM's label of each tier: its number, from 1, and its type."""
    return [f"{i}:{tier.type}" for i, tier in enumerate(settings.config.tier, 1)]


class _Series(NamedTuple):
    name: str
    labels: tuple[str, ...]
    is_gauge: bool
    read: Callable[[], Number]


class Metrics:
    """What one scheduler tells vLLM of its engine.

    Attributes:
        num_offers: calls of ``prepare_store`` that reached the core.
        is_fence_held: GPU copies of before a reset are waited for.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.num_offers = 0
        self.is_fence_held = False
        self._errors = dict.fromkeys(METHODS, 0)
        self._num_misses = 0
        self._missed: dict[str, set[OffloadKey]] = {}  # of requests not loaded yet
        self._allocations: list[int] = []
        self._engine = engine
        self._labels = labels_of(settings)
        self._series: list[_Series] = []
        self._add_primary()
        self._add_engine()
        for idx, label in enumerate(self._labels):
            self._add_tier(idx, label)
            self._add_worker(idx, label)
        self._last = [series.read() for series in self._series]
        self._is_first = True

    # What the manager sees ----------------------------------------------------------

    def note_miss(self, key: OffloadKey, req_id: str) -> None:
        """Count a miss once per request and block: vLLM asks again in every step."""
        missed = self._missed.get(req_id)
        if missed is None:
            missed = self._missed[req_id] = set()
        if key not in missed:
            missed.add(key)
            self._num_misses += 1

    def forget_misses(self, req_id: str) -> None:
        """Forget a request that loads, or is over."""
        self._missed.pop(req_id, None)

    def note_allocation(self, num_blocks: int) -> None:
        """Note how many slots one ``prepare_store`` took."""
        if len(self._allocations) < _MAX_ALLOCATIONS:
            self._allocations.append(num_blocks)

    def note_error(self, method: str) -> int:
        """Count an exception of the adapter; return how many of the method."""
        self._errors[method] += 1
        return self._errors[method]

    def take(self) -> OffloadingConnectorStats:
        """Return what has changed since the last call; the first time everything."""
        stats = OffloadingConnectorStats()
        last, is_first = self._last, self._is_first
        for i, (name, labels, is_gauge, read) in enumerate(self._series):
            now, before = read(), last[i]
            if now == before and not is_first:
                continue
            last[i] = now
            if is_gauge:
                stats.set_gauge(name, now, labels)
            else:
                # Below: a page made anew, by a daemon that was started again.
                grown = now - before if now >= before else now
                stats.increase_counter(name, grown, labels)
        self._is_first = False
        for size in self._allocations:
            stats.observe_histogram(ALLOCATION_SIZE, size)
        self._allocations.clear()
        return stats

    # The table ------------------------------------------------------------------------

    def _add(self, name: str, read: Callable[[], Number], *labels: str) -> None:
        kind, labelnames, _ = DEFINITIONS[name]
        assert len(labels) == len(labelnames), name
        self._series.append(_Series(name, labels, kind is Kind.GAUGE, read))

    def _add_primary(self) -> None:
        add, manager = self._add, self._engine.manager
        table, counters = manager.table, manager.counters
        size = table.num_slots
        add(
            _CPU + "usage_perc",
            lambda: (
                (table.num_pending + table.num_pinned + table.num_quarantined) / size
            ),
        )
        add(_CPU + "write_usage_perc", lambda: table.num_pending / size)
        add(_CPU + "read_usage_perc", lambda: table.num_pinned / size)
        add("vllm:kv_offload_stores_skipped", lambda: counters.stores_skipped)
        add(
            _TIER + "promotion_allocation_failures",
            lambda: counters.allocation_failures,
        )
        hits_tier = counters.hits_tier
        add(
            _TIER + "chunk_queries",
            lambda: counters.loads_primary + sum(hits_tier) + self._num_misses,
            PRIMARY_LABEL,
        )
        add(_TIER + "chunk_hits", lambda: counters.loads_primary, PRIMARY_LABEL)
        name = _OURS + "slots"
        add(name, lambda: table.num_free, "free")
        add(name, lambda: len(table.blocks) - table.num_pending, "ready")
        add(name, lambda: table.num_pending, "pending")
        add(name, lambda: table.num_quarantined, "quarantined")
        name = _OURS + "lookups"
        add(name, lambda: counters.hits_primary, "hit")
        add(name, lambda: counters.hits_pending, "hit_pending")
        add(name, lambda: counters.retries, "retry")
        add(name, lambda: counters.misses, "miss")
        name = _OURS + "loaded_blocks"
        add(name, lambda: counters.loads_primary, PRIMARY_LABEL)

    def _add_engine(self) -> None:
        add, engine = self._add, self._engine
        counters = engine.manager.counters
        words = engine.page.words
        add(_OURS + "engine_broken", lambda: int(engine.is_broken))
        add(_OURS + "reset_fence_held", lambda: int(self.is_fence_held))
        add(_OURS + "requests", lambda: words[Word.REQUESTS])
        add(_OURS + "stored_blocks", lambda: counters.stores_prepared)
        add(_OURS + "evicted_blocks", lambda: counters.evictions)
        add(_OURS + "store_offers", lambda: self.num_offers)
        add(_OURS + "store_offers_refused", lambda: counters.stores_refused)
        add(_OURS + "resets", lambda: counters.resets)
        add(_OURS + "late_calls", lambda: counters.late_calls)
        add(_OURS + "overdue_jobs", lambda: counters.overdue_jobs)
        add(_OURS + "promotions_dropped", lambda: counters.promotions_dropped)
        add(_OURS + "blocks_not_admitted", lambda: counters.blocks_not_admitted)
        add(_OURS + "foreign_answers", lambda: counters.foreign_keys)
        errors = self._errors
        for method in METHODS:
            add(
                _OURS + "adapter_errors",
                lambda method=method: errors[method],  # type: ignore[misc]
                method,
            )

    def _add_tier(self, idx: int, label: str) -> None:
        """Add what the scheduler knows of a tier."""
        add, manager, tier = self._add, self._engine.manager, self._engine.tiers[idx]
        counters = manager.counters
        size, block_bytes = manager.table.num_slots, self._engine.config.stride
        hits = counters.hits_tier
        add(
            _TIER + "chunk_queries",
            lambda: sum(hits[idx:]) + self._num_misses,
            label,
        )
        add(_TIER + "chunk_hits", lambda: hits[idx], label)
        add(
            _TIER + "promotion_job_failures",
            lambda: counters.promotion_jobs_failed[idx],
            label,
        )
        add(
            _TIER + "cascade_job_failures",
            lambda: counters.cascade_jobs_failed[idx],
            label,
        )
        add(
            _TIER + "backpressure_stores_dropped",
            lambda: counters.cascade_jobs_dropped[idx],
            label,
        )
        add(
            _TIER + "backpressure_blocks_dropped",
            lambda: counters.cascade_blocks_dropped[idx],
            label,
        )
        add(
            _TIER + "primary_write_usage_perc",
            lambda: tier.open_load_blocks / size,
            label,
        )
        add(
            _TIER + "primary_read_usage_perc",
            lambda: tier.open_store_bytes // block_bytes / size,
            label,
        )
        add(_TIER + "active_promotion_jobs", lambda: tier.num_open_loads, label)
        add(
            _TIER + "active_cascade_jobs",
            lambda: tier.num_open_jobs - tier.num_open_loads,
            label,
        )
        add(_OURS + "loaded_blocks", lambda: counters.loads_tier[idx], label)
        name = _OURS + "tier_jobs"
        add(name, lambda: counters.cascade_jobs[idx], label, "cascade")
        add(name, lambda: counters.promotion_jobs[idx], label, "promotion")
        name = _OURS + "tier_jobs_failed"
        add(name, lambda: tier.jobs_refused, label, "not_sent")
        add(name, lambda: tier.jobs_lost, label, "worker_died")
        add(name, lambda: tier.jobs_failed, label, "blocks_failed")
        add(_OURS + "tier_up", lambda: int(tier.is_up), label)
        add(
            _OURS + "tier_blocks_withheld",
            lambda: counters.cascade_blocks_withheld[idx],
            label,
        )
        add(
            _OURS + "tier_blocks_incomplete",
            lambda: counters.incomplete_keys[idx],
            label,
        )
        add(
            _OURS + "tier_blocks_declined",
            lambda: counters.promotions_declined[idx],
            label,
        )
        add(_OURS + "tier_late_replies", lambda: tier.late_replies, label)
        add(_OURS + "tier_in_flight_bytes", lambda: tier.open_store_bytes, label)

    def _add_worker(self, idx: int, label: str) -> None:
        """Add what a tier's worker and the supervisor say in the session page."""
        add, page, block_bytes = self._add, self._engine.page, self._block_bytes
        words, base = page.words, page.tier_base(idx)

        def word(index: TierWord) -> Callable[[], int]:
            at = base + index
            return lambda: words[at]

        def scaled(index: TierWord, factor: float) -> Callable[[], Number]:
            at = base + index
            return lambda: words[at] * factor

        add(_TIER + "read_bytes", scaled(TierWord.BLOCKS_READ, block_bytes), label)
        add(_TIER + "write_bytes", scaled(TierWord.BLOCKS_WRITTEN, block_bytes), label)
        add(_TIER + "read_time", scaled(TierWord.LOAD_NS, 1e-9), label)
        add(_TIER + "write_time", scaled(TierWord.STORE_NS, 1e-9), label)
        add(_OURS + "tier_worker_restarts", word(TierWord.RESTARTS), label)
        name = _OURS + "tier_blocks_failed"
        add(name, word(TierWord.BLOCKS_BAD), label, "bad_block")
        add(name, word(TierWord.BLOCKS_MISSED), label, "not_there")
        add(name, word(TierWord.BLOCKS_FAILED), label, "storage_refused")
        backing_off = base + TierWord.BACKING_OFF
        for fault in Fault:
            reason = fault.name.lower()
            add(_OURS + "tier_blocks_refused", word(fault.word), label, reason)
            add(
                _OURS + "tier_backing_off",
                lambda fault=fault: int(words[backing_off] == fault),  # type: ignore[misc]
                label,
                reason,
            )
        name = _OURS + "tier_blocks"
        add(name, word(TierWord.BLOCKS_READ), label, "read")
        add(name, word(TierWord.BLOCKS_WRITTEN), label, "written")
        add(name, word(TierWord.BLOCKS_SKIPPED), label, "had_already")
        add(name, word(TierWord.BLOCKS_EVICTED), label, "evicted")
        add(_OURS + "tier_resident_blocks", word(TierWord.RESIDENT_BLOCKS), label)
        add(_OURS + "tier_used_bytes", word(TierWord.USED_BYTES), label)
        add(_OURS + "tier_capacity_bytes", word(TierWord.CAPACITY_BYTES), label)

    @property
    def _block_bytes(self) -> int:
        return self._engine.config.block_bytes
