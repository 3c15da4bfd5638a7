"""Where a daemon's socket and lock are, and that nobody else put them there.

Covers: the runtime directory, socket address, one daemon per session.
Does not cover: what is said over the socket (``loop``).
Who calls it: ``daemon`` (creates), ``spawn`` in the engine process and tools (only
look). Nothing here waits but a start, ``_LOCK_WAIT_S``: a look holds the lock for an
instant.

A lock file is unlinked only by who holds its lock: the daemon that ends, or ``clean``.
Who then gets the lock of a file without a name opens the name again; otherwise two
daemons could hold "the" lock.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shmoffload.errors import SessionInUseError, StartError
from shmoffload.wire.names import pause, try_lock

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_SOCKET_PATH_BYTES: Final = 107
"""``sun_path`` has 108 bytes and ends in a zero."""
_BACKLOG: Final = 16
_LOCK_TRIES: Final = 10
_LOCK_WAIT_S: Final = 0.3


def runtime_path() -> Path:
    """Return the directory of this user's sockets; it may not exist."""
    if chosen := os.environ.get("SHMOFFLOAD_RUNTIME_DIR"):
        return Path(chosen)
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(base) / "shmoffload"
    return Path(f"/tmp/shmoffload-{os.geteuid()}")


def open_runtime_dir(*, create: bool) -> int | None:
    """Open the runtime directory; None if it is not there and not to be made.

    Raises:
        StartError: it is a symbolic link, belongs to another user, or others may
            write to it: whoever put a socket there would be given our memory.
    """
    path = runtime_path()
    if create:
        try:
            _make_directories(path)
        except OSError as error:
            raise StartError(
                f"{path} cannot be made ({error.strerror}): set "
                f"SHMOFFLOAD_RUNTIME_DIR to a directory of your own"
            ) from error
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StartError(
            f"{path} is not a directory of ours ({error.strerror}): remove it, or set "
            f"SHMOFFLOAD_RUNTIME_DIR to a directory of your own"
        ) from error
    if fault := directory_fault(os.fstat(fd), uid=os.geteuid()):
        os.close(fd)
        raise StartError(
            f"{path} {fault}: remove it, or set SHMOFFLOAD_RUNTIME_DIR to a "
            f"directory of your own with mode 0700"
        )
    return fd


def _make_directories(path: Path) -> None:
    """Make a directory and those above it that are missing, all 0700.

    Not ``mkdir(parents=True)``: what it makes above has the mode of the umask, and
    who may write there may put another directory in this one's place.
    """
    missing = [path, *path.parents]
    while missing and missing[-1].exists():
        missing.pop()
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)


def directory_fault(status: os.stat_result, *, uid: int) -> str:
    """Say why a directory cannot be trusted, "" if it can."""
    if status.st_uid != uid:
        return f"belongs to user {status.st_uid}, not to {uid}"
    if stat.S_IMODE(status.st_mode) & 0o077:
        return f"has mode {stat.S_IMODE(status.st_mode):04o}, others may use it"
    return ""


def socket_path(session: str) -> Path:
    """Return the path of a session's control socket, for people."""
    return runtime_path() / f"{session}.sock"


def socket_address(dir_fd: int, session: str) -> str:
    """Return an address for ``bind`` and ``connect``, whatever the path's length."""
    path = str(socket_path(session))
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        return path
    return f"/proc/self/fd/{dir_fd}/{session}.sock"


@contextlib.contextmanager
def listening(session: str) -> Iterator[socket.socket]:
    """Hold the session's lock and listen on its socket; remove both after.

    Raises:
        SessionInUseError: another daemon serves this session.
        StartError: the directory cannot be used.
    """
    dir_fd = open_runtime_dir(create=True)
    if dir_fd is None:  # removed between mkdir and open
        raise StartError(f"{runtime_path()} vanished while starting: start again")
    lock_fd = -1
    try:
        lock_fd = _take_lock(dir_fd, session)
        name = f"{session}.sock"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=dir_fd)  # of a killed daemon: we hold its lock
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            # What bind makes gets the mode of the socket, less the umask.
            os.fchmod(listener.fileno(), 0o600)
            listener.bind(socket_address(dir_fd, session))
            try:
                listener.listen(_BACKLOG)
                listener.setblocking(False)
                yield listener
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=dir_fd)
    finally:
        if lock_fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{session}.lock", dir_fd=dir_fd)
            os.close(lock_fd)
        os.close(dir_fd)


def _take_lock(dir_fd: int, session: str) -> int:
    """Return the locked lock file of a session; made if there is none."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    for _ in range(_LOCK_TRIES):
        lock_fd = os.open(f"{session}.lock", flags, 0o600, dir_fd=dir_fd)
        try:
            _lock(lock_fd, session)
        except BaseException:
            os.close(lock_fd)
            raise
        if os.fstat(lock_fd).st_nlink > 0:
            return lock_fd
        os.close(lock_fd)  # `clean` removed it between our two calls
    raise StartError(
        f"{runtime_path()}/{session}.lock is removed again and again: see who does it"
    )


def _lock(lock_fd: int, session: str) -> None:
    deadline_s = time.monotonic() + _LOCK_WAIT_S
    while not try_lock(lock_fd, exclusive=True):
        if time.monotonic() < deadline_s:
            pause()
            continue
        pid = os.pread(lock_fd, 20, 0).decode(errors="replace").strip()
        raise SessionInUseError(
            f'session "{session}" is already served by process {pid or "unknown"}: '
            f"end it, or choose another name with --session"
        )
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
