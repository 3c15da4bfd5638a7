"""What ``doctor`` looks at on this machine, apart from tiers' paths.

Covers: shared memory, limits, kernel, runtime directory, leftovers, live sessions.
Does not cover: paths of tiers (``cli.tier_checks``), options and output
(``cli.doctor``).
Who calls it: ``cli.doctor``; the main thread. Leaves no name anywhere: what has to be
tried is tried on a file without one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import resource
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from shmoffload.cli.leftovers import (
    KEPT,
    connects,
    in_runtime_dir,
    in_shared_memory,
    served_sessions,
)
from shmoffload.errors import NoSessionError, ShmoffloadError
from shmoffload.supervisor.peer import SO_PEERPIDFD
from shmoffload.supervisor.runtime_dir import (
    open_runtime_dir,
    runtime_path,
    socket_path,
)
from shmoffload.wire import room
from shmoffload.wire.names import SHM_DIR, live_sessions
from shmoffload.wire.session import PAGE_VERSION, SessionPage, Word
from shmoffload.wire.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

MIN_FILES: Final = 256
MIN_PROCESSES: Final = 128
MIN_FILE_BYTES: Final = 1 << 30
DOCKER_SHM_BYTES: Final = 64 << 20
"""What Docker gives a container that is not told otherwise: too little for any."""
SILENT_S: Final = 5.0


class Check(NamedTuple):
    """One line: a fact, and what to type if it is not as it has to be."""

    name: str
    fact: str
    fix: str = ""

    @property
    def ok(self) -> bool:
        """Nothing has to be done."""
        return not self.fix

    def __str__(self) -> str:
        """Phrase it for a person; one line, whatever a path is made of."""
        text = f"ok {self.fact}" if self.ok else f"FAIL: {self.fact}. Fix: {self.fix}"
        return text if text.isprintable() else ascii(text)[1:-1]


def shared_memory(need_bytes: int | None) -> Iterator[Check]:
    """Is there room for a region; ``need_bytes`` if its size is known."""
    name = "shared memory"
    try:
        stats = os.statvfs(SHM_DIR)
    except OSError as error:
        make = f"mkdir -p {SHM_DIR} && mount -t tmpfs tmpfs {SHM_DIR}, as root"
        yield Check(name, f"{SHM_DIR} is not there ({error.strerror})", make)
        return
    if stats.f_flag & os.ST_RDONLY:
        fix = f"mount -o remount,rw {SHM_DIR}, as root"
        yield Check(name, f"{SHM_DIR} is mounted read-only", fix)
        return
    if not os.access(SHM_DIR, os.W_OK | os.X_OK):
        fact = f"This user may make no file in {SHM_DIR}"
        yield Check(name, fact, f"chmod 1777 {SHM_DIR}, as root")
        return
    if stats.f_files and stats.f_favail < 8:
        fix = f"mount -o remount,nr_inodes=1M {SHM_DIR}, as root"
        yield Check(name, f"{SHM_DIR} takes no further file", fix)
    total = stats.f_blocks * stats.f_frsize
    free = stats.f_bavail * stats.f_frsize
    fact = f"{SHM_DIR} has {format_size(free)} free of {format_size(total)}"
    if not total:
        yield Check(name, f"{SHM_DIR} has no limit of its own")
    elif need_bytes is not None and free < need_bytes:
        fact += f", the primary region takes {format_size(need_bytes)}"
        fix = f"{room.way_out(need_bytes)}, or lower primary.slots or primary.bytes"
        yield Check(name, fact, fix)
    elif need_bytes is None and free <= DOCKER_SHM_BYTES:
        yield Check(name, f"{fact}: too little for a region", room.way_out(1 << 30))
    else:
        yield Check(name, fact)


def cgroup(need_bytes: int) -> Iterator[Check]:
    """Does the memory limit of this container leave room for the region."""
    headroom = room.cgroup_headroom()
    if headroom is None:
        yield Check("cgroup", "no memory limit is set for this container")
        return
    fact = f"the memory limit leaves {format_size(headroom)}"
    if headroom < need_bytes:
        fact = f"{fact[0].upper()}{fact[1:]}, the region takes "
        fact += format_size(need_bytes)
        fix = "raise the memory limit of the container, or lower primary.slots"
        yield Check("cgroup", fact, fix)
    else:
        yield Check("cgroup", fact)


def limits(need_file_bytes: int | None) -> Iterator[Check]:
    """Limits of this user's processes; the server has to be started under the same."""
    for name, kind, flag, least in (
        ("open files", resource.RLIMIT_NOFILE, "-n", MIN_FILES),
        ("processes", resource.RLIMIT_NPROC, "-u", MIN_PROCESSES),
    ):
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY and soft < least:
            fact = f"This user may have {soft} {name}, {least} are needed"
            yield Check(name, fact, f"ulimit {flag} {least * 16}, before the start")
        else:
            yield Check(name, f"{name}: {_limit(soft)} allowed")
    least = MIN_FILE_BYTES if need_file_bytes is None else need_file_bytes
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if soft != resource.RLIM_INFINITY and soft < least:
        fact = f"A file may have {format_size(soft)}, {format_size(least)} are needed"
        yield Check("file size", fact, "ulimit -f unlimited, before the start")
    else:
        size = _limit(soft) if soft == resource.RLIM_INFINITY else format_size(soft)
        yield Check("file size", f"file size: {size} allowed")
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    size = _limit(soft) if soft == resource.RLIM_INFINITY else format_size(soft)
    yield Check("locked memory", f"locked memory: {size} allowed; ours locks none")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def kernel() -> Iterator[Check]:
    """Features that we build on, and those that only help."""
    release = platform.release()
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        fact = f"Linux {release} gives no pidfd ({error.strerror}): no death is proven"
        fix = "run Linux 5.3 or newer, and let seccomp allow pidfd_open"
        yield Check("pidfd", fact, fix)
    else:
        yield Check("pidfd", f"pidfd works, {_peer_pidfd()}")
    try:
        populates = _populates()
    except OSError as error:
        fact = f"{SHM_DIR} gives no memory ({error.strerror})"
        yield Check("populate", fact, f"see `df {SHM_DIR}` and `mount | grep shm`")
    else:
        yield Check(
            "populate",
            "MADV_POPULATE_WRITE works"
            if populates
            else "no MADV_POPULATE_WRITE (Linux 5.14): the start reads every page",
        )
    if Path("/proc/self/autogroup").exists():
        can = "can" if os.access("/proc/self/autogroup", os.W_OK) else "cannot"
        yield Check("autogroup", f"autogroup is there, its niceness {can} be set")
    else:
        yield Check("autogroup", "no autogroup: niceness of workers works as it is")
    if os.access("/bin/sh", os.X_OK):
        yield Check("shell", "/bin/sh is there, to start supervisors")
    else:
        fix = "install a shell (the package dash or busybox)"
        yield Check("shell", "There is no /bin/sh: no supervisor can be started", fix)


