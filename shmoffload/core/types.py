"""The words that every layer shares: keys, answers, jobs, replies.

Covers: plain immutable data (see the glossary in docs/architecture.md).
Does not cover: behaviour; deciding lives in ``manager`` and ``planner``, the
byte layout of messages in ``wire.messages``.
Who calls it: every layer; ``wire`` may import this module and nothing else of
``core``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NewType, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    SlotArray: TypeAlias = npt.NDArray[np.int32]

OffloadKey = NewType("OffloadKey", bytes)
"""Name of a block: content hash followed by the KV-group index, 4 bytes,
unsigned, big-endian (vLLM ``kv_offload/base.py``). At most 40 bytes. Equality is
byte equality."""

GROUP_BYTES: Final = 4
MAX_KEY_BYTES: Final = 40


def make_offload_key(content_hash: bytes, group_idx: int = 0) -> OffloadKey:
    """Join a content hash and a KV-group index into a key.

    Raises:
        ValueError: the result would exceed ``MAX_KEY_BYTES``.
    """
    key = content_hash + group_idx.to_bytes(GROUP_BYTES, "big")
    if not GROUP_BYTES < len(key) <= MAX_KEY_BYTES:
        raise ValueError(
            f"an offload key has {GROUP_BYTES + 1} to {MAX_KEY_BYTES} bytes, "
            f"this one has {len(key)}: shorten the content hash"
        )
    return OffloadKey(key)


class NotReadableError(KeyError):
    """A load of a block that was not answered HIT in this step: the caller's bug."""


class LookupResult(enum.Enum):
    """Answer to "is this block here?" (vLLM since 0.25, #46363)."""

    MISS = 0
    """Not here, or not obtainable in time: compute it."""
    HIT = 1
    """Readable in the primary now."""
    HIT_PENDING = 2
    """Has a slot; its bytes are being written."""
    RETRY = 3
    """Unknown yet, or no room just now: ask again next step."""


class OffloadPolicy(enum.Enum):
    """What a tier wants of a request (vLLM PR #43205)."""

    BLOCK_LEVEL = "block_level"
    """Skip blocks that the request got from the offload tier."""
    REQUEST_LEVEL = "request_level"
    """Every offered block of the request, hits included."""


@dataclass(frozen=True, slots=True)
class RequestOffloadingContext:
    """Answer of ``on_new_request``, of the manager and of each tier."""

    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL


@dataclass(frozen=True, slots=True)
class TierTraits:
    """What the configuration knows of a tier.

    Attributes:
        medium: ``CPU`` or ``STORAGE``; None = not known.
        locality: ``LOCAL`` or ``REMOTE``; None = not known.
        level: what it gets of each request; None = as its code says.
        withheld: blocks at the end of a request that it gets only when another
            request uses them: 0 = none, ``WITHHOLD_ALL`` = every block.
    """

    medium: str | None = None
    locality: str | None = None
    level: OffloadPolicy | None = None
    withheld: int = 0


WITHHOLD_ALL: Final = -1


def parse_admit(text: str) -> int:
    """Return ``TierTraits.withheld`` for ``all``, ``second`` or ``tail:N``.

    Raises:
        ValueError: none of these.
    """
    if text == "all":
        return 0
    if text == "second":
        return WITHHOLD_ALL
    word, _, number = text.partition(":")
    if word == "tail" and number.isascii() and number.isdigit() and len(number) < 8:
        return int(number)
    raise ValueError(f'"{text}" is no admission: give all, second or tail:N')


@dataclass(slots=True, eq=False)
class ReqContext:
    """One request as the manager and the tiers see it; one object for its life.

    Attributes:
        req_id: unique among live requests; contexts compare by it.
        kv_transfer_params: the request's own words, or None.
        key_positions: key -> token position where its block ends; filled by the
            planner before the manager sees the key (vLLM since 0.31). A later
            position is evicted earlier.
        tier_levels: tier name -> what it gets, where the request says so itself;
            filled by the manager before the tiers hear of the request.
    """

    req_id: str
    kv_transfer_params: Mapping[str, Any] | None = None
    key_positions: dict[OffloadKey, int] = field(default_factory=dict)
    tier_levels: Mapping[str, OffloadPolicy] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReqContext) and other.req_id == self.req_id

    __hash__ = None  # type: ignore[assignment]  # mutable: index by req_id


