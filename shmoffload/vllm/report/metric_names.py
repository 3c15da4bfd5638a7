"""Every metric name of ours: kind, labels, what it says.

Covers: the table of docs/vllm.md, in code.
Does not cover: values (``metrics``).
Who calls it: ``metrics``; tests. No vllm import.

The first part has vLLM's own names (``kv_offload/cpu``, ``kv_offload/tiering``, 0.32
and 0.33) with its labels: ``tier`` is "N:type", the primary "0:primary". Left out
are those without meaning here: delays of lookups in tiers (ours are answered from
memory), latency averages of its back-pressure (ours counts bytes).
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

PRIMARY_LABEL: Final = "0:primary"
ALLOCATION_SIZE: Final = "vllm:kv_offload_cpu_allocation_size"
ALLOCATION_BUCKETS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class Kind(enum.Enum):
    """What Prometheus calls it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Definition(NamedTuple):
    """One name."""

    kind: Kind
    labels: tuple[str, ...]
    text: str


def _counter(text: str, *labels: str) -> Definition:
    return Definition(Kind.COUNTER, labels, text)


def _gauge(text: str, *labels: str) -> Definition:
    return Definition(Kind.GAUGE, labels, text)


_VLLM: Final = {
    "cpu_cache_usage_perc": _gauge(
        "Share of the primary's slots that cannot be evicted now: written, read by a "
        "copy, or quarantined."
    ),
    "cpu_cache_write_usage_perc": _gauge(
        "Share of the primary's slots that are being written, by the GPU or a tier."
    ),
    "cpu_cache_read_usage_perc": _gauge(
        "Share of the primary's slots that are being read, by the GPU or a tier."
    ),
    "cpu_allocation_size": Definition(
        Kind.HISTOGRAM, (), "Slots taken by one prepare_store, in blocks."
    ),
    "stores_skipped": _counter(
        "Blocks not stored because they were not offered store_threshold times."
    ),
    "tiering_chunk_queries": _counter(
        "Blocks that requests asked for and that no earlier tier had; a request that "
        "waits counts once.",
        "tier",
    ),
    "tiering_chunk_hits": _counter(
        "Blocks that requests found here: loads from the primary, promotions from a "
        "tier. Over tiering_chunk_queries it is the hit rate.",
        "tier",
    ),
    "tiering_read_bytes": _counter("Bytes read from the tier, verified.", "tier"),
    "tiering_read_time": _counter(
        "Seconds in which the tier's worker was reading, added over its threads.",
        "tier",
    ),
    "tiering_write_bytes": _counter(
        "Bytes written to the tier; blocks that it had already are not.", "tier"
    ),
    "tiering_write_time": _counter(
        "Seconds in which the tier's worker was writing.", "tier"
    ),
    "tiering_promotion_job_failures": _counter(
        "Promotions that failed, in part or as a whole.", "tier"
    ),
    "tiering_cascade_job_failures": _counter(
        "Cascades that failed, in part or as a whole.", "tier"
    ),
    "tiering_promotion_allocation_failures": _counter(
        "Lookups answered as a miss because a promotion found no room."
    ),
    "tiering_primary_write_usage_perc": _gauge(
        "Share of the primary's slots that promotions from the tier write.", "tier"
    ),
    "tiering_primary_read_usage_perc": _gauge(
        "Share of the primary's slots that cascades to the tier read.", "tier"
    ),
    "tiering_active_promotion_jobs": _gauge("Promotions not yet answered.", "tier"),
    "tiering_active_cascade_jobs": _gauge("Cascades not yet answered.", "tier"),
    "tiering_backpressure_stores_dropped": _counter(
        "Cascades dropped or shortened because the tier was down or had "
        "limits.credit_bytes in flight.",
        "tier",
    ),
    "tiering_backpressure_blocks_dropped": _counter(
        "Blocks of those cascades.", "tier"
    ),
}

