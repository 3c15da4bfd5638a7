"""What dead sessions have left: names, sockets, locks, old namespaces.

Covers: finding it, removing one piece after looking at its lock again.
Does not cover: deciding to remove (``cli.clean``), saying that it is there
(``cli.doctor``).
Who calls it: these two; the main thread; waits for the disk only where a tier's path
is given.

Alive is what some process holds the lock of: one held name keeps all names of its
session. Names of other users are none of our business. A piece is removed under its
own lock, so that a start at this very moment either keeps it or makes it anew.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from shmoffload.supervisor.runtime_dir import (
    open_runtime_dir,
    runtime_path,
    socket_address,
)
from shmoffload.wire.names import (
    NAME_PREFIX,
    SHM_DIR,
    Keep,
    is_held,
    keep_of,
    try_lock,
    unlink_same,
)
from shmoffload.worker.namespaces import QUARANTINE, Folder, folders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_OPEN: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CONNECT_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True)
class Leftover:
    """One piece that can go.

    Attributes:
        kind: shared memory, kept region, socket, lock, namespace, temporary file,
            quarantine.
        path: for people.
        num_bytes: that it occupies.
        remove: does so; False if somebody uses it by now. May raise OSError.
    """

    kind: str
    path: str
    num_bytes: int
    remove: Callable[[], bool] = field(repr=False, compare=False)


KEPT: Final = "kept region"


def in_shared_memory(session: str | None = None) -> Iterator[Leftover]:
    """Yield names of dead sessions, or of one, in /dev/shm.

    A region that waits for a next engine (``primary.persist``) is of kind ``KEPT``.
    """
    by_session: dict[str, list[str]] = {}
    with contextlib.suppress(FileNotFoundError):
        for entry in sorted(os.listdir(SHM_DIR)):
            if entry.startswith(NAME_PREFIX):
                owner = entry[len(NAME_PREFIX) :].rpartition(".")[0]
                by_session.setdefault(owner, []).append(entry)
    for name, entries in by_session.items():
        if session not in (None, name) or any(is_held(f"/{e}") for e in entries):
            continue
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                path = f"{SHM_DIR}/{entry}"
                status = os.stat(path, follow_symlinks=False)
                if _is_our_file(status):
                    kind = KEPT if _is_kept(path) else "shared memory"
                    size = status.st_blocks * 512
                    yield Leftover(kind, path, size, partial(_remove_name, entry))


def _is_kept(path: str) -> bool:
    if not path.endswith(".region"):
        return False
    fd = os.open(path, _OPEN)
    try:
        return keep_of(fd) is Keep.EVERYBODY
    finally:
        os.close(fd)


def _remove_name(entry: str) -> bool:
    fd = os.open(f"{SHM_DIR}/{entry}", _OPEN)
    try:
        # An unlinked one is gone already: a sweep was quicker.
        return try_lock(fd, exclusive=True) and unlink_same(f"/{entry}", fd)
    finally:
        os.close(fd)


def in_runtime_dir(session: str | None = None) -> Iterator[Leftover]:
    """Yield sockets and lock files of daemons that are gone.

    Raises:
        StartError: the directory is not safely ours.
    """
    dir_fd = open_runtime_dir(create=False)
    if dir_fd is None:
        return
    try:
        for entry in sorted(os.listdir(dir_fd)):
            name, dot, end = entry.rpartition(".")
            if dot and end in ("sock", "lock") and session in (None, name):
                kind = "socket" if end == "sock" else "lock"
                path = f"{runtime_path()}/{entry}"
                if not _is_served(dir_fd, name):
                    yield Leftover(kind, path, 0, partial(_remove_endpoint, entry))
    finally:
        os.close(dir_fd)


def served_sessions() -> list[str]:
    """Return the sessions whose daemon holds its lock.

    Raises:
        StartError: the runtime directory is not safely ours.
    """
    dir_fd = open_runtime_dir(create=False)
    if dir_fd is None:
        return []
    try:
        locks = [e for e in sorted(os.listdir(dir_fd)) if e.endswith(".lock")]
        names = [entry.removesuffix(".lock") for entry in locks]
        return [name for name in names if _is_served(dir_fd, name)]
    finally:
        os.close(dir_fd)


def _is_served(dir_fd: int, session: str) -> bool:
    """Say whether a daemon holds the lock or, if that is gone, listens.

    Takes the lock for an instant; what cannot be opened counts as served.
    """
    try:
        fd = os.open(f"{session}.lock", _OPEN, dir_fd=dir_fd)
    except FileNotFoundError:
        return connects(dir_fd, session)
    except OSError:
        return True
    try:
        return not try_lock(fd, exclusive=True)
    finally:
        os.close(fd)


def connects(dir_fd: int, session: str) -> bool:
    """Say whether somebody listens on a session's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(_CONNECT_TIMEOUT_S)
        try:
            sock.connect(socket_address(dir_fd, session))
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True


