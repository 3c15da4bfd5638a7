"""Is there memory for the region, and may this process use it.

Covers: free bytes of the tmpfs, head room of the cgroup, what to type in Docker,
in Kubernetes and on bare metal; populating a mapping.
Does not cover: making the region (``wire.region``).
Who calls it: ``wire.region``, at start, in the engine and in workers; the session
page (``reserve``); ``doctor`` beforehand. Populating blocks for 0.2 to 0.5 s a GiB
(measured), the rest does not block.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import resource
from pathlib import Path
from typing import Final

from shmoffload.errors import RegionTooSmallError, StartError
from shmoffload.wire.names import SHM_DIR

_log = logging.getLogger(__name__)

_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14; Python's mmap has no name for it."""
_POPULATE_PIECE_BYTES: Final = 256 << 20
"""madvise keeps the GIL: between pieces a Ctrl-C is heard."""
_MIB: Final = 1 << 20
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)


def allocate(fd: int, num_bytes: int) -> None:
    """Give the empty file of ``fd`` its memory, or refuse with the way out.

    Raises:
        RegionTooSmallError: no room; the file may be partly allocated.
    """
    free = _free_bytes(fd)
    if os.fstatvfs(fd).f_blocks and free < num_bytes:  # 0: a tmpfs without a limit
        raise _too_small(num_bytes, free, "the primary region")
    headroom = cgroup_headroom()
    if headroom is not None and headroom < num_bytes:
        _log.warning(
            "the memory limit of this cgroup leaves %d MiB, the primary region takes "
            "%d MiB: the kernel may kill this process; raise the limit or lower "
            "primary.slots",
            headroom // _MIB,
            num_bytes // _MIB,
        )
    reserve(fd, num_bytes, "the primary region")


def reserve(fd: int, num_bytes: int, what: str) -> None:
    """Give a file in shared memory its bytes, or say what keeps them.

    Raises:
        RegionTooSmallError: no room; the file may be partly allocated.
        StartError: the system refused for another reason.
    """
    try:
        # Not ftruncate: it succeeds on a full tmpfs, the first touch is a SIGBUS.
        os.posix_fallocate(fd, 0, num_bytes)
    except OverflowError as error:
        raise _too_small(num_bytes, _free_bytes(fd), what) from error
    except OSError as error:
        if error.errno == errno.EFBIG:
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            if limit != resource.RLIM_INFINITY:
                raise RegionTooSmallError(
                    f"this user's files may have {limit} bytes at most, {what} needs "
                    f"{num_bytes}: type `ulimit -f unlimited` before the start"
                ) from error
        if error.errno in _NO_ROOM:
            raise _too_small(num_bytes, _free_bytes(fd), what) from error
        raise StartError(
            f"{SHM_DIR} gives no {num_bytes} bytes for {what} ({error.strerror}): see "
            f"`mount | grep {SHM_DIR}`, it has to be a tmpfs"
        ) from error


def populate(mapping: mmap.mmap) -> None:
    """Bring every page into this process's page table; changes no byte."""
    size = len(mapping)
    for start in range(0, size, _POPULATE_PIECE_BYTES):
        piece = min(_POPULATE_PIECE_BYTES, size - start)
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, start, piece)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise RegionTooSmallError(
                    f"the kernel refuses {size // _MIB} MiB of shared memory "
                    f"({error.strerror}): lower primary.slots or primary.bytes"
                ) from error
            # An old kernel. Reading is enough: the pages are allocated, and a write
            # of what was read could undo another process's write in between.
            with memoryview(mapping) as view:
                bytes(view[start : start + piece : mmap.PAGESIZE])


def can_populate(mapping: mmap.mmap) -> bool:
    """Say whether the kernel populates at once (Linux 5.14); changes no byte."""
    try:
        mapping.madvise(_MADV_POPULATE_WRITE, 0, mmap.PAGESIZE)
    except OSError:
        return False
    return True


def _free_bytes(fd: int) -> int:
    room = os.fstatvfs(fd)
    return room.f_bavail * room.f_frsize


def _too_small(num_bytes: int, free: int, what: str) -> RegionTooSmallError:
    return RegionTooSmallError(
        f"{SHM_DIR} has {free} bytes free ({free // _MIB} MiB), {what} needs "
        f"{num_bytes} bytes ({-(-num_bytes // _MIB)} MiB): {way_out(num_bytes)}, or "
        f"lower primary.slots or primary.bytes"
    )


def way_out(num_bytes: int) -> str:
    """Say how to make room where we run; a quarter more than is needed."""
    mib = -(-num_bytes * 5 // 4 // _MIB) + 1
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return (
            f"mount an emptyDir with medium: Memory and sizeLimit: {mib}Mi at {SHM_DIR}"
        )
    if Path("/.dockerenv").exists():
        return f"start the container with --shm-size={mib}m or --ipc=host"
    return f"type `mount -o remount,size={mib}m {SHM_DIR}` as root"


def cgroup_headroom() -> int | None:
    """Return the bytes left under the tightest limit (cgroup v2), None if none."""
    headroom = None
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line[3:] for line in lines if line.startswith("0::"))
        place = Path("/sys/fs/cgroup" + own.rstrip("/"))
        while place.is_relative_to("/sys/fs/cgroup"):
            with contextlib.suppress(OSError, ValueError):
                limit = int((place / "memory.max").read_text())  # "max": ValueError
                left = limit - int((place / "memory.current").read_text())
                headroom = left if headroom is None else min(headroom, left)
            place = place.parent
    return headroom
