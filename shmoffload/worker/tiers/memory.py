"""``memory``: a bounded dictionary in the worker; for tests and demonstrations.

Covers: put, get, evict in the worker's own memory; gone with the worker.
Does not cover: anything that lasts.
Who calls it: the worker framework, see ``worker.tier``.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, ClassVar, Final

from shmoffload.errors import TierConfigError
from shmoffload.wire.sizes import format_size, parse_size
from shmoffload.worker.tier import BlockStatus, Caps, Tier, TierLimits, TierUsage
from shmoffload.worker.tiers.lru import PinnedLru

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmoffload.wire.config import TierConfig
    from shmoffload.worker.tier import Region

DEFAULT_MAX_BYTES: Final = 256 << 20


class MemoryTier(Tier):
    """Blocks as byte strings; bounded, LRU."""

    caps: ClassVar[Caps] = Caps(exclusive=True, durable=False)

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._lru: PinnedLru[bytes] = PinnedLru()
        self._evicted: list[bytes] = []

    def open(self, config: TierConfig, region: Region, namespace: bytes) -> TierLimits:
        """See ``Tier.open``; 256 MiB without ``max_bytes``."""
        self._region = region
        bound = config.max_bytes if config.max_bytes is not None else DEFAULT_MAX_BYTES
        self._max_blocks = parse_size(bound, key="max_bytes") // region.stride
        if self._max_blocks < 1:
            raise TierConfigError(
                f"no block of {format_size(region.stride)} fits: raise max_bytes"
            )
        capacity = self._max_blocks * region.stride
        words = f"{self._max_blocks} blocks, {format_size(capacity)}"
        return TierLimits(words, capacity)

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """See ``Tier.exists``."""
        with self._lock:
            return self._lru.touch_all(keys)

    def put(
        self, keys: Sequence[bytes], slots: Sequence[int], deadline_s: float
    ) -> list[BlockStatus]:
        """See ``Tier.put``; last block first, see ``lru``."""
        for key, slot in zip(reversed(keys), reversed(slots), strict=True):
            with self._lock:
                if self._lru.touch(key):
                    continue
                while len(self._lru) >= self._max_blocks:
                    victim = self._lru.evict()
                    assert victim is not None, "nothing pins in memory"
                    self._evicted.append(victim[0])
            value = bytes(self._region.stride_view(slot))
            with self._lock:
                self._lru.insert(key, value)
        return [BlockStatus.OK] * len(keys)

    def get(
        self, keys: Sequence[bytes], slots: Sequence[int], deadline_s: float
    ) -> list[BlockStatus]:
        """See ``Tier.get``."""
        statuses = []
        with self._lock:
            entries = self._lru.pin_all(keys)
            for entry in entries:
                if entry is not None:
                    self._lru.unpin(entry)  # a byte string outlives its entry
        for entry, slot in zip(entries, slots, strict=True):
            if entry is None:
                statuses.append(BlockStatus.MISS)
                continue
            self._region.stride_view(slot)[:] = entry.value
            statuses.append(BlockStatus.OK)
        return statuses

    def delete(self, keys: Sequence[bytes], deadline_s: float) -> None:
        """See ``Tier.delete``."""
        with self._lock:
            for key in keys:
                self._lru.remove(key)

    def usage(self) -> TierUsage:
        """See ``Tier.usage``."""
        num_blocks = len(self._lru)
        return TierUsage(num_blocks, num_blocks * self._region.stride)

    def take_evicted(self) -> list[bytes]:
        """See ``Tier.take_evicted``."""
        with self._lock:
            evicted, self._evicted = self._evicted, []
        return evicted

    def close(self) -> None:
        """See ``Tier.close``."""
        self._lru = PinnedLru()