@dataclass(frozen=True, slots=True)
class PrepareStoreOutput:
    """What ``prepare_store`` granted.

    Attributes:
        keys_to_store: the absent keys of the offer, in offer order.
        slots: int32, one slot per key to store, co-indexed.
        evicted_keys: blocks that made room.
        left_out: absent keys, the end of the offer, that found no room; only where
            the manager accepts a prefix. Offer again from the first of them.
    """

    keys_to_store: Sequence[OffloadKey]
    slots: SlotArray
    evicted_keys: Sequence[OffloadKey]
    left_out: Sequence[OffloadKey] = ()


@dataclass(frozen=True, slots=True)
class ScheduleEndContext:
    """What happened in the step that ends (vLLM since 0.25, #46450)."""

    new_req_ids: Sequence[str] = ()
    preempted_req_ids: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class JobMetadata:
    """One cascade or promotion, as submitted to a tier (vLLM: TransferJob).

    Attributes:
        job_id: unique in an engine epoch, increasing.
        keys: distinct keys.
        slots: int32 primary slots, co-indexed with ``keys``; owned by the job.
        is_promotion: True for tier -> primary.
        req_context: the request on whose behalf the job runs.
        submitted_s: the manager's time when the job was submitted.
        deadline_s: the manager's time at which nobody waits for it any more.
    """

    job_id: int
    keys: Sequence[OffloadKey]
    slots: SlotArray
    is_promotion: bool
    req_context: ReqContext
    submitted_s: float = 0.0
    deadline_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JobResult:
    """A tier's answer to one job.

    Attributes:
        job_id: the job that is answered.
        success: every key of the job is where it should be.
        successful_keys: only with ``success=False``: the keys that did arrive.
            None means that all keys share the verdict.
    """

    job_id: int
    success: bool
    successful_keys: Sequence[OffloadKey] | None = None


# What an edge feeds into MailboxTier (the core's side of a worker). ----------


@dataclass(frozen=True, slots=True)
class TierUp:
    """A worker has opened its tier and told all that it holds.

    ``policy`` is what the tier's own code wants of requests.
    """

    worker_epoch: int
    capacity_bytes: int = 0
    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL


@dataclass(frozen=True, slots=True)
class TierDown:
    """A worker can no longer be reached; ``dead`` says that death is proven.

    With ``dead=False`` (end of file, hang) the tier answers MISS and slots under
    its open jobs stay quarantined. Only ``dead=True`` frees them.
    """

    worker_epoch: int
    dead: bool


@dataclass(frozen=True, slots=True)
class Residency:
    """Keys that a tier has come to hold or no longer holds."""

    worker_epoch: int
    added: Sequence[OffloadKey] = ()
    removed: Sequence[OffloadKey] = ()


@dataclass(frozen=True, slots=True)
class JobReply:
    """A worker's answer to one job, with the epochs that make it count.

    Attributes:
        engine_epoch: epoch of the engine that sent the job.
        worker_epoch: epoch of the worker that answered.
        job_id: the job that is answered.
        failed_idx: positions in the job's keys that did not succeed.
        removed: keys that the tier evicted on the way.
        error: the operating system's words for the first failure, or "".
    """

    engine_epoch: int
    worker_epoch: int
    job_id: int
    failed_idx: Sequence[int] = ()
    removed: Sequence[OffloadKey] = ()
    error: str = ""


TierInput: TypeAlias = TierUp | TierDown | Residency | JobReply

# What MailboxTier puts out for an edge to send, in order. ---------------------


@dataclass(frozen=True, slots=True)
class AnnounceRequest:
    """First word about a request to a tier."""

    req_id: str
    policy: OffloadPolicy


@dataclass(frozen=True, slots=True)
class FinishRequest:
    """Last word about a request to a tier; nothing of it follows."""

    req_id: str


@dataclass(frozen=True, slots=True)
class RequestIncomplete:
    """Offered keys that a REQUEST_LEVEL tier will not get; before the last word."""

    req_id: str
    keys: Sequence[OffloadKey]


TierOutput: TypeAlias = (
    AnnounceRequest | FinishRequest | RequestIncomplete | JobMetadata
)


class SlotState(enum.IntEnum):
    """State of a slot, as in the slot table of the primary region."""

    FREE = 0
    PENDING = 1
    """Handed out; its bytes are not there yet."""
    READY = 2
    """Holds the bytes of its key."""
    QUARANTINED = 3
    """Under a job that lost its meaning: neither free nor resident."""
