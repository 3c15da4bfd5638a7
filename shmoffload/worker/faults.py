"""What the system said when it refused a block, told apart.

Covers: from an exception to a ``Fault``.
Does not cover: counting (``executor``), sentences for people (``cli.status``).
Who calls it: ``tier`` and ``executor``; any thread.

"No space", "broken disk" and "no rights" want three different persons; one counter
of errors calls none of them.
"""

from __future__ import annotations

import errno
import sqlite3
from typing import Final

from shmoffload.errors import TierError
from shmoffload.wire.session import Fault

_BY_ERRNO: Final = {
    errno.ENOSPC: Fault.NO_SPACE,
    errno.EDQUOT: Fault.NO_SPACE,
    errno.EIO: Fault.IO,
    errno.EMFILE: Fault.NO_FILES,
    errno.ENFILE: Fault.NO_FILES,
    errno.EACCES: Fault.NO_ACCESS,
    errno.EPERM: Fault.NO_ACCESS,
    errno.EROFS: Fault.READ_ONLY,
}
_BY_SQLITE: Final = {
    sqlite3.SQLITE_FULL: Fault.NO_SPACE,
    sqlite3.SQLITE_IOERR: Fault.IO,
    sqlite3.SQLITE_PERM: Fault.NO_ACCESS,
    sqlite3.SQLITE_READONLY: Fault.READ_ONLY,
}
_MAX_CAUSES: Final = 8


class NoSpaceError(TierError):
    """There is space, but not for this tier: its floor of free space is reached."""


class StorageGoneError(TierError):
    """The tier's directory was removed behind its back; only a new start helps."""


def fault_of(error: BaseException) -> Fault:
    """Return why the system refused, from the error or what caused it."""
    cause: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if cause is None:
            break
        fault = _fault_of(cause)
        if fault is not Fault.OTHER:
            return fault
        cause = cause.__cause__
    return Fault.OTHER


def _fault_of(error: BaseException) -> Fault:
    if isinstance(error, NoSpaceError):
        return Fault.NO_SPACE
    if isinstance(error, OSError):
        return _BY_ERRNO.get(error.errno or 0, Fault.OTHER)
    if isinstance(error, sqlite3.Error):
        # The low byte is the kind, the rest says in which call.
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        return _BY_SQLITE.get(code, Fault.OTHER)
    return Fault.OTHER
