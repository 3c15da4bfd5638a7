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
from operator import itemgetter
from typing import TYPE_CHECKING, ClassVar, Final

from shmoffload.errors import TierConfigError, TierError
from shmoffload.wire.layout import key_of_header
from shmoffload.wire.sizes import format_size
from shmoffload.worker.faults import StorageGoneError
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
    no_block,
    no_room,
    shown,
    take_place,
)
from shmoffload.worker.tiers.slab_file import SLAB_NAME, SlabFile, runs_of
from shmoffload.worker.tiers.slab_index import IndexDamagedError, SlabIndex, discard
from shmoffload.worker.tiers.slab_table import SlabTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shmoffload.wire.config import TierConfig
    from shmoffload.worker.tier import Region

_SCAN_S: Final = 600.0
_MANY_SLOTS: Final = 50_000  # 0.1 s; fewer are always waited for
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
        num_old = self._file.num_slots
        why = self._find_index()
        if why and num_old == 0:
            why = ""
            assert self._index is not None
            self._index.create(())  # before the slab takes all the space
        self._resize(num_slots, refusal)
        capacity = num_slots * self._stride
        limits = TierLimits(f"{num_slots} blocks, {format_size(capacity)}", capacity)
        self.direct_io = self._file.direct
        self.early_limits = limits if num_old >= _MANY_SLOTS else None
        self._table = SlabTable(num_slots, self._rows(num_old, num_slots, why))
        return limits

    def _resize(self, num_slots: int, refusal: TierConfigError) -> None:
        """Give the slab its size.

        Raises:
            TierConfigError: it has no room, or is larger than a file may be.
            OSError: the system refused; may work later.
        """
        assert self._place is not None
        assert self._file is not None
        try:
            with self._place.refusals(SLAB_NAME):
                self._file.resize(num_slots)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise refusal from error
            if error.errno == errno.EFBIG:
                raise TierConfigError(
                    f"a slab of {num_slots} blocks is larger than a file may be here: "
                    f"raise the limit of this user (ulimit -f), or lower max_bytes"
                ) from error
            raise

    def _wanted_slots(self, config: TierConfig) -> int:
        assert self._place is not None
        assert self._file is not None
        num_slots = self._file.num_slots
        if config.max_bytes is not None or num_slots == 0:
            num_slots = bound_of(config, self._place) // self._stride
        if num_slots == 0:
            raise no_block(self._stride, self._place)
        return num_slots

    def _find_index(self) -> str:
        """Open the index; return why it is of no use, "" if it is.

        Empty beside a slab is as useless as damaged: somebody removed it.
        """
        try:
            self._open_index()
        except IndexDamagedError as error:
            self._discard_index()
            return str(error)
        assert self._index is not None
        return "it was empty" if self._index.is_new else ""

    def _rows(self, num_old: int, num_slots: int, why: str) -> list[tuple[bytes, int]]:
        """Return the old blocks' (key, slot), from the index or else the slab.

        Args:
            num_old: slots that the slab had before this start.
            num_slots: slots that it has now.
            why: the index is of no use.
        """
        if not why:
            try:
                return self._known_rows(num_old, num_slots)
            except IndexDamagedError as error:
                why = str(error)
                self._discard_index()
        rows = self._scanned_rows(min(num_old, num_slots))
        assert self._index is not None
        assert self._place is not None
        self._index.create(rows)
        logger.warning(
            "tier %s: its index was unusable (%s); %d blocks found in the slab",
            self._place.name,
            why,
            len(rows),
        )
        return rows

    def _open_index(self) -> None:
        assert self._place is not None
        self._index = SlabIndex(
            self._place, stride=self._stride, namespace=self._namespace
        )

    def _discard_index(self) -> None:
        """Put an empty index in the place of a damaged one.

        Raises:
            TierError: that is damaged as well, so it is the disk.
        """
        assert self._place is not None
        if self._index is not None:
            self._index.close()
            self._index = None
        discard(self._place)
        try:
            self._open_index()
        except IndexDamagedError as error:
            raise TierError(
                f"no index can be made in {shown(self._place.path)} ({error})"
            ) from error

    def _known_rows(self, num_old: int, num_slots: int) -> list[tuple[bytes, int]]:
        """Return the rows whose bytes are there and stay there."""
        assert self._index is not None
        rows = self._index.load_all(max(num_slots, num_old))
        end = min(num_slots, num_old)
        kept = [row for row in rows if row[1] < end]
        if len(kept) < len(rows):
            self._index.drop_beyond(end)
        return kept

    def _scanned_rows(self, num_slots: int) -> list[tuple[bytes, int]]:
        """Return the blocks that their headers name, in the first ``num_slots``."""
        assert self._file is not None
        found = {
            key: slot
            for slot, header in self._file.headers(num_slots, timeout_s=_SCAN_S)
            if (key := key_of_header(header, self._namespace)) is not None
        }
        return list(found.items())

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """See ``Tier.exists``; never waits for the disk."""
        with self._lock:
            return self._table.lru.touch_all(keys)

    def put(
        self, keys: Sequence[bytes], slots: Sequence[int], deadline_s: float
    ) -> list[BlockStatus]:
        """See ``Tier.put``; written in as few runs as the free space allows.

        Raises:
            StorageGoneError: directory or slab were removed.
            TierError: the index refused.
        """
        assert self._file is not None
        self._require_here()
        statuses = [BlockStatus.OK] * len(keys)
        with self._lock:
            there = self._table.lru.touch_all(keys)
            todo = [i for i, is_in in enumerate(there) if not is_in]
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

    def _require_here(self) -> None:
        assert self._place is not None
        self._place.require_here()
        if self._file is not None and self._file.is_gone:
            raise StorageGoneError(
                f"{SLAB_NAME} in {shown(self._place.path)} was removed while tier "
                f"{self._place.name} used it: its worker starts again with an empty one"
            )

    def _publish(
        self,
        keys: Sequence[bytes],
        written: list[tuple[int, int]],
        reserved: list[int],
        statuses: list[BlockStatus],
    ) -> None:
        """Record written blocks in the index, then show them; give up the rest.

        Last block first, see ``lru``.
        """
        assert self._index is not None
        written = sorted(written, key=itemgetter(1), reverse=True)
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
            entries = self._table.lru.pin_all(keys)
        pairs = sorted((e.value, i) for i, e in enumerate(entries) if e is not None)
        try:
            for first, positions in runs_of(pairs, stride=self._stride):
                views = [self._region.stride_view(slots[i]) for i in positions]
                got = self._read(views, first, deadline_s)
                for i, status in zip(positions, got, strict=True):
                    statuses[i] = status
        finally:
            with self._lock:
                for entry in entries:
                    if entry is not None:
                        self._table.unpin(entry)
        return statuses

    def _read(
        self, views: list[memoryview], first: int, deadline_s: float
    ) -> list[BlockStatus]:
        """Read a run; if the system refuses it, block by block: one may be bad."""
        assert self._file is not None
        try:
            check_deadline(deadline_s)
            num_whole = self._file.read(views, first)
        except OSError as error:
            if len(views) == 1:
                return [self.fail(error)]
            return [
                status
                for i, view in enumerate(views)
                for status in self._read([view], first + i, deadline_s)
            ]
        except TierError as error:
            return [self.fail(error, len(views))] * len(views)
        self.direct_io = self._file.direct
        return [
            BlockStatus.OK if i < num_whole else BlockStatus.BAD
            for i in range(len(views))
        ]

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
                if not self._index.is_new:
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
