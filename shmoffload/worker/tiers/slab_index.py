"""The slab's index on disk: which key lies in which slab slot.

Covers: five calls (``create``, ``load_all``, ``commit``, ``save_order``, ``close``)
over SQLite in WAL mode; what a damaged or foreign file leads to.
Does not cover: recency while running and free slots (``slab_table``).
Who calls it: ``slab``; any thread, one at a time by the lock in here; each call
may wait for the disk.

``synchronous=OFF``: a commit survives SIGKILL of the worker (it is in the page
cache) but perhaps not a power cut; then checksums turn lost blocks into misses.
Measured: 12 us a row in batches of 64, where a 1 MiB block costs 250-800 us. The
row's number is the slab slot; there is no second index to keep or to get damaged.
Order of use is the column ``seq``, in order of storing, rewritten by an orderly
``close`` only.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from operator import itemgetter
from typing import TYPE_CHECKING, Final

from shmoffload.core.types import GROUP_BYTES, MAX_KEY_BYTES
from shmoffload.errors import TierConfigError, TierError
from shmoffload.wire.layout import LAYOUT_VERSION
from shmoffload.worker.tiers.place import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shmoffload.worker.tiers.place import Place

INDEX_NAME: Final = "index.sqlite"
_SIDE_FILES: Final = tuple(f"{INDEX_NAME}-{end}" for end in ("wal", "shm", "journal"))
_TABLES: Final = {("table", "meta"), ("table", "blocks")}
_SCHEMA: Final = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE blocks (slot INTEGER PRIMARY KEY, key BLOB NOT NULL, seq INTEGER);
"""
_MAX_SEQ: Final = 1 << 62
_MAX_PATH_BYTES: Final = 504
"""Measured (SQLite 3.40): 512 without the longest of its endings."""
_MAY_PASS: Final = frozenset(
    {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL}
)
_HOPELESS: Final = frozenset(
    {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM}
)


class IndexDamagedError(Exception):
    """The index cannot be read or belongs to another layout; nothing is lost yet."""


