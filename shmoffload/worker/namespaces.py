"""The namespace directories below a tier's path, seen from outside.

Covers: finding them, whose they are, who serves them, how large they are, removing
one that nobody serves.
Does not cover: serving one (``tiers.place``), reading its blocks (``scrub``).
Who calls it: ``scrub`` and the command line; one thread; waits for the disk.

A directory counts as ours only with the name, the owner and the lock file that
``tiers.place`` gives it; nothing is followed. Looking changes nothing, the times of
the lock file included: they tell when a namespace was last used.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
from typing import TYPE_CHECKING, Final

from shmoffload.errors import BadInputError
from shmoffload.worker.tiers.place import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCK_NAME: Final = "lock"
QUARANTINE: Final = "quarantine"
_NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
_TEMP: Final = re.compile(r"\.\d+-\d+-\d+\.tmp")
_OURS: Final = re.compile(
    r"slab\.bin|probe|index\.sqlite(-wal|-shm|-journal)?|quarantine|[0-9a-f]{2}"
)
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Folder:
    """One namespace's directory; ``close`` it.

    Attributes:
        path: of the directory, for people.
        dir_fd: its descriptor.
        digest: the namespace's, 16 bytes.
    """

    def __init__(self, parent: str, name: str) -> None:
        """Open a directory that ``names_in`` has found.

        Raises:
            OSError: it is gone, or was replaced by something else.
        """
        self.path = os.path.join(parent, name)
        self.digest = bytes.fromhex(name)
        self._lock_fd = -1
        self.dir_fd = os.open(self.path, _DIRECTORY | os.O_NOFOLLOW)
        try:
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock_fd = os.open(LOCK_NAME, flags, dir_fd=self.dir_fd)
        except BaseException:
            self.close()
            raise

    def try_lock(self) -> bool:
        """Take the place of the one worker that may write; False if there is one."""
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_served(self) -> bool:
        """Say whether a worker, or another tool, holds the lock now."""
        if not self.try_lock():
            return True
        fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        return False

    def holder(self) -> str:
        """Return the pid that the last holder wrote, for people."""
        text = os.pread(self._lock_fd, 20, 0).decode(errors="replace").strip()
        return text or "unknown"

    def used_ns(self) -> int:
        """When it was last taken or written to, in wall-clock nanoseconds."""
        with os.scandir(self.dir_fd) as entries:
            return max(_written_ns(entry) for entry in entries)

    def strangers(self) -> list[str]:
        """Names in it that no tier of ours makes."""
        return sorted(
            name
            for name in os.listdir(self.dir_fd)
            if not (name == LOCK_NAME or _TEMP.fullmatch(name) or _OURS.fullmatch(name))
        )

    def temporaries(self) -> list[str]:
        """Names of half-written files; of dead writers, if nobody serves it."""
        return sorted(filter(_TEMP.fullmatch, os.listdir(self.dir_fd)))

    def allocated_bytes(self, name: str | None = None) -> int:
        """Bytes on disk of one entry, or of everything."""
        names = os.listdir(self.dir_fd) if name is None else [name]
        return sum(_allocated(self.dir_fd, entry) for entry in names)

    def remove_entry(self, name: str) -> None:
        """Remove a file, or a directory with what is in it; follows nothing."""
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(name, dir_fd=self.dir_fd, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                shutil.rmtree(name, dir_fd=self.dir_fd)
            else:
                os.unlink(name, dir_fd=self.dir_fd)

    def remove(self) -> None:
        """Remove the directory; ``try_lock`` has to have said True.

        The lock goes last. A worker that starts in this very moment either makes a
        new lock, and the directory stays with it, or finds no directory and is
        started again.

        Raises:
            OSError: the system refused; a part is left, which a tier can open.
        """
        for name in os.listdir(self.dir_fd):
            if name != LOCK_NAME:
                self.remove_entry(name)
        self.remove_entry(LOCK_NAME)
        os.rmdir(self.path)

    def close(self) -> None:
        """Give it up, the lock too. Twice is fine."""
        for fd in (self._lock_fd, self.dir_fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self.dir_fd = -1


def names_in(path: str) -> list[str]:
    """Return the names of this user's namespace directories below a path, sorted.

    Raises:
        BadInputError: the path is no directory that can be read.
    """
    try:
        fd = os.open(path, _DIRECTORY)
    except (OSError, ValueError) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise BadInputError(
            f"{shown(path)} cannot be read ({words}): give a tier's path"
        ) from error
    try:
        return sorted(name for name in os.listdir(fd) if _is_namespace(fd, name))
    finally:
        os.close(fd)


@contextlib.contextmanager
def folders(path: str) -> Iterator[list[Folder]]:
    """Open the namespace directories below a path, or the one that it names.

    Raises:
        BadInputError: the path is no directory that can be read.
    """
    parent, name = os.path.split(os.path.abspath(path))
    names = [name] if _NAMESPACE.fullmatch(name) else []
    if not names or name not in names_in(parent):
        parent, names = path, names_in(path)
    with contextlib.ExitStack() as stack:
        found = []
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found.append(Folder(parent, name))
                stack.callback(found[-1].close)
        yield found


def _is_namespace(fd: int, name: str) -> bool:
    if not _NAMESPACE.fullmatch(name):
        return False
    try:
        place = os.stat(name, dir_fd=fd, follow_symlinks=False)
        lock = os.stat(f"{name}/{LOCK_NAME}", dir_fd=fd, follow_symlinks=False)
    except OSError:
        return False
    return (
        stat.S_ISDIR(place.st_mode)
        and stat.S_ISREG(lock.st_mode)
        and place.st_uid == lock.st_uid == os.geteuid()
    )


def _written_ns(entry: os.DirEntry[str]) -> int:
    with contextlib.suppress(FileNotFoundError):
        return entry.stat(follow_symlinks=False).st_mtime_ns
    return 0


def _allocated(dir_fd: int, name: str) -> int:
    """Bytes on disk of an entry and, two levels deep at most, of what is in it."""
    with contextlib.suppress(FileNotFoundError):
        status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            return status.st_blocks * 512
        fd = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=dir_fd)
        try:
            with os.scandir(fd) as entries:
                return sum(
                    entry.stat(follow_symlinks=False).st_blocks * 512
                    for entry in entries
                )
        finally:
            os.close(fd)
    return 0
