"""Removing the names of an engine that died.

Covers: region, owner lock and page of one session, each only if it is dead.
Does not cover: opening and locking names (``wire.names``).
Who calls it: ``loop.Supervisor``, when an engine's death is proven; never waits.
"""

from __future__ import annotations

from shmoffload.wire.names import (
    Keep,
    keep_of,
    page_name,
    region_name,
    sweep,
    try_lock,
    unlink_same,
)


def remove_engine_names(session: str, region_fd: int) -> None:
    """Unlink the dead engine's owner lock, and its region unless that is kept.

    The region goes even while processes of the dead server still map it: it is owned
    by the dead, so nobody can join it, and the lock on ``region_fd`` keeps it from
    being cleared for reuse until the name is gone.
    """
    if keep_of(region_fd) is Keep.NOBODY:
        unlink_same(region_name(session), region_fd)
    sweep(session)  # the owner lock; nobody holds it, unless a successor is here


def remove_page(session: str, page_fd: int) -> bool:
    """Unlink the page if nobody else holds it; our own lock is lost either way.

    An engine that is restarted within milliseconds joins the page of the one
    before: then the name must stay.
    """
    return try_lock(page_fd, exclusive=True) and unlink_same(
        page_name(session), page_fd
    )
