"""``slab``: one preallocated file, the embedded default.

Covers: open, put, get, evict over table, file and index.
Does not cover: those three (``slab_table``, ``slab_file``, ``slab_index``).
Who calls it: the worker framework, see ``worker.tier``.

    PATH/<namespace>/slab.bin       strides, back to back
                    /index.sqlite   key -> slot
                    /lock           flock of the one worker that may write

Order of a put: evict; rows of the victims leave the index; bytes are written; rows
of the new blocks enter the index; the table shows them. A SIGKILL between any two
leaves blocks that are found and right, or are not found. Order of use survives an
orderly end; after a kill it is the order of storing.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
from typing import TYPE_CHECKING, ClassVar, Final

from shmoffload.errors import TierConfigError, TierError
from shmoffload.wire.layout import key_of_header
from shmoffload.worker.tier import (
    BlockStatus,
    Caps,
    Tier,
    TierLimits,
    TierUsage,
    check_deadline,
)
from shmoffload.worker.tiers.place import (
    Place,
    bound_of,
    has_room,
    no_room,
    size_words,
    take_place,
)
from shmoffload.worker.tiers.slab_file import SlabFile, runs_of
from shmoffload.worker.tiers.slab_index import IndexDamagedError, SlabIndex, discard
from shmoffload.worker.tiers.slab_table import SlabTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shmoffload.wire.config import TierConfig
    from shmoffload.worker.tier import Region

_SCAN_S: Final = 5.0
logger = logging.getLogger(__name__)


class SlabTier(Tier):
    """Blocks in one preallocated file; bounded, LRU, found again after a restart."""

    caps: ClassVar[Caps] = Caps(exclusive=True, durable=True)

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._evicted: list[bytes] = []
        self._place: Place | None = None
        self._file: SlabFile | None = None
        self._index: SlabIndex | None = None
        self._table = SlabTable(0, ())

    def open(self, config: TierConfig, region: Region, namespace: bytes) -> TierLimits:
        """See ``Tier.open``. An existing slab keeps its size without max_bytes."""
        self._region = region
        self._stride = region.stride
        self._namespace = namespace
        self._place = take_place(config, namespace)
        self._file = SlabFile(
            self._place, stride=self._stride, sample=region.stride_view(0)
        )
        num_slots = self._wanted_slots(config)
        missing = self._file.missing_bytes(num_slots)
        refusal = no_room(config, self._place, missing, f"a slab of {num_slots} blocks")
        if not has_room(config, self._place, missing):
            raise refusal
        self._index, rows = self._load_index(config, num_slots)
        try:
            self._file.resize(num_slots)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise refusal from error
            raise
        self._table = SlabTable(num_slots, rows)
        self.direct_io = self._file.direct
        capacity = num_slots * self._stride
        return TierLimits(f"{num_slots} blocks, {size_words(capacity)}", capacity)

    def _wanted_slots(self, config: TierConfig) -> int:
        assert self._place is not None
        assert self._file is not None
        num_slots = self._file.num_slots
        if config.max_bytes is not None or num_slots == 0:
            num_slots = bound_of(config, self._place) // self._stride
        if num_slots == 0:
            free = size_words(self._place.free_bytes())
            raise TierConfigError(
                f"tier {config.name}: no block of {size_words(self._stride)} fits into "
                f"{self._place.path} ({free} free): set max_bytes, lower min_free, or "
                f"free some space"
            )
        return num_slots

    def _load_index(
        self, config: TierConfig, num_slots: int
    ) -> tuple[SlabIndex, list[tuple[bytes, int]]]:
        """Open the index; a damaged one is made again from the slab's headers."""
        assert self._place is not None
        assert self._file is not None
        old_slots = max(num_slots, self._file.num_slots)
        try:
            index = SlabIndex(
                self._place, stride=self._stride, namespace=self._namespace
            )
            rows = index.load_all(old_slots)
            if old_slots > num_slots:
                index.drop_beyond(num_slots)
                rows = [row for row in rows if row[1] < num_slots]
        except IndexDamagedError as error:
            discard(self._place)
            index = SlabIndex(
                self._place, stride=self._stride, namespace=self._namespace
            )
            found = {
                key: slot
                for slot, header in self._file.headers(timeout_s=_SCAN_S)
                if slot < num_slots
                and (key := key_of_header(header, self._namespace)) is not None
            }
            rows = list(found.items())
            index.commit(rows)
            logger.warning(
                "tier %s: its index was unusable (%s); %d blocks found in the slab",
                config.name,
                error,
                len(rows),
            )
        return index, rows

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """See ``Tier.exists``; never waits for the disk."""
        with self._lock:
            return [self._table.lru.touch(key) for key in keys]

    def put(
        self, keys: Sequence[bytes], slots: Sequence[int], deadline_s: float
    ) -> list[BlockStatus]:
        """See ``Tier.put``; written in as few runs as the free space allows."""
        assert self._file is not None
        statuses = [BlockStatus.OK] * len(keys)
        with self._lock:
            todo = [i for i, key in enumerate(keys) if not self._table.lru.touch(key)]
            self._evicted += self._table.make_room(len(todo))
        self._flush_stale()
        with self._lock:
            reserved = [
                slot
                for start, length in self._table.reserve(len(todo))
                for slot in range(start, start + length)
            ]
        for i in todo[len(reserved) :]:
            statuses[i] = self.fail(TierError("no room: all blocks are being read"))
        pairs = list(zip(reserved, todo, strict=False))
        written: list[tuple[int, int]] = []
        for first, positions in runs_of(pairs, stride=self._stride):
            views = [self._region.stride_view(slots[i]) for i in positions]
            try:
                self._file.write(views, first)
                written += [(first + n, i) for n, i in enumerate(positions)]
            except OSError as error:
                for i in positions:
                    statuses[i] = self.fail(error)
        self.direct_io = self._file.direct
        self._publish(keys, written, reserved, statuses)
        return statuses

    def _publish(
        self,
        keys: Sequence[bytes],
        written: list[tuple[int, int]],
        reserved: list[int],
        statuses: list[BlockStatus],
    ) -> None:
        """Record written blocks in the index, then show them; give up the rest."""
        assert self._index is not None
        try:
            self._index.commit([(keys[i], slot) for slot, i in written])
        except sqlite3.Error as error:
            for _, i in written:
                statuses[i] = self.fail(error)
            written = []
        with self._lock:
            for slot, i in written:
                self._table.insert(keys[i], slot)
            self._table.give_up(set(reserved) - {slot for slot, _ in written})

    def _flush_stale(self) -> None:
        """Take the rows of stale slots out of the index, then free the slots.

        Raises:
            TierError: the index refused; the slots stay stale for the next time.
        """
        assert self._index is not None
        with self._lock:
            stale = self._table.stale()
        if not stale:
            return
        try:
            self._index.commit(removed=stale)
        except sqlite3.Error as error:
            raise TierError(f"the slab's index refused: {error}") from error
        with self._lock:
            self._table.release_stale(stale)

    def get(
        self, keys: Sequence[bytes], slots: Sequence[int], deadline_s: float
    ) -> list[BlockStatus]:
        """See ``Tier.get``; neighbours in the slab are read in one call."""
        assert self._file is not None
        statuses = [BlockStatus.MISS] * len(keys)
        with self._lock:
            entries = [self._table.lru.pin(key) for key in keys]
        pairs = sorted((e.value, i) for i, e in enumerate(entries) if e is not None)
        try:
            for first, positions in runs_of(pairs, stride=self._stride):
                views = [self._region.stride_view(slots[i]) for i in positions]
                status = self._read(views, first, deadline_s)
                for i in positions:
                    statuses[i] = status
        finally:
            with self._lock:
                for entry in entries:
                    if entry is not None:
                        self._table.unpin(entry)
        return statuses

    def _read(
        self, views: list[memoryview], first: int, deadline_s: float
    ) -> BlockStatus:
        assert self._file is not None
        try:
            check_deadline(deadline_s)
            whole = self._file.read(views, first)
        except (OSError, TierError) as error:
            return self.fail(error)
        self.direct_io = self._file.direct
        return BlockStatus.OK if whole else BlockStatus.BAD

    def delete(self, keys: Sequence[bytes], deadline_s: float) -> None:
        """See ``Tier.delete``; rows go with the next put, or at ``close``."""
        with self._lock:
            for key in keys:
                self._table.remove(key)

    def usage(self) -> TierUsage:
        """See ``Tier.usage``."""
        num_blocks = len(self._table.lru)
        return TierUsage(num_blocks, num_blocks * self._stride)

    def resident(self) -> Iterable[bytes]:
        """See ``Tier.resident``."""
        return list(self._table.lru)

    def take_evicted(self) -> list[bytes]:
        """See ``Tier.take_evicted``."""
        with self._lock:
            evicted, self._evicted = self._evicted, []
        return evicted

    def close(self) -> None:
        """See ``Tier.close``; saves the order of use."""
        if self._index is not None:
            try:
                self._flush_stale()
                self._index.save_order(slot for _, slot in self._table.lru.items())
            except (sqlite3.Error, TierError) as error:
                logger.warning("the slab's order of use was not saved: %s", error)
            self._index.close()
            self._index = None
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._place is not None:
            self._place.close()
            self._place = None