def _peer_pidfd() -> str:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        try:
            os.close(left.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
        except OSError:
            return "not of a socket's peer (Linux 6.5): it is opened by its pid"
    return "also of a socket's peer"


def _populates() -> bool:
    fd = os.open(SHM_DIR, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, mmap.PAGESIZE)
        with mmap.mmap(fd, mmap.PAGESIZE) as mapping:
            return room.can_populate(mapping)
    finally:
        os.close(fd)


def runtime_directory() -> Check:
    """Can daemon and engine meet."""
    name, path = "runtime directory", runtime_path()
    try:
        fd = open_runtime_dir(create=False)
    except ShmoffloadError as error:
        return Check(name, str(error).partition(": ")[0], _runtime_fix(path))
    if fd is not None:
        os.close(fd)
        return Check(name, f"{path} is ours, mode 0700")
    if path.parent.is_dir() and not os.access(path.parent, os.W_OK | os.X_OK):
        fix = "set SHMOFFLOAD_RUNTIME_DIR to a directory of your own"
        return Check(name, f"{path} cannot be made by this user", fix)
    return Check(name, f"{path} is not there yet, a daemon makes it")


def _runtime_fix(path: Path) -> str:
    if path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.geteuid():
        return f"chmod 700 {path}"
    return f"remove {path}, or set SHMOFFLOAD_RUNTIME_DIR to a directory of your own"


def leftovers(session: str | None) -> Check:
    """What dead sessions have left, of all or of one."""
    found = [piece for piece in in_shared_memory(session) if piece.kind != KEPT]
    with contextlib.suppress(ShmoffloadError):  # another line says so
        found += in_runtime_dir(session)
    if not found:
        return Check("leftovers", "nothing is left of dead sessions")
    size = format_size(sum(piece.num_bytes for piece in found))
    names = "1 name" if len(found) == 1 else f"{len(found)} names"
    fact = f"Dead sessions have left {names}, {size}"
    option = f" --session {session}" if session else ""
    return Check("leftovers", fact, f"shmoffload clean{option} --yes")


def sessions(session: str | None) -> Iterator[Check]:
    """Do live sessions' supervisors answer, and daemons listen."""
    try:
        served = [s for s in served_sessions() if session in (None, s)]
    except ShmoffloadError:
        served = []  # another line says so
    live = [s for s in live_sessions() if session in (None, s)]
    for name in live:
        check = _heartbeat(name)
        if check is not None:
            yield check
    for name in served:
        pid = _daemon_pid(name)
        if _listens(name):
            yield Check("daemon", f"the daemon of session {name} ({pid}) listens")
        else:
            fact = f"The daemon of session {name} ({pid}) does not listen"
            yield Check("daemon", fact, "end that process, start the daemon again")
    if not served:
        yield Check("daemon", "no daemon runs: an engine starts its own supervisor")


def _heartbeat(session: str) -> Check | None:
    try:
        page = SessionPage.look(session)
    except (NoSessionError, OSError, ValueError):
        return None  # it ended, or is only now being made
    try:
        if page.get(Word.VERSION) != PAGE_VERSION:
            fact = f"session {session} runs another version of shmoffload"
            return Check("session", fact)
        beat_ns = page.get(Word.SUPERVISOR_HEARTBEAT_NS)
        pid = page.get(Word.SUPERVISOR_PID)
    finally:
        page.close()
    if not beat_ns:
        return Check("session", f"session {session} is live, no supervisor yet")
    silent_s = (time.monotonic_ns() - beat_ns) / 1e9
    if silent_s < SILENT_S:
        return Check("session", f"the supervisor of session {session} ({pid}) answers")
    fact = f"The supervisor of session {session} ({pid}) is silent for {silent_s:.0f} s"
    return Check("session", fact, f"kill -9 {pid}; its engine reaches the next one")


def _listens(session: str) -> bool:
    dir_fd = open_runtime_dir(create=False)
    if dir_fd is None:
        return False
    try:
        return connects(dir_fd, session)
    finally:
        os.close(dir_fd)


def _daemon_pid(session: str) -> str:
    pid = "unknown"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        pid = socket_path(session).with_suffix(".lock").read_text().strip()
    return f"process {pid}"
