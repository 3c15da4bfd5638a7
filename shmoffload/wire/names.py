"""Names in /dev/shm: how they are spelled, opened, locked, removed.

Covers: one session's names, opening one safely, who still holds one, the sweep and
what it leaves for a next engine.
Does not cover: what is inside (``wire.session``, ``wire.region``).
Who calls it: ``wire.session`` and ``wire.region``; engine, supervisor and tools for
the sweep. Any thread; nothing here waits but ``pause``.

Liveness is a lock that the kernel owns: every process that uses a name holds
LOCK_SH on the description it maps, so LOCK_EX is had only when nobody is left
(freed at once by SIGKILL, measured; a semaphore stays down, a pid means nothing in
another namespace). Whoever got a lock looks at st_nlink: a sweep may have removed
the name in between.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import stat
import time
from typing import TYPE_CHECKING, Final

import posix_ipc

from shmoffload.errors import (
    BadInputError,
    RegionTooSmallError,
    ShmoffloadError,
    StartError,
)
from shmoffload.wire.layout import KEEP_AT

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME_PREFIX: Final = "shmoffload."
SHM_DIR: Final = "/dev/shm"
_REGION_END: Final = ".region"


class Keep(enum.IntEnum):
    """Whom a region outlives; a word in its header page."""

    NOBODY = 0
    ENGINES = 1  # of one daemon: it stays while the session's page is held
    EVERYBODY = 2  # primary.persist


def page_name(session: str) -> str:
    """Return the POSIX shared-memory name of a session's page."""
    return f"/{NAME_PREFIX}{session}.page"


def region_name(session: str) -> str:
    """Return the POSIX shared-memory name of a session's primary region."""
    return f"/{NAME_PREFIX}{session}{_REGION_END}"


def owner_name(session: str) -> str:
    """Return the name whose lock the owning engine holds."""
    return f"/{NAME_PREFIX}{session}.own"


def open_name(name: str) -> int:
    """Open a name, made empty with mode 0600 if absent; close-on-exec, no lock.

    Raises:
        BadInputError: shared memory as it is mounted takes no new name.
        StartError: something that is not ours has the name, or the system refused.
    """
    path = f"{SHM_DIR}{name}"
    try:
        # shm_open follows no symlink.
        fd: int = posix_ipc.SharedMemory(name, posix_ipc.O_CREAT, mode=0o600, size=0).fd
    except (OSError, posix_ipc.Error) as error:
        raise _refusal(path, error) from error
    os.set_inheritable(fd, False)
    there = os.fstat(fd)
    if there.st_uid != os.geteuid() or not stat.S_ISREG(there.st_mode):
        os.close(fd)
        raise StartError(
            f"{path} belongs to user {there.st_uid}, not to us: remove it, or choose "
            f"another session.name"
        )
    return fd


def _refusal(path: str, error: OSError | posix_ipc.Error) -> ShmoffloadError:
    """Say why a name cannot be opened, and what to type."""
    code = error.errno if isinstance(error, OSError) else errno.EACCES
    if code == errno.EROFS:
        return BadInputError(
            f"{SHM_DIR} is mounted read-only: type `mount -o remount,rw {SHM_DIR}` as "
            f"root, or start the container without that"
        )
    if code in (errno.ENOSPC, errno.EDQUOT):  # an empty file takes an inode only
        return RegionTooSmallError(
            f"{SHM_DIR} takes no further file ({os.strerror(code)}; see `df -i "
            f"{SHM_DIR}`): remove some there, or type `mount -o remount,nr_inodes=1M "
            f"{SHM_DIR}` as root"
        )
    if code in (errno.ENOENT, errno.ENOTDIR):
        return BadInputError(
            f"there is no {SHM_DIR}: type `mkdir -p {SHM_DIR} && mount -t tmpfs tmpfs "
            f"{SHM_DIR}` as root"
        )
    if code in (errno.EACCES, errno.EPERM) and not os.path.lexists(path):
        return BadInputError(
            f"this user may make no file in {SHM_DIR}: type `chmod 1777 {SHM_DIR}` as "
            f"root"
        )
    if code in (errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR, errno.ENXIO):
        return StartError(
            f"{path} cannot be opened ({error}): it is a link, or another user's; "
            f"remove it, or choose another session.name"
        )
    if code in (errno.EMFILE, errno.ENFILE):
        return StartError(
            f"{path} cannot be opened: too many files are open; raise the limit "
            f"(ulimit -n)"
        )
    return StartError(f"{path} cannot be opened: {error}")


