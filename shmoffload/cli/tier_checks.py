"""What ``doctor`` looks at below a tier's path, and its key file.

Covers: directory, owner, mode, free space for the bound, O_DIRECT, who serves it; a
key that can be used.
Does not cover: the blocks (``verify``), the rest of the machine (``cli.checks``).
Who calls it: ``cli.doctor``. Each path, and each key file, is looked at by a thread
of its own, since a hung mount never answers; it is waited for ``TIMEOUT_S``. Leaves no
name anywhere.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from shmoffload.cli.checks import Check
from shmoffload.errors import BadInputError, TierConfigError
from shmoffload.wire.sizes import format_size, parse_size
from shmoffload.worker.namespaces import folders
from shmoffload.worker.registry import needs_path
from shmoffload.worker.tiers.place import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmoffload.wire.config import Config, TierConfig

TIMEOUT_S: Final = 5.0


class Wanted(NamedTuple):
    """A path, and what a configuration wants of it."""

    name: str
    path: str
    need_bytes: int = 0
    """That have to be free now: the slab that is not there yet, and ``min_free``."""


def wanted_of(config: Config) -> list[Wanted]:
    """Return the paths of a configuration, relative ones from here."""
    return [
        Wanted(tier.name, tier.path, _need(config, tier))
        for tier in config.tier
        if tier.path and needs_path(tier.type)
    ]


def _need(config: Config, tier: TierConfig) -> int:
    """Bytes that a start needs; ``fs`` grows later and stops at ``min_free``."""
    need = parse_size(tier.min_free, key="min_free") + config.stride
    if tier.type == "slab" and tier.max_bytes is not None:
        need += parse_size(tier.max_bytes, key="max_bytes") - config.stride
    return need


def check_keys(config: Config) -> list[Check]:
    """Look at the key file of every tier that has one, as its worker will.

    Waits for ``TIMEOUT_S`` a file at most.
    """
    checks: list[Check] = []
    for tier in config.tier:
        if tier.key_file is not None:
            title = f"tier {tier.name}: key_file = {shown(tier.key_file)}"
            look = partial(_look_at_key, tier, tier.key_file, config.namespace_digest)
            checks += _in_time(tier.name, title, look)
    return checks


def _look_at_key(tier: TierConfig, path: str, namespace: bytes) -> list[Check]:
    # Here and not above: a library that only a key needs.
    from shmoffload.worker.crypt import Cipher, read_key

    try:
        cipher = Cipher(read_key(path), namespace)
    except TierConfigError as error:
        fact, _, fix = str(error).partition(": ")
        return [Check(tier.name, f"Tier {tier.name}: {fact}", fix)]
    except OSError as error:
        fact = f"Tier {tier.name}: its key file cannot be read ({error.strerror})"
        return [Check(tier.name, fact, "mend its disk (see dmesg)")]
    key = f"key {cipher.fingerprint} of {shown(path)}"
    return [Check(tier.name, f"tier {tier.name}: {key} can be used")]


def check_paths(wanted: list[Wanted]) -> list[Check]:
    """Look at every path; waits for ``TIMEOUT_S`` a path at most."""
    checks: list[Check] = []
    taken: dict[int, int] = {}  # device -> bytes that tiers before have asked for
    for one in wanted:
        checks += _in_time(one.name, _title(one), partial(_look, one, taken))
    return checks


def _in_time(name: str, title: str, look: Callable[[], list[Check]]) -> list[Check]:
    """Return what a look finds, or that it does not end."""
    found: list[Check] = []
    thread = threading.Thread(
        target=lambda: found.extend(look()), name="doctor", daemon=True
    )
    thread.start()
    thread.join(TIMEOUT_S)
    if thread.is_alive():
        fact = f"{title} does not answer within {TIMEOUT_S:g} s"
        return [Check(name, fact, "mend its mount (see `mount`, dmesg)")]
    return found


def _title(one: Wanted) -> str:
    return f"tier {one.name}: {shown(one.path)}"


def _look(one: Wanted, taken: dict[int, int]) -> list[Check]:
    try:
        return _judge(one, taken)
    except OSError as error:
        fact = f"{_title(one)} cannot be looked at ({error.strerror})"
        return [Check(one.name, fact, "let this user read and write it")]


def _judge(one: Wanted, taken: dict[int, int]) -> list[Check]:
    path = os.path.abspath(one.path)
    there = path
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    title = _title(one)
    if not os.path.isdir(there):
        fact = f"{title}: {shown(there)} is no directory"
        return [Check(one.name, fact, "remove it, or give the tier another path")]
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        fix = "give the tier a directory of this user"
        if there != path:
            fix = f"mkdir -p {path} && chown {os.geteuid()} {path}, as root"
        return [Check(one.name, f"{title}: this user may not write {there}", fix)]
    status, stats = os.stat(there), os.statvfs(there)
    if stats.f_flag & os.ST_RDONLY:
        fix = "mount it read-write, or give the tier another path"
        return [Check(one.name, f"{title} is on a read-only file system", fix)]
    open_to_all = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
    checks = []
    if there == path and open_to_all:
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        fact = f"{title} has mode {mode}: others may replace what is in it"
        checks.append(Check(one.name, fact, f"chmod 700 {path}"))
    served, present = _namespaces(path) if there == path else ([], 0)
    checks += _foreign(one, path) if there == path else []
    checks.append(_space(one, stats, status.st_dev, present, taken))
    words = ", ".join(served) if served else "nobody serves it"
    made = "" if there == path else ", it will be made"
    checks.append(Check(one.name, f"{title}{made}: {_direct_io(there)}, {words}"))
    return checks


def _namespaces(path: str) -> tuple[list[str], int]:
    """Return who serves the path now, and the bytes of slabs in it."""
    served, present = [], 0
    try:
        with folders(path) as opened:
            for folder in opened:
                if folder.is_served():
                    served.append(f"served by process {folder.holder()}")
                present = max(present, folder.allocated_bytes("slab.bin"))
    except BadInputError:
        pass  # it went while we looked
    return served, present


def _foreign(one: Wanted, path: str) -> list[Check]:
    """Refuse what another user has planted under a namespace's name."""
    checks = []
    with os.scandir(path) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if len(entry.name) == 32 and not is_ours:
                fact = f"{_title(one)}: {entry.name} is no directory of this user"
                fix = f"remove {shown(entry.path)}, or give the tier its own path"
                checks.append(Check(one.name, fact, fix))
    return checks


