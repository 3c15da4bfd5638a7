"""The directory of a disk tier: ours alone, private, bounded.

Covers: ``PATH/<namespace>/`` with its owner, modes and lock; free space; the
default bound; sizes in words.
Does not cover: what lies in it (``slab``, ``fs``).
Who calls it: disk tiers at ``open``, main thread; ``take_place`` may wait up to
``LOCK_WAIT_S`` for a dying predecessor.

Nothing that was planted is followed: a symlink or a directory of another user at
our name is refused. The lock file is never unlinked: two processes that lock two
inodes of one name would both believe to be alone.
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
from shmoffload.wire.config import parse_size

if TYPE_CHECKING:
    from shmoffload.wire.config import TierConfig

LOCK_WAIT_S: Final = 5.0
DEFAULT_MAX_BYTES: Final = 16 << 30
_CONFIG_ERRNOS: Final = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.ENOTDIR,
        errno.EROFS,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.EEXIST,
        errno.EINVAL,
    }
)


def size_words(num_bytes: int) -> str:
    """Return a size for people: ``"1.2 GiB"``."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


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
                f"tier {self.name}: {self.path} belongs to another user: give the "
                f"tier its own path"
            )
        os.fchmod(self.dir_fd, 0o700)
        self._lock_fd = _lock(self, timeout_s=timeout_s)

    def free_bytes(self) -> int:
        """Free bytes of the file system that this user may take."""
        stats = os.fstatvfs(self.dir_fd)
        return stats.f_bavail * stats.f_frsize

    def open_file(self, name: str, flags: int, *, fresh: bool = False) -> int:
        """Open a file of ours in the place, 0600, never through a symlink.

        Raises:
            TierConfigError: something that is not our plain file has the name.
            OSError: the system refused.
        """
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_EXCL if fresh else 0)
        try:
            fd = os.open(name, flags, 0o600, dir_fd=self.dir_fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self._not_ours(name) from error
            raise
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            os.close(fd)
            raise self._not_ours(name)
        return fd

    def _not_ours(self, name: str) -> TierConfigError:
        return TierConfigError(
            f"tier {self.name}: {self.path}/{name} is not a plain file of this user: "
            f"remove it, or give the tier another path"
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
    path = os.path.join(os.path.abspath(config.path), namespace.hex())
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        dir_fd = os.open(path, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _refusal(config, path, error) from error
    place = Place(config.name, path, dir_fd)
    try:
        place.claim(timeout_s=timeout_s)
    except OSError as error:
        place.close()
        raise _refusal(config, path, error) from error
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
        f"tier {config.name}: {what} needs {size_words(need_bytes)} more in "
        f"{place.path}, where {size_words(place.free_bytes())} are free and min_free "
        f"keeps {size_words(min_free)}: lower max_bytes or min_free, or free some space"
    )


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
                f"tier {place.name}: {place.path} is in use by another worker "
                f"(process {holder or 'unknown'}): end its session, or give this "
                f"tier another path"
            ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)  # for people; the lock is the truth
    return fd


def _refusal(
    config: TierConfig, path: str, error: OSError
) -> OSError | TierConfigError:
    if error.errno not in _CONFIG_ERRNOS:
        return error
    return TierConfigError(
        f"tier {config.name}: {path} cannot be used ({error.strerror}): give path a "
        f"directory that this user may write"
    )
