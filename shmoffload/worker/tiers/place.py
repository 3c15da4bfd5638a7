"""The directory of a disk tier: ours alone, private, bounded.

Covers: ``PATH/<namespace>/`` with its owner, modes and lock; free space; the
default bound; the sentence for a system that refuses for good.
Does not cover: what lies in it (``slab``, ``fs``).
Who calls it: disk tiers at ``open``, main thread; ``take_place`` may wait up to
``LOCK_WAIT_S`` for a dying predecessor.

Nothing that was planted is followed: a symlink or a directory of another user at
our name is refused. The lock file is never unlinked: two processes that lock two
inodes of one name would both believe to be alone.

No sentence names the tier: whoever shows it puts the name before it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from typing import TYPE_CHECKING, Final

from shmoffload.errors import TierConfigError
from shmoffload.wire.sizes import format_size, parse_size
from shmoffload.worker.faults import StorageGoneError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmoffload.wire.config import TierConfig

LOCK_WAIT_S: Final = 5.0
DEFAULT_MAX_BYTES: Final = 16 << 30
_HOPELESS: Final = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.EISDIR,
        errno.ENOTDIR,
        errno.ELOOP,
        errno.ENXIO,
        errno.ENODEV,
        errno.ENAMETOOLONG,
    }
)
"""No start will ever get past these. Not EIO, ENOSPC or EMFILE: those pass. Not
ENOENT either: somebody may tidy up behind a running tier."""
_HOPELESS_DIRECTORY: Final = _HOPELESS | {
    errno.ENOENT,
    errno.EEXIST,
    errno.EINVAL,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
}
_KINDS: Final = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}
_MAX_SHOWN_CHARS: Final = 200


def shown(path: str) -> str:
    """Return a path for a sentence: its middle cut out if long, on one line."""
    if len(path) > _MAX_SHOWN_CHARS:
        half = _MAX_SHOWN_CHARS // 2
        path = f"{path[:half]}...{path[-half:]}"
    return path if path.isprintable() else ascii(path)


class Place:
    """A locked, private directory; ``close`` gives it up."""

    def __init__(self, name: str, path: str, dir_fd: int) -> None:
        """Use ``take_place``."""
        self.name = name
        self.path = path
        self.dir_fd = dir_fd
        self._lock_fd = -1

    def claim(self, *, timeout_s: float) -> None:
        """Make the directory private and lock it; waits for a dying holder.

        Raises:
            TierConfigError: another user's, or in use by another worker.
        """
        if os.fstat(self.dir_fd).st_uid != os.geteuid():
            raise TierConfigError(
                f"{shown(self.path)} belongs to another user: give the tier its own "
                f"path"
            )
        os.fchmod(self.dir_fd, 0o700)
        self._lock_fd = _lock(self, timeout_s=timeout_s)

    def free_bytes(self) -> int:
        """Free bytes of the file system that this user may take."""
        stats = os.fstatvfs(self.dir_fd)
        return stats.f_bavail * stats.f_frsize

    def require_here(self) -> None:
        """Refuse to go on in a directory that somebody has removed.

        Raises:
            StorageGoneError: what is written there can never be found again.
        """
        if os.fstat(self.dir_fd).st_nlink == 0:
            raise StorageGoneError(
                f"{shown(self.path)} was removed while tier {self.name} used it: its "
                f"worker starts again with an empty one"
            )

    def open_file(self, name: str, flags: int, *, fresh: bool = False) -> int:
        """Open a file of ours in the place, 0600, never through a symlink.

        Raises:
            TierConfigError: no start will ever open it: something that is not our
                plain file has the name, or may not be written.
            OSError: the system refused; may work later.
        """
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_EXCL if fresh else 0)
        with self.refusals(name):
            fd = os.open(name, flags, 0o600, dir_fd=self.dir_fd)
        status = os.fstat(fd)
        if not _is_ours(status):
            os.close(fd)
            raise TierConfigError(self._why(name, status, ""))
        return fd

    def open_directory(self, name: str) -> int:
        """Make and open a directory of ours in the place, 0700.

        Raises:
            TierConfigError: something else has the name, or may not be read.
            OSError: the system refused; may work later.
        """
        flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.dir_fd)
            return os.open(name, flags, dir_fd=self.dir_fd)
        except OSError as error:
            path = os.path.join(self.path, name)
            raise _refusal(path, error, _HOPELESS) from error

    def require_plain(self, name: str) -> None:
        """Refuse a name that others will open for us and that is not our plain file.

        Raises:
            TierConfigError: so it is; nothing at all of that name is fine.
        """
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=self.dir_fd, follow_symlinks=False)
            if not _is_ours(status):
                raise TierConfigError(self._why(name, status, ""))

    def remove(self, name: str) -> None:
        """Unlink a file of ours; one that is gone is fine.

        Raises:
            TierConfigError: it is a directory, or may not be removed.
            OSError: the system refused; may work later.
        """
        with contextlib.suppress(FileNotFoundError), self.refusals(name):
            os.unlink(name, dir_fd=self.dir_fd)

    @contextlib.contextmanager
    def refusals(self, name: str) -> Iterator[None]:
        """Turn what the system will always say about a file into a sentence.

        Raises:
            TierConfigError: in place of an OSError that no start gets past.
        """
        try:
            yield
        except OSError as error:
            if error.errno not in _HOPELESS:
                raise
            status = None
            with contextlib.suppress(OSError):
                status = os.stat(name, dir_fd=self.dir_fd, follow_symlinks=False)
            words = error.strerror or str(error)
            raise TierConfigError(self._why(name, status, words)) from error

    def _why(self, name: str, status: os.stat_result | None, words: str) -> str:
        """Say what is wrong with a file: kind, owner, else the system's words."""
        path = shown(f"{self.path}/{name}")
        if status is not None and not _is_ours(status):
            what = _KINDS.get(stat.S_IFMT(status.st_mode), f"user {status.st_uid}'s")
            return (
                f"{path} is {what} and not a plain file of this user: remove it, or "
                f"give the tier another path"
            )
        if status is not None:
            words += f", mode {stat.S_IMODE(status.st_mode):04o}"
        return (
            f"{path} cannot be used ({words}): let this user read and write it, or "
            f"give the tier another path"
        )

    def close(self) -> None:
        """Release the lock. Twice is fine."""
        for fd in (self._lock_fd, self.dir_fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self.dir_fd = -1


def take_place(
    config: TierConfig, namespace: bytes, *, timeout_s: float = LOCK_WAIT_S
) -> Place:
    """Make and lock the directory of a tier's namespace.

    Raises:
        TierConfigError: not a usable directory, or in use by another worker.
        OSError: the system failed (EIO, ENOSPC): may work later.
    """
    assert config.path is not None, "the registry refuses a disk tier without path"
    if "\0" in config.path:
        raise TierConfigError(
            f"path = {shown(config.path)} has a NUL in it: give path a directory"
        )
    path = os.path.join(os.path.abspath(config.path), namespace.hex())
    try:
        _make_directories(path)
        dir_fd = os.open(path, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _refusal(path, error, _HOPELESS_DIRECTORY) from error
    place = Place(config.name, path, dir_fd)
    try:
        place.claim(timeout_s=timeout_s)
    except OSError as error:
        place.close()
        raise _refusal(path, error, _HOPELESS_DIRECTORY) from error
    except TierConfigError:
        place.close()
        raise
    return place


def bound_of(config: TierConfig, place: Place) -> int:
    """Return the tier's bound in bytes: as configured, else the default.

    The default is 16 GiB, or half of what is free above ``min_free`` if less.
    """
    if config.max_bytes is not None:
        return parse_size(config.max_bytes, key="max_bytes")
    spare = place.free_bytes() - parse_size(config.min_free, key="min_free")
    return max(0, min(DEFAULT_MAX_BYTES, spare // 2))


def has_room(config: TierConfig, place: Place, need_bytes: int) -> bool:
    """Say whether ``need_bytes`` more leave ``min_free`` alone."""
    min_free = parse_size(config.min_free, key="min_free")
    return need_bytes <= 0 or need_bytes <= place.free_bytes() - min_free


def no_room(
    config: TierConfig, place: Place, need_bytes: int, what: str
) -> TierConfigError:
    """Return the refusal: needed and free bytes, and the keys to change."""
    min_free = parse_size(config.min_free, key="min_free")
    return TierConfigError(
        f"{what} needs {format_size(need_bytes)} more in {shown(place.path)}, where "
        f"{format_size(place.free_bytes())} are free and min_free keeps "
        f"{format_size(min_free)}: lower max_bytes or min_free, or free some space"
    )


def no_block(stride: int, place: Place) -> TierConfigError:
    """Return the refusal of a bound below one block."""
    return TierConfigError(
        f"no block of {format_size(stride)} fits into {shown(place.path)} "
        f"({format_size(place.free_bytes())} free): set max_bytes, lower min_free, or "
        f"free some space"
    )


def _make_directories(path: str) -> None:
    """Make a directory and those above it, all 0700.

    Not os.makedirs: it calls itself once a level and ends in RecursionError.
    """
    with contextlib.suppress(FileNotFoundError):
        os.stat(path)  # a path that can never be shall leave no part of it behind
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)


def _lock(place: Place, *, timeout_s: float) -> int:
    fd = place.open_file("lock", os.O_RDWR | os.O_CREAT)
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < deadline_s:
                time.sleep(0.02)  # the predecessor was killed and is on its way out
                continue
            holder = os.pread(fd, 20, 0).decode(errors="replace").strip()
            os.close(fd)
            raise TierConfigError(
                f"{shown(place.path)} is in use by another worker (process "
                f"{holder or 'unknown'}): end its session, or give this tier another "
                f"path"
            ) from None
    with contextlib.suppress(OSError):  # a full disk: the lock is the truth
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)  # for people
    return fd


def _is_ours(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _refusal(
    path: str, error: OSError, hopeless: frozenset[int]
) -> OSError | TierConfigError:
    if error.errno not in hopeless:
        return error
    return TierConfigError(
        f"{shown(path)} cannot be used ({error.strerror}): give path a directory that "
        f"this user may write"
    )