def _remove_endpoint(entry: str) -> bool:
    """Unlink a daemon's socket or lock file, under its lock."""
    dir_fd = open_runtime_dir(create=False)
    if dir_fd is None:
        return False
    session = entry.rpartition(".")[0]
    lock_fd = -1
    try:
        with contextlib.suppress(FileNotFoundError):
            lock_fd = os.open(f"{session}.lock", _OPEN, dir_fd=dir_fd)
        if lock_fd < 0 and connects(dir_fd, session):
            return False
        if lock_fd >= 0 and not (
            try_lock(lock_fd, exclusive=True) and os.fstat(lock_fd).st_nlink
        ):
            return False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(entry, dir_fd=dir_fd)
            return True
        return False
    finally:
        if lock_fd >= 0:
            os.close(lock_fd)
        os.close(dir_fd)


def below_tier_path(path: str, *, keep: int) -> tuple[list[Leftover], list[str]]:
    """Return what can go below a tier's path, and sentences about what stays.

    Old namespaces, and in those that stay: half-written files and the quarantine.

    Args:
        path: as in the configuration.
        keep: namespaces that stay, the last used first; one that is served counts.

    Raises:
        BadInputError: the path is no directory that can be read.
    """
    found: list[Leftover] = []
    notes: list[str] = []
    with folders(path) as opened:
        served = {folder.path for folder in opened if folder.is_served()}
        order = sorted(
            opened, key=lambda f: (f.path in served, f.used_ns()), reverse=True
        )
        for rank, folder in enumerate(order):
            if folder.path in served:
                notes.append(f"{folder.path} stays: process {folder.holder()} has it")
            elif rank < keep:
                notes.append(f"{folder.path} stays: it was used last (--keep {keep})")
                found += _litter_of(folder)
            elif strangers := folder.strangers():
                notes.append(f"{folder.path} stays: {strangers[0]} in it is not ours")
            else:
                size = folder.allocated_bytes()
                remove = partial(_remove_namespace, folder.path)
                found.append(Leftover("namespace", folder.path, size, remove))
    return found, notes


def _litter_of(folder: Folder) -> Iterator[Leftover]:
    names = [(name, "temporary file") for name in folder.temporaries()]
    if QUARANTINE in os.listdir(folder.dir_fd):
        names.append((QUARANTINE, "quarantine"))
    for name, kind in names:
        remove = partial(_remove_entry, folder.path, name)
        size = folder.allocated_bytes(name)
        yield Leftover(kind, f"{folder.path}/{name}", size, remove)


def _remove_namespace(path: str) -> bool:
    folder = Folder(*os.path.split(path))
    try:
        if not folder.try_lock() or folder.strangers():
            return False
        folder.remove()
        return True
    finally:
        folder.close()


def _remove_entry(path: str, name: str) -> bool:
    folder = Folder(*os.path.split(path))
    try:
        if not folder.try_lock():
            return False
        folder.remove_entry(name)
        return True
    finally:
        folder.close()


def _is_our_file(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
