"""``fs``: a file per block, for shared mounts and for looking at.

Covers: files, temporary files, eviction, the floor of free space.
Does not cover: directory, lock, default bound (``place``).
Who calls it: the worker framework, see ``worker.tier``.

    PATH/<namespace>/<first 2 hex digits>/<key in hex>      one stride
                    /.<pid>-<start time>-<n>.tmp            being written
                    /lock

256 directories are ready-made (measured: 0.60 CPU s/GB against 1.11 when nearly
each of the first million files makes its own). A block appears by rename, whole or
not at all. Order of use at start is that of the files' times. Costs ~10 times the
CPU of ``slab`` and is no default.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from shmoffload.core.types import GROUP_BYTES, MAX_KEY_BYTES
from shmoffload.errors import TierError
from shmoffload.wire.sizes import format_size, parse_size
from shmoffload.worker.faults import NoSpaceError, StorageGoneError
from shmoffload.worker.tier import (
    BlockStatus,
    Caps,
    Tier,
    TierLimits,
    TierUsage,
    check_deadline,
)
from shmoffload.worker.tiers.lru import Entry, PinnedLru
from shmoffload.worker.tiers.place import (
    Place,
    bound_of,
    no_block,
    shown,
    take_place,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shmoffload.wire.config import TierConfig
    from shmoffload.worker.tier import Region

_TEMP: Final = re.compile(r"\.(\d+)-(\d+)-\d+\.tmp")
_BLOCK: Final = re.compile(rf"(?:[0-9a-f]{{2}}){{{GROUP_BYTES + 1},{MAX_KEY_BYTES}}}")


class FsTier(Tier):
    """Blocks as files; bounded by bytes and by free space, LRU, durable."""

    caps: ClassVar[Caps] = Caps(exclusive=True, durable=True)

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._lru: PinnedLru[None] = PinnedLru()
        self._evicted: list[bytes] = []
        self._place: Place | None = None
        self._num_temp = 0
        self._temp_prefix = f".{os.getpid()}-{_start_time(os.getpid())}"

    def open(self, config: TierConfig, region: Region, namespace: bytes) -> TierLimits:
        """See ``Tier.open``; removes temporary files of dead writers only."""
        self._region = region
        self._place = take_place(config, namespace)
        self._remove_dead_temps()
        found = sorted(self._scan())
        for _, key in found:
            self._lru.insert(key, None)
        bound = bound_of(config, self._place)
        if config.max_bytes is None:
            bound = max(bound, len(found) * region.stride)
        self._min_free = parse_size(config.min_free, key="min_free")
        self._max_blocks = bound // region.stride
        if self._max_blocks < 1:
            raise no_block(region.stride, self._place)
        self._evict(max(0, len(self._lru) - self._max_blocks))
        self._evicted.clear()  # nobody has been told of them yet
        capacity = self._max_blocks * region.stride
        words = f"{self._max_blocks} files, {format_size(capacity)}"
        return TierLimits(words, capacity)

    def _remove_dead_temps(self) -> None:
        """Remove temporary files whose writer is gone; by owner, never by age."""
        assert self._place is not None
        for name in os.listdir(self._place.dir_fd):
            match = _TEMP.fullmatch(name)
            if match and _start_time(int(match[1])) != int(match[2]):
                self._place.remove(name)

    def _scan(self) -> Iterator[tuple[int, bytes]]:
        """Yield (time, key) of every block; other files and symlinks are not ours.

        Makes the directories that are missing.

        Raises:
            TierConfigError: one of them is something else, or may not be read.
        """
        assert self._place is not None
        for prefix in range(256):
            fd = self._place.open_directory(f"{prefix:02x}")
            try:
                with os.scandir(fd) as entries:
                    for entry in entries:
                        if (
                            _BLOCK.fullmatch(entry.name)
                            and entry.name.startswith(f"{prefix:02x}")
                            and entry.is_file(follow_symlinks=False)
                        ):
                            times = entry.stat(follow_symlinks=False)
                            yield times.st_mtime_ns, bytes.fromhex(entry.name)
            finally:
                os.close(fd)

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """See ``Tier.exists``; answered from memory."""
        with self._lock:
            return self._lru.touch_all(keys)

    def put(
        self, keys: Sequence[bytes], slots: Sequence[int], deadline_s: float
    ) -> list[BlockStatus]:
        """See ``Tier.put``; last block first, see ``lru``: so are the files' times."""
        statuses = []
        for key, slot in zip(reversed(keys), reversed(slots), strict=True):
            with self._lock:
                there = self._lru.touch(key)
            if there:
                statuses.append(BlockStatus.OK)
                continue
            try:
                check_deadline(deadline_s)
                self._make_room()
                self._write(key, self._region.stride_view(slot))
            except StorageGoneError:
                raise
            except (OSError, TierError) as error:
                statuses.append(self.fail(error))
                continue
            with self._lock:
                self._lru.insert(key, None)
            statuses.append(BlockStatus.OK)
        return statuses[::-1]

    def _make_room(self) -> None:
        """Evict until one more file keeps both bounds; the temporary one counts.

        Raises:
            NoSpaceError: others filled the file system.
            TierError: all is being read.
            OSError: a victim's file cannot be removed.
        """
        assert self._place is not None
        self._evict(max(0, len(self._lru) + 1 - self._max_blocks))
        if len(self._lru) >= self._max_blocks:
            raise TierError("no room: all blocks are being read")
        need = self._min_free + self._region.stride
        if self._place.free_bytes() < need:
            self._evict(1)
        free = self._place.free_bytes()
        if free < need:
            raise NoSpaceError(
                f"{format_size(free)} free in {shown(self._place.path)}, min_free "
                f"keeps {format_size(self._min_free)}"
            )

    def _evict(self, num_blocks: int) -> None:
        """Remove the least recently used files that nobody reads.

        Raises:
            OSError: a file stays, and so does its block: it takes up space.
        """
        for _ in range(num_blocks):
            with self._lock:
                victim = self._lru.evict()
            if victim is None:
                return
            try:
                self._unlink(victim[0])
            except OSError:
                with self._lock:
                    self._lru.insert(victim[0], None)
                raise
            with self._lock:
                self._evicted.append(victim[0])

    def _write(self, key: bytes, view: memoryview) -> None:
        """Write a temporary file and give it its name; leaves none behind.

        Raises:
            OSError: nothing is there under the key's name.
            StorageGoneError: the tier's directory was removed.
        """
        assert self._place is not None
        self._place.require_here()
        self._num_temp += 1
        temp = f"{self._temp_prefix}-{self._num_temp}.tmp"
        fd = self._place.open_file(temp, os.O_WRONLY | os.O_CREAT, fresh=True)
        try:
            try:
                while view:
                    view = view[os.write(fd, view) :]
            finally:
                os.close(fd)
            self._give_name(temp, key)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temp, dir_fd=self._place.dir_fd)
            raise

    def _give_name(self, temp: str, key: bytes) -> None:
        assert self._place is not None
        place = self._place
        names = {"src_dir_fd": place.dir_fd, "dst_dir_fd": place.dir_fd}
        try:
            os.rename(temp, _file_of(key), **names)
        except FileNotFoundError:  # somebody tidied up behind our back
            os.close(place.open_directory(_file_of(key)[:2]))
            os.rename(temp, _file_of(key), **names)

    def get(
        self, keys: Sequence[bytes], slots: Sequence[int], deadline_s: float
    ) -> list[BlockStatus]:
        """See ``Tier.get``; a file of another length is BAD."""
        with self._lock:
            entries = self._lru.pin_all(keys)
        try:
            return [
                BlockStatus.MISS
                if entry is None
                else self._get(key, slot, entry, deadline_s)
                for key, slot, entry in zip(keys, slots, entries, strict=True)
            ]
        finally:
            with self._lock:
                for entry in entries:
                    if entry is not None:
                        self._lru.unpin(entry)

    def _get(
        self, key: bytes, slot: int, entry: Entry[None], deadline_s: float
    ) -> BlockStatus:
        try:
            check_deadline(deadline_s)
            return self._read(key, self._region.stride_view(slot))
        except FileNotFoundError:  # somebody tidied up behind our back
            with self._lock:
                if not entry.gone:  # else the key may be another, newer block's
                    self._lru.remove(key)
            return BlockStatus.MISS
        except (OSError, TierError) as error:
            return self.fail(error)

    def _read(self, key: bytes, view: memoryview) -> BlockStatus:
        assert self._place is not None
        # O_NONBLOCK: a pipe that was planted is not waited for.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(_file_of(key), flags, dir_fd=self._place.dir_fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                return BlockStatus.BAD  # a symlink was planted: not what we stored
            raise
        try:
            if os.fstat(fd).st_size != view.nbytes:
                return BlockStatus.BAD
            while view:
                num_read = os.readv(fd, [view])
                if num_read == 0:
                    return BlockStatus.BAD
                view = view[num_read:]
        finally:
            os.close(fd)
        return BlockStatus.OK

    def delete(self, keys: Sequence[bytes], deadline_s: float) -> None:
        """See ``Tier.delete``; all are forgotten, whatever becomes of their files."""
        with self._lock:
            known = [key for key in keys if self._lru.remove(key) is not None]
        refusals = []
        for key in known:
            try:
                self._unlink(key)
            except OSError as error:
                refusals.append(error)
        if refusals:
            raise refusals[0]

    def _unlink(self, key: bytes) -> None:
        assert self._place is not None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_file_of(key), dir_fd=self._place.dir_fd)

    def usage(self) -> TierUsage:
        """See ``Tier.usage``."""
        num_blocks = len(self._lru)
        return TierUsage(num_blocks, num_blocks * self._region.stride)

    def resident(self) -> Iterable[bytes]:
        """See ``Tier.resident``."""
        return list(self._lru)

    def take_evicted(self) -> list[bytes]:
        """See ``Tier.take_evicted``."""
        with self._lock:
            evicted, self._evicted = self._evicted, []
        return evicted

    def close(self) -> None:
        """See ``Tier.close``."""
        if self._place is not None:
            self._place.close()
            self._place = None


def _file_of(key: bytes) -> str:
    name = key.hex()
    return f"{name[:2]}/{name}"


def _start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])