class SlabIndex:
    """Rows (key, slab slot) that outlive the worker."""

    def __init__(self, place: Place, *, stride: int, namespace: bytes) -> None:
        """Open the index; ``is_new`` says that it is empty: ``create`` it.

        Raises:
            IndexDamagedError: garbage, or of another layout; ``discard`` it.
            TierConfigError: it can be used by no start.
            TierError: locked, or no room; may work later.
            OSError: the system refused.
        """
        # SQLite would create it 0644 and follow symlinks.
        os.close(place.open_file(INDEX_NAME, os.O_RDWR | os.O_CREAT))
        for name in _SIDE_FILES:
            place.require_plain(name)
        self._path = f"{place.path}/{INDEX_NAME}"
        self._lock = threading.Lock()
        self._seq = 0
        self._meta: dict[str, int | bytes] = {
            "layout": LAYOUT_VERSION,
            "stride": stride,
            "namespace": namespace,
        }
        with self._sentences():
            self._db = sqlite3.connect(
                self._path, timeout=5.0, isolation_level=None, check_same_thread=False
            )
        try:
            with self._sentences():
                self.is_new = self._open()
        except BaseException:
            self._db.close()
            raise

    def _open(self) -> bool:
        """Say whether nothing has been made yet; refuse what we did not make."""
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=OFF")
        objects = set(self._db.execute("SELECT type, name FROM sqlite_master"))
        if not objects:
            return True
        if objects != _TABLES:
            raise IndexDamagedError("it has not the tables that we made")
        if dict(self._db.execute("SELECT name, value FROM meta")) != self._meta:
            raise IndexDamagedError("it was made for another layout")
        return False

    @contextlib.contextmanager
    def _sentences(self) -> Iterator[None]:
        """Tell damage from a system that refuses: that costs no row.

        Raises:
            IndexDamagedError: SQLite cannot make sense of the file.
            TierConfigError: SQLite will never open it.
            TierError: may work later.
        """
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            words = f"{shown(self._path)} cannot be used ({error})"
            if code in _HOPELESS and len(os.fsencode(self._path)) > _MAX_PATH_BYTES:
                raise TierConfigError(
                    f"{words}: SQLite takes at most {_MAX_PATH_BYTES} bytes of path, "
                    f"give the tier a shorter one"
                ) from error
            if code in _HOPELESS:
                raise TierConfigError(
                    f"{words}: let this user read and write it, or give the tier "
                    f"another path"
                ) from error
            if code in _MAY_PASS:
                raise TierError(words) from error
            raise IndexDamagedError(str(error)) from error

    def create(self, rows: Sequence[tuple[bytes, int]]) -> None:
        """Make the tables with the rows (key, slot), least recently used first.

        All or nothing: who dies in between leaves an index that ``is_new``, and not
        one that says the slab is empty.

        Raises:
            TierConfigError: it can be made by no start.
            TierError: it cannot be made now.
        """
        try:
            with self._sentences(), self._lock, self._transaction():
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    self._db.execute(statement)
                self._db.executemany(
                    "INSERT INTO meta VALUES (?, ?)", self._meta.items()
                )
                self._insert(rows)
        except IndexDamagedError as error:  # an index that was only now made
            raise TierError(f"{shown(self._path)} cannot be made ({error})") from error
        self.is_new = False

    def load_all(self, num_slots: int) -> list[tuple[bytes, int]]:
        """Return all rows as (key, slot), least recently used first.

        Raises:
            IndexDamagedError: unreadable, or a row that we cannot have written.
            TierError: not readable now.
        """
        with self._sentences():
            rows = self._db.execute("SELECT key, slot, seq FROM blocks").fetchall()
        if not _are_ours(rows, num_slots):
            raise IndexDamagedError("it has rows that are none of ours")
        rows.sort(key=itemgetter(2))
        self._seq = rows[-1][2] if rows else 0
        return [(key, slot) for key, slot, _ in rows]

    def commit(
        self, added: Sequence[tuple[bytes, int]] = (), removed: Sequence[int] = ()
    ) -> None:
        """Forget the slots ``removed``, then record ``added``, all or nothing.

        Raises:
            sqlite3.Error: nothing was changed.
        """
        with self._lock, self._transaction():
            if removed:
                self._db.executemany(
                    "DELETE FROM blocks WHERE slot = ?", ((slot,) for slot in removed)
                )
            self._insert(added)

    def _insert(self, added: Sequence[tuple[bytes, int]]) -> None:
        first = self._seq + 1
        self._db.executemany(
            "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?)",
            ((slot, key, first + i) for i, (key, slot) in enumerate(added)),
        )
        self._seq += len(added)

    def drop_beyond(self, num_slots: int) -> None:
        """Forget all slots from ``num_slots`` on, which the slab has no more.

        Raises:
            IndexDamagedError: it cannot be written.
            TierError: not now.
        """
        with self._sentences(), self._lock, self._transaction():
            self._db.execute("DELETE FROM blocks WHERE slot >= ?", (num_slots,))

    def save_order(self, slots: Iterable[int]) -> None:
        """Record the order of use, least recent first; for ``close``."""
        with self._lock, self._transaction():
            self._db.executemany(
                "UPDATE blocks SET seq = ? WHERE slot = ?",
                ((seq, slot) for seq, slot in enumerate(slots, start=1)),
            )

    def close(self) -> None:
        """Close the file. Twice is fine."""
        with self._lock:
            self._db.close()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise


def _are_ours(rows: list[tuple[bytes, int, int]], num_slots: int) -> bool:
    """Say whether we can have written all rows.

    Column by column: a million rows take 0.2 s so, and 0.5 s row by row.
    """
    if not rows:
        return True
    keys, slots, seqs = zip(*rows, strict=True)
    return (
        set(map(type, keys)) == {bytes}
        and set(map(type, seqs)) == {int}
        and min(map(len, keys)) > GROUP_BYTES
        and max(map(len, keys)) <= MAX_KEY_BYTES
        and min(seqs) > 0
        and max(seqs) < _MAX_SEQ
        and min(slots) >= 0
        and max(slots) < num_slots
    )


def discard(place: Place) -> None:
    """Remove a damaged index, with its side files.

    Raises:
        TierConfigError: one of them is a directory, or may not be removed.
        OSError: the system refused.
    """
    for name in (INDEX_NAME, *_SIDE_FILES):
        place.remove(name)