def try_lock(fd: int, *, exclusive: bool) -> bool:
    """Take or change the lock of an open name; False if others are in the way.

    A failed change loses the lock that was held (flock(2)).
    """
    how = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def pause() -> None:
    """Let go of a contended name for 2 to 8 ms; blocks for that long.

    The nanoseconds of the clock make the length: two that retry in step would meet
    for ever, and importing ``random`` costs ``status`` more than all its work.
    """
    time.sleep(0.002 + time.monotonic_ns() // 16 % 6000 / 1e6)


def is_unlinked(fd: int) -> bool:
    """Say whether the object of ``fd`` has lost its name: start over."""
    return os.fstat(fd).st_nlink == 0


def is_held(name: str, *, exclusively: bool = False) -> bool:
    """Say whether some process holds the lock of a name (EX, or any).

    Takes the lock for an instant when nobody has it; whoever meets that tries
    again for at least 0.3 s.
    """
    try:
        fd = os.open(f"{SHM_DIR}{name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not try_lock(fd, exclusive=not exclusively)
    finally:
        os.close(fd)


def unlink_same(name: str, fd: int) -> bool:
    """Unlink a shared-memory name only while it names the object of ``fd``.

    A late close of an old session must not remove a new session's name, so
    device and inode are compared first.
    """
    with contextlib.suppress(FileNotFoundError, posix_ipc.ExistentialError):
        there = os.stat(f"{SHM_DIR}{name}", follow_symlinks=False)
        mine = os.fstat(fd)
        if (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino):
            posix_ipc.unlink_shared_memory(name)
            return True
    return False


def keep_of(fd: int) -> Keep:
    """Return whom the region of ``fd`` outlives; garbage outlives nobody."""
    word = int.from_bytes(os.pread(fd, 8, KEEP_AT), "little")
    return Keep(word) if word in tuple(Keep) else Keep.NOBODY


def _is_kept(entry: str, fd: int) -> bool:
    """Say whether an entry that nobody holds waits for a next engine."""
    if not entry.endswith(_REGION_END):
        return False
    keep = keep_of(fd)
    session = entry[len(NAME_PREFIX) : -len(_REGION_END)]
    return keep is Keep.EVERYBODY or (
        keep is Keep.ENGINES and is_held(page_name(session))
    )


def live_sessions() -> Iterator[str]:
    """Yield the names of all sessions whose page some process holds."""
    for entry in sorted(_entries()):
        if entry.startswith(NAME_PREFIX) and entry.endswith(".page"):
            session = entry[len(NAME_PREFIX) : -len(".page")]
            if is_held(page_name(session)):
                yield session


def sweep(session: str | None = None, *, kept_too: bool = False) -> list[str]:
    """Remove every name of ours, or of one session, whose lock nobody holds.

    Args:
        session: only its names.
        kept_too: regions that wait for a next engine as well.

    Returns what was removed.

    Safe beside live sessions and beside a start that is midway (its creator looks
    at st_nlink after it got its lock). Names of other users are left alone.
    """
    swept = []
    prefix = NAME_PREFIX if session is None else f"{NAME_PREFIX}{session}."
    for entry in _entries():
        if not entry.startswith(prefix):
            continue
        try:
            fd = os.open(f"{SHM_DIR}/{entry}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # gone meanwhile, or somebody else's
        try:
            if os.fstat(fd).st_uid != os.geteuid():
                continue
            if not try_lock(fd, exclusive=True):
                continue
            if not kept_too and _is_kept(entry, fd):
                continue
            if unlink_same(f"/{entry}", fd):
                swept.append(entry)
        finally:
            os.close(fd)
    return swept


def _entries() -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return os.listdir(SHM_DIR)
    return []  # no shared memory at all: whoever makes a name says so