def _space(
    one: Wanted,
    stats: os.statvfs_result,
    device: int,
    present: int,
    taken: dict[int, int],
) -> Check:
    """Compare free bytes with what this and the tiers before it need."""
    free = stats.f_bavail * stats.f_frsize
    need = max(0, one.need_bytes - present)
    before = taken.get(device, 0)
    taken[device] = before + need
    fact = f"{_title(one)}: {format_size(free)} free"
    if stats.f_files and not stats.f_favail:
        return Check(one.name, f"{_title(one)} takes no further file", "remove some")
    if free < before + need:
        fact += f", {format_size(before + need)} are needed"
        fact += " by the tiers on this disk" if before else ""
        return Check(one.name, fact, "lower max_bytes or min_free, or free some space")
    if not free:
        return Check(one.name, fact, "free some space")
    return Check(one.name, fact)


def _direct_io(directory: str) -> str:
    """Try O_DIRECT on a file without a name."""
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    try:
        fd = os.open(directory, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return "no O_DIRECT here, buffered I/O instead"
        return f"O_DIRECT was not tried ({error.strerror})"
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            os.pwrite(fd, page, 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return "no O_DIRECT here, buffered I/O instead"
        return f"O_DIRECT was not tried ({error.strerror})"
    finally:
        os.close(fd)
    return "O_DIRECT works"