_OURS: Final = {
    "engine_broken": _gauge("1: the core has failed and everything is a miss."),
    "adapter_errors": _counter(
        "Exceptions kept from vLLM, by the method that was called.", "method"
    ),
    "slots": _gauge(
        "Slots of the primary by state; the states add up to all slots.", "state"
    ),
    "lookups": _counter(
        "Lookups by answer, those repeated by waiting requests included.", "result"
    ),
    "loaded_blocks": _counter(
        "Blocks given to the GPU, by where they came from.", "tier"
    ),
    "stored_blocks": _counter("Blocks for which the GPU got a slot to store to."),
    "evicted_blocks": _counter("Blocks evicted from the primary."),
    "store_offers": _counter("Calls of prepare_store."),
    "store_offers_refused": _counter(
        "Those answered with no room; over store_offers it is the refusal rate."
    ),
    "requests": _counter("Requests announced, up to the last step."),
    "resets": _counter("Resets of the primary."),
    "reset_fence_held": _gauge(
        "1: GPU copies of before a reset are not known to have ended."
    ),
    "late_calls": _counter(
        "Calls about something unknown, finished, answered or reset."
    ),
    "overdue_jobs": _counter(
        "Jobs that missed their deadline; their worker is killed."
    ),
    "promotions_dropped": _counter(
        "Promotions queued and never sent: their request was over, or a reset."
    ),
    "blocks_not_admitted": _counter(
        "Blocks of granted offers that the eviction policy did not want."
    ),
    "foreign_answers": _counter(
        "Answers of tiers about blocks that were not theirs to answer."
    ),
    "tier_up": _gauge("1: the tier serves; 0: it is a miss.", "tier"),
    "tier_worker_restarts": _counter("Restarts of the tier's worker.", "tier"),
    "tier_jobs": _counter(
        "Jobs made for the tier; what tier_jobs_failed is a part of.",
        "tier",
        "direction",
    ),
    "tier_jobs_failed": _counter(
        "Jobs that failed: not_sent (tier down or its queue full), worker_died "
        "(deadline kills included), blocks_failed (see tier_blocks_failed).",
        "tier",
        "reason",
    ),
    "tier_blocks_failed": _counter(
        "Blocks that failed: bad_block (header, key or checksum), not_there, "
        "storage_refused (the system refused a read or write).",
        "tier",
        "reason",
    ),
    "tier_blocks_declined": _counter(
        "Blocks that the GPU computes sooner than the tier would have brought them "
        "(limits.prefill_tokens_per_s).",
        "tier",
    ),
    "tier_blocks_refused": _counter(
        "The storage_refused of tier_blocks_failed, by what the system said: no_space "
        "(min_free included), io, no_files, no_access, read_only, other.",
        "tier",
        "reason",
    ),
    "tier_backing_off": _gauge(
        "1: stores failed again and again for this reason, and the tier takes one now "
        "and then to see whether they work; the reasons of tier_blocks_refused.",
        "tier",
        "reason",
    ),
    "tier_blocks": _counter(
        "Blocks that the worker has read, written, had_already or evicted.",
        "tier",
        "what",
    ),
    "tier_blocks_withheld": _counter(
        "Blocks not sent to the tier because its admission or the request says so.",
        "tier",
    ),
    "tier_blocks_incomplete": _counter(
        "Blocks that a tier which wants whole requests was told it will not get.",
        "tier",
    ),
    "tier_late_replies": _counter("Answers to nothing that is open.", "tier"),
    "tier_in_flight_bytes": _gauge(
        "Bytes in cascades that are not answered; limits.credit_bytes at most.",
        "tier",
    ),
    "tier_resident_blocks": _gauge("Blocks in the tier.", "tier"),
    "tier_used_bytes": _gauge("Bytes in use in the tier.", "tier"),
    "tier_capacity_bytes": _gauge("Bound of the tier; 0: not known.", "tier"),
}

DEFINITIONS: Final[dict[str, Definition]] = {
    **{f"vllm:kv_offload_{name}": text for name, text in _VLLM.items()},
    **{f"vllm:shmoffload_{name}": text for name, text in _OURS.items()},
}
