"""Reading every block of a disk tier, and putting aside what is not right.

Covers: header, key, length, padding and checksum of each block of one namespace's
directory, ``slab`` and ``fs``, encrypted or not (without the key); the repair.
Does not cover: finding and locking directories (``namespaces``), options and output
(``cli.verify``).
Who calls it: ``cli.verify``, one thread, with the directory's lock; waits for the
disk. Memory: one piece of a block, whatever is in the tier.

It reads what the disk has and not what the page cache remembers. What it calls bad a
tier would have answered as a miss; the repair makes it a miss without a read. A bad
file moves into ``quarantine`` beside the blocks, where no tier looks; a bad slot of a
slab loses its row in the index and its bytes stay until the slot is used again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sqlite3
import stat
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import xxhash

from shmoffload.core.types import GROUP_BYTES, MAX_KEY_BYTES
from shmoffload.errors import TierError
from shmoffload.wire.layout import (
    CIPHER_BYTES,
    HEADER_BYTES,
    PAGE_BYTES,
    open_cipher,
    open_header,
    round_up_to_page,
    stride_of,
)
from shmoffload.worker.namespaces import QUARANTINE
from shmoffload.worker.tiers.place import Place
from shmoffload.worker.tiers.slab_file import SLAB_NAME
from shmoffload.worker.tiers.slab_index import (
    INDEX_NAME,
    IndexDamagedError,
    SlabIndex,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmoffload.worker.namespaces import Folder

MAX_LISTED: Final = 100
_PIECE_BYTES: Final = 1 << 20
_ROWS_A_TIME: Final = 1024
_MAX_STRIDE: Final = stride_of(1 << 30)
_BLOCK: Final = re.compile(rf"(?:[0-9a-f]{{2}}){{{GROUP_BYTES + 1},{MAX_KEY_BYTES}}}")
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass
class Findings:
    """What one directory holds.

    Attributes:
        path: of the directory.
        kind: slab or fs.
        num_blocks: that were looked at.
        num_bytes: that were read for it.
        bad: how many are not right, by reason.
        listed: key or slot and reason of the first ``MAX_LISTED`` bad ones.
        num_repaired: bad ones that are a plain miss now.
        num_strangers: files among the blocks that are none; left alone.
        notes: sentences for people.
    """

    path: str
    kind: str
    num_blocks: int = 0
    num_bytes: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    listed: list[tuple[str, str]] = field(default_factory=list)
    num_repaired: int = 0
    num_strangers: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def num_bad(self) -> int:
        """Blocks that are not right."""
        return self.bad.total()

    def add(self, name: str, reason: str) -> None:
        """Count one block; ``reason`` is "" if it is right."""
        self.num_blocks += 1
        if reason:
            self.bad[reason] += 1
            if len(self.listed) < MAX_LISTED:
                self.listed.append((name, reason))


def scrub(folder: Folder, *, repair: bool) -> list[Findings]:
    """Read every block of a namespace's directory.

    Args:
        folder: locked by the caller.
        repair: put bad blocks aside; otherwise nothing is changed.

    Returns:
        Findings per kind of tier that has blocks there; usually one.

    Raises:
        TierError: the index, or the directory for bad files, cannot be used.
        OSError: the system refused; what was repaired stays so.
    """
    found = []
    names = os.listdir(folder.dir_fd)
    if SLAB_NAME in names:
        found.append(_scrub_slab(folder, repair=repair))
    prefixes = sorted(name for name in names if re.fullmatch(r"[0-9a-f]{2}", name))
    if prefixes or not found:
        found.append(_scrub_files(folder, prefixes, repair=repair))
    return found


def _scrub_files(folder: Folder, prefixes: list[str], *, repair: bool) -> Findings:
    findings = Findings(folder.path, "fs")
    for prefix in prefixes:
        try:
            flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(prefix, flags, dir_fd=folder.dir_fd)
        except OSError as error:
            findings.notes.append(f"{prefix} cannot be read ({error.strerror})")
            findings.num_strangers += 1
            continue
        try:
            bad = list(_bad_files(folder, fd, prefix, findings))
            if repair and bad:
                findings.num_repaired += _put_aside(folder, fd, bad)
        finally:
            os.close(fd)
    if findings.num_strangers:
        findings.notes.append(
            f"{findings.num_strangers} entries are no blocks; they were left alone"
        )
    return findings


def _bad_files(
    folder: Folder, fd: int, prefix: str, findings: Findings
) -> Iterator[str]:
    """Judge every block of one directory; yield the names of the bad ones."""
    with os.scandir(fd) as entries:
        for entry in entries:
            if not (_BLOCK.fullmatch(entry.name) and entry.name.startswith(prefix)):
                findings.num_strangers += 1
                continue
            reason = _judge_file(folder, fd, entry.name, findings)
            findings.add(entry.name, reason)
            if reason:
                yield entry.name


def _judge_file(folder: Folder, dir_fd: int, name: str, findings: Findings) -> str:
    try:
        fd = os.open(name, _READ, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            return "no plain file"
        return _unreadable(error)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return "no plain file"
        key = bytes.fromhex(name)
        return _judge(fd, 0, status.st_size, key, folder.digest, findings)
    finally:
        os.close(fd)


def _judge(
    fd: int, at: int, size: int, key: bytes, digest: bytes, findings: Findings
) -> str:
    """Say what is wrong with the stride at an offset of a file, "" if nothing."""
    if size < 2 * PAGE_BYTES or size % PAGE_BYTES:
        return "wrong length"
    try:
        # The page cache would show what was written, the disk shows what stayed.
        os.posix_fadvise(fd, at, size, os.POSIX_FADV_DONTNEED)
        page = os.pread(fd, PAGE_BYTES, at + size - PAGE_BYTES)
        header = open_header(page)
        if header is None or not _is_clean(page):
            return "damaged header"
        if header.namespace != digest or header.key != key:
            return "another block's header"
        if stride_of(header.num_bytes) != size:
            return "wrong length"
        end = at + header.num_bytes
        if any(os.pread(fd, at + size - PAGE_BYTES - end, end)):
            return "damaged padding"
        checksum = _checksum(fd, at, header.num_bytes)
        os.posix_fadvise(fd, at, size, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        return _unreadable(error)
    findings.num_bytes += size
    return "" if checksum == header.checksum else "wrong checksum"


def _is_clean(page: bytes) -> bool:
    """Say whether behind the header there is nothing, or an intact cipher record."""
    used = HEADER_BYTES if open_cipher(page) is None else HEADER_BYTES + CIPHER_BYTES
    return not any(page[used:])


def _checksum(fd: int, at: int, num_bytes: int) -> int:
    state = xxhash.xxh3_64()
    end = at + num_bytes
    while at < end:
        piece = os.pread(fd, min(_PIECE_BYTES, end - at), at)
        if not piece:
            break
        state.update(piece)
        at += len(piece)
    return state.intdigest()


def _unreadable(error: OSError) -> str:
    """Return the reason for a block that the system does not give.

    Raises:
        OSError: it is this process's fault and not the block's.
    """
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR):
        raise error
    return f"unreadable ({os.strerror(error.errno or 0)})"


def _put_aside(folder: Folder, fd: int, names: list[str]) -> int:
    """Move files into the quarantine; return how many.

    Raises:
        TierError: the system refused.
    """
    place = Place("verify", folder.path, folder.dir_fd)  # not closed: borrowed
    num_moved = 0
    try:
        quarantine_fd = place.open_directory(QUARANTINE)
        try:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(name, name, src_dir_fd=fd, dst_dir_fd=quarantine_fd)
                    num_moved += 1
        finally:
            os.close(quarantine_fd)
    except OSError as error:
        raise TierError(
            f"{folder.path}: a bad block cannot be put aside ({error.strerror}): let "
            f"this user write there, then verify again"
        ) from error
    return num_moved


def _scrub_slab(folder: Folder, *, repair: bool) -> Findings:
    findings = Findings(folder.path, "slab")
    fd = os.open(SLAB_NAME, _READ, dir_fd=folder.dir_fd)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise TierError(f"{folder.path}/{SLAB_NAME} is no plain file: remove it")
        try:
            stride = _stride_of_index(folder)
            bad = _bad_rows(folder, fd, stride, findings)
        except (sqlite3.Error, IndexDamagedError) as error:
            findings = Findings(folder.path, "slab")
            findings.notes.append(
                f"the index cannot be used ({error}): blocks are found by their "
                f"headers, as the tier will at its next start"
            )
            _bad_slots(folder, fd, findings)
            return findings
    finally:
        os.close(fd)
    if repair and bad:
        findings.num_repaired = _drop_rows(folder, stride, bad)
    return findings


@contextlib.contextmanager
def _reading(folder: Folder) -> Iterator[sqlite3.Connection]:
    """Open the index to read.

    Raises:
        IndexDamagedError: there is none that is a plain file.
        sqlite3.Error: SQLite cannot use it.
    """
    try:
        os.close(os.open(INDEX_NAME, _READ, dir_fd=folder.dir_fd))
    except OSError as error:
        raise IndexDamagedError(error.strerror) from error
    uri = f"file:{quote(f'{folder.path}/{INDEX_NAME}')}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=5.0)) as db:
        yield db


def _stride_of_index(folder: Folder) -> int:
    with _reading(folder) as db:
        meta = dict(db.execute("SELECT name, value FROM meta LIMIT 16"))
    stride = meta.get("stride")
    if not isinstance(stride, int) or not _is_stride(stride):
        raise IndexDamagedError("it does not say how large a block is")
    if meta.get("namespace") != folder.digest:
        raise IndexDamagedError("it was made for another layout")
    return stride


def _is_stride(stride: int) -> bool:
    return 2 * PAGE_BYTES <= stride <= _MAX_STRIDE and stride % PAGE_BYTES == 0


def _bad_rows(folder: Folder, fd: int, stride: int, findings: Findings) -> list[int]:
    """Judge every block that the index names; return the slots of bad ones."""
    bad = []
    with _reading(folder) as db:
        cursor = db.execute("SELECT slot, key FROM blocks ORDER BY slot")
        while rows := cursor.fetchmany(_ROWS_A_TIME):
            for slot, key in rows:
                reason = "another block's header"
                name = key.hex() if isinstance(key, bytes) else str(key)
                if slot < 0 or (slot + 1) * stride > os.fstat(fd).st_size:
                    reason = "wrong length"
                elif isinstance(key, bytes):
                    digest = folder.digest
                    reason = _judge(fd, slot * stride, stride, key, digest, findings)
                findings.add(name, reason)
                if reason:
                    bad.append(slot)
    return bad


def _bad_slots(folder: Folder, fd: int, findings: Findings) -> None:
    """Judge every slot whose header is intact; what has none is no block."""
    size = os.fstat(fd).st_size
    stride = _first_stride(fd, size, folder.digest)
    if stride is None:
        findings.notes.append("no block was found in the slab")
        return
    for at in range(0, size - stride + 1, stride):
        header = open_header(os.pread(fd, HEADER_BYTES, at + stride - PAGE_BYTES))
        if header is not None and header.namespace == folder.digest:
            reason = _judge(fd, at, stride, header.key, folder.digest, findings)
            findings.add(header.key.hex(), reason)


def _first_stride(fd: int, size: int, digest: bytes) -> int | None:
    """Return what the first intact header says of the size of all slots.

    Slots are given out from the front: where the largest block there may be would
    end without one, there is none.
    """
    for at in range(0, min(size, _MAX_STRIDE), PAGE_BYTES):
        header = open_header(os.pread(fd, HEADER_BYTES, at))
        if header is not None and header.namespace == digest:
            stride = round_up_to_page(header.num_bytes) + PAGE_BYTES
            if _is_stride(stride) and (at + PAGE_BYTES) % stride == 0:
                return stride
    return None


def _drop_rows(folder: Folder, stride: int, slots: list[int]) -> int:
    """Take slots out of the index; return how many.

    Raises:
        TierError: the index refused; all are still there.
    """
    place = Place("verify", folder.path, folder.dir_fd)  # not closed: borrowed
    try:
        index = SlabIndex(place, stride=stride, namespace=folder.digest)
        try:
            index.commit(removed=slots)
        finally:
            index.close()
    except (sqlite3.Error, IndexDamagedError) as error:
        raise TierError(
            f"{folder.path}: the index refuses the repair ({error}): let this user "
            f"write there, then verify again"
        ) from error
    return len(slots)
