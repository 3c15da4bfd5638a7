"""What a tier author writes: plain, blocking code behind seven calls.

Covers: the ``Tier`` interface and the words that it uses.
Does not cover: queues, threads, slicing, deadlines, breaker, checksums, counters,
restart: ``executor`` and ``serve`` own those.
Who calls it: the worker process of the tier; a tier's class is imported nowhere
else, so that its libraries never enter the inference scheduler.

A block is a *stride*: payload, padding and header page, one contiguous value. The
framework writes the header before ``put`` and verifies it after ``get``, so a tier
moves ``region.stride_view(slot)`` and never looks inside.
"""

from __future__ import annotations

import enum
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from shmoffload.core.types import OffloadPolicy
from shmoffload.errors import TierError
from shmoffload.worker.faults import fault_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shmoffload.wire.config import TierConfig
    from shmoffload.wire.session import Fault


class BlockStatus(enum.IntEnum):
    """What became of one block of a call."""

    OK = 0
    MISS = 1
    """Not in the tier."""
    BAD = 2
    """There, but not what was stored (length, checksum): the framework deletes it
    and reports a miss."""
    FAIL = 3
    """The system refused; the block may well be fine."""


class Region(Protocol):
    """The primary region as a tier sees it (``wire.region.PrimaryRegion``).

    All calls check bounds and raise IndexError; negative numbers too.
    """

    @property
    def num_slots(self) -> int:
        """Slots of the region."""

    @property
    def stride(self) -> int:
        """Bytes of a slot, a multiple of 4 KiB."""

    @property
    def block_bytes(self) -> int:
        """Payload bytes of a slot."""

    @property
    def namespace(self) -> bytes:
        """Digest of everything that changes bytes; 16 bytes."""

    def stride_view(self, slot: int) -> memoryview:
        """Whole slot: payload, padding, header page."""

    def slot_view(self, slot: int) -> memoryview:
        """Payload of a slot."""

    def header_view(self, slot: int) -> memoryview:
        """Header page of a slot."""

    def address(self, slot: int) -> int:
        """Address of a slot in this process, for pointer engines."""


@dataclass(frozen=True, slots=True)
class Caps:
    """What the framework may assume of a tier.

    Attributes:
        exclusive: nobody else adds or removes keys, so ``resident`` is the whole
            truth and lookups need no probe.
        durable: blocks survive the worker.
        max_threads: concurrent ``get`` calls that the tier bears.
        policy: what the tier wants of requests that say nothing of it, unless
            the configuration does.
    """

    exclusive: bool = True
    durable: bool = False
    max_threads: int = 8
    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Effective limits of an opened tier, said at start.

    Attributes:
        words: for people: ``"18887 blocks, 1.2 GiB"``.
        capacity_bytes: bound in bytes, headers included; 0 = unbounded.
    """

    words: str
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What a tier holds now, headers included."""

    num_blocks: int
    num_bytes: int


def check_deadline(deadline_s: float) -> None:
    """Give up on what nobody waits for.

    Raises:
        TierError: ``deadline_s`` (CLOCK_MONOTONIC) has passed.
    """
    if time.monotonic() > deadline_s:
        raise TierError("the job's deadline has passed")


class Tier(ABC):
    """One store of blocks behind the primary; lives in its own worker process.

    ``open`` and ``close`` run alone, ``open`` on a thread of its own. ``put`` is
    called by one thread at a time; ``get``, ``exists``, ``delete`` and ``usage`` by
    several threads, beside a ``put``. All may block; ``deadline_s`` (CLOCK_MONOTONIC)
    is when nobody waits any more: a tier that can give up then returns FAIL, one that
    cannot is killed. A whole failed call may raise OSError or ``TierError``.
    """

    caps: ClassVar[Caps] = Caps()

    direct_io = False
    """True while O_DIRECT is in use; shown in the session page."""

    early_limits: TierLimits | None = None
    """Set within ``open`` once nothing can refuse any more and only the search for
    old blocks is left. If that takes long the tier is up before it ends; no other
    call but ``usage`` is made until it has."""

    def __init__(self) -> None:
        self._said = threading.local()

    @abstractmethod
    def open(self, config: TierConfig, region: Region, namespace: bytes) -> TierLimits:
        """Open or create the storage of ``namespace``; prove that it works.

        Args:
            config: the ``[[tier]]`` section.
            region: outlives the tier; its slots hold live data: do not write one
                here.
            namespace: digest, 16 bytes; blocks of another one are invisible.

        Raises:
            TierConfigError: useless until the configuration changes.
            TierError: did not work now.
            OSError: did not work now.
        """

    @abstractmethod
    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """Say which keys are here; counts as a use of those that are.

        Keys of one call come in the order of a request: evict the last one first.
        """

    @abstractmethod
    def put(
        self, keys: Sequence[bytes], slots: Sequence[int], deadline_s: float
    ) -> list[BlockStatus]:
        """Store the strides of ``slots``; OK only if whole and findable.

        Makes room by itself; what it evicted is told by ``take_evicted``. A key
        that is here already is OK, kept or rewritten whole.
        """

    @abstractmethod
    def get(
        self, keys: Sequence[bytes], slots: Sequence[int], deadline_s: float
    ) -> list[BlockStatus]:
        """Read blocks into ``slots``; whatever is not OK leaves its slot undefined."""

    @abstractmethod
    def delete(self, keys: Sequence[bytes], deadline_s: float) -> None:
        """Forget keys; unknown ones are no error."""

    @abstractmethod
    def close(self) -> None:
        """Release the storage. Twice is fine, also after a failed ``open``."""

    @abstractmethod
    def usage(self) -> TierUsage:
        """Return what the tier holds now; cheap, it is asked after each job."""

    def request_incomplete(self, req_id: str, keys: Sequence[bytes]) -> None:
        """Hear which keys a whole request will not bring (``policy`` request_level).

        Called on the main thread, between jobs that may be running: must return at
        once. Whoever waits for these keys has to stop waiting.
        """

    def resident(self) -> Iterable[bytes]:
        """Yield all keys right after ``open``, if ``caps.exclusive``."""
        return ()

    def take_evicted(self) -> list[bytes]:
        """Return the keys that ``put`` evicted since the last call."""
        return []

    def fail(self, error: BaseException, num_blocks: int = 1) -> BlockStatus:
        """Return FAIL; keep the error's words for the answer, its kind for counters.

        Args:
            error: what the system said.
            num_blocks: how many blocks of the call get this status.
        """
        self._said.text = str(error)
        faults = getattr(self._said, "faults", None)
        if faults is None:
            faults = self._said.faults = Counter()
        faults[fault_of(error)] += num_blocks
        return BlockStatus.FAIL

    def take_words(self) -> str:
        """Return the words that ``fail`` kept on this thread, once."""
        text: str = getattr(self._said, "text", "")
        self._said.text = ""
        return text

    def take_faults(self) -> Counter[Fault]:
        """Return the blocks that ``fail`` counted on this thread, once."""
        faults: Counter[Fault] | None = getattr(self._said, "faults", None)
        self._said.faults = None
        return faults or Counter()
