"""The slab's index on disk: which key lies in which slab slot.

Covers: four calls (``load_all``, ``commit``, ``save_order``, ``close``) over SQLite
in WAL mode; what a damaged or foreign file leads to.
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
from typing import TYPE_CHECKING, Final

from shmoffload.core.types import GROUP_BYTES, MAX_KEY_BYTES
from shmoffload.wire.layout import LAYOUT_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shmoffload.worker.tiers.place import Place

INDEX_NAME: Final = "index.sqlite"
_FILES: Final = (INDEX_NAME, f"{INDEX_NAME}-wal", f"{INDEX_NAME}-shm")
_SCHEMA: Final = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE blocks (slot INTEGER PRIMARY KEY, key BLOB NOT NULL, seq INTEGER);
"""


class IndexDamagedError(Exception):
    """The index cannot be read or belongs to another layout; nothing is lost yet."""


class SlabIndex:
    """Rows (key, slab slot) that outlive the worker."""

    def __init__(self, place: Place, *, stride: int, namespace: bytes) -> None:
        """Open the index, or make an empty one.

        Raises:
            IndexDamagedError: garbage, or of another layout; ``discard`` it.
            OSError: the system refused.
        """
        # SQLite would create it 0644 and follow a symlink.
        os.close(place.open_file(INDEX_NAME, os.O_RDWR | os.O_CREAT))
        self._lock = threading.Lock()
        self._seq = 0
        self._db = sqlite3.connect(
            f"{place.path}/{INDEX_NAME}",
            timeout=5.0,
            isolation_level=None,
            check_same_thread=False,
        )
        meta: dict[str, int | bytes] = {
            "layout": LAYOUT_VERSION,
            "stride": stride,
            "namespace": namespace,
        }
        try:
            self._open(meta)
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise IndexDamagedError(str(error)) from error
        except IndexDamagedError:
            self._db.close()
            raise

    def _open(self, meta: dict[str, int | bytes]) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=OFF")
        if not self._db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone():
            with self._transaction():
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    self._db.execute(statement)
                self._db.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        elif dict(self._db.execute("SELECT name, value FROM meta")) != meta:
            raise IndexDamagedError("it was made for another layout")

    def load_all(self, num_slots: int) -> list[tuple[bytes, int]]:
        """Return all rows as (key, slot), least recently used first.

        Raises:
            IndexDamagedError: unreadable, or a row that we cannot have written.
        """
        try:
            rows = self._db.execute("SELECT key, slot, seq FROM blocks").fetchall()
        except sqlite3.DatabaseError as error:
            raise IndexDamagedError(str(error)) from error
        for key, slot, seq in rows:
            if not (
                isinstance(key, bytes)
                and GROUP_BYTES < len(key) <= MAX_KEY_BYTES
                and isinstance(seq, int)
                and 0 <= slot < num_slots
            ):
                raise IndexDamagedError(f"row {slot} is none of ours")
        rows.sort(key=lambda row: row[2])
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
            first = self._seq + 1
            self._db.executemany(
                "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?)",
                ((slot, key, first + i) for i, (key, slot) in enumerate(added)),
            )
            self._seq += len(added)

    def drop_beyond(self, num_slots: int) -> None:
        """Forget all slots from ``num_slots`` on, before the slab shrinks."""
        with self._lock, self._transaction():
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


def discard(place: Place) -> None:
    """Remove a damaged index, with its side files."""
    for name in _FILES:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=place.dir_fd)
