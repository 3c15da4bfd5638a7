"""Create or join the primary region: whoever needs it first makes it.

Covers: the region's header, the race for it, who is refused and why.
Does not cover: what is done with it (``wire.region``).
Who calls it: ``wire.region``, at start, in the engine and in workers of the
inference server. Blocks, bounded.

The same for everybody (25 races of four: always one region):

- LOCK_EX had -> nobody maps it: clear its slot table and its words of copies or
  build it, phase FRESH, then join like the others. Magic is written last, so that
  a file without it is that of a creator who died midway, and is built anew.
  The table of a region that outlives engines stays, for the owner to come adopts
  what is in it, unless its sequence number is odd: a reset was cut.
- else LOCK_SH had, magic, FRESH, the same geometry -> joined.
- OWNED and the owner lock held -> in use.
- OWNED by a dead engine whose workers still live -> wait for them; past the
  deadline unlink the name and build another.

LOCK_EX, not the owner lock, is the proof that no old writer is left (with an
owner lock alone a live worker overwrote a reused slot).
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from shmoffload.errors import RegionMismatchError, SessionInUseError, StartError
from shmoffload.wire import layout, names, room

# magic, layout version, stride, slots, block bytes, phase, namespace, identity
_HEADER: Final = struct.Struct("<QQQQQQ16s16s")
_MAGIC: Final = int.from_bytes(b"SHMOREGN", "little")
PHASE_WORD: Final = 5
FRESH: Final = 1
OWNED: Final = 2
PROBE_S: Final = 0.5
"""For so long a lock in the way may be somebody who only looks."""
_CREATE_S_PER_GIB: Final = 0.5
_OWNER_PATIENCE_S: Final = 3.0
"""So long a dead engine's GPU workers get to go; then the region loses its name."""


class Geometry(NamedTuple):
    """What the header says; equal geometries may share a region."""

    num_slots: int
    block_bytes: int
    namespace: bytes

    def __str__(self) -> str:
        """Phrase it for a person; the namespace as its digest."""
        return (
            f"{self.num_slots} blocks of {self.block_bytes} bytes, namespace "
            f"{self.namespace.hex()[:8]}"
        )

    @property
    def stride(self) -> int:
        """Bytes of a slot."""
        return layout.stride_of(self.block_bytes)

    @property
    def slots_offset(self) -> int:
        """Where slot 0 begins in the file."""
        table = self.num_slots * layout.SLOT_RECORD_BYTES
        return layout.PAGE_BYTES + layout.round_up_to_page(table)

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self.slots_offset + self.num_slots * self.stride

    def pack(self) -> bytes:
        """Return the header without magic, phase FRESH."""
        fields = (layout.LAYOUT_VERSION, self.stride, self.num_slots, self.block_bytes)
        identity = xxhash.xxh3_128_digest(repr((fields, self.namespace)).encode())
        return _HEADER.pack(0, *fields, FRESH, self.namespace, identity)

    @classmethod
    def read(cls, fd: int) -> Geometry | None:
        """Return what a finished header says; None if there is none that holds."""
        raw = os.pread(fd, _HEADER.size, 0)
        if len(raw) < _HEADER.size:
            return None
        magic, _, _, num_slots, block_bytes, phase, namespace, _ = _HEADER.unpack(raw)
        found = cls(num_slots, block_bytes, namespace)
        if magic != _MAGIC or phase not in (FRESH, OWNED) or num_slots < 1:
            return None
        size = os.fstat(fd).st_size
        if max(num_slots, block_bytes) > size:  # damage, and too large to pack
            return None
        same = found.pack()
        if raw[8:40] != same[8:40] or raw[48:] != same[48:]:  # all but magic, phase
            return None
        return found if size == found.file_bytes else None


class Joining:
    """One attempt to get the session's region."""

    def __init__(self, session: str, want: Geometry, timeout_s: float) -> None:
        self._session = session
        self._name = names.region_name(session)
        self._want = want
        create_s = want.file_bytes / 2**30 * _CREATE_S_PER_GIB
        self._probed_at = time.monotonic() + PROBE_S
        self._deadline = time.monotonic() + timeout_s + create_s
        self._owner_patience_s = min(timeout_s, _OWNER_PATIENCE_S) + create_s
        self._owner_deadline = time.monotonic() + self._owner_patience_s

    def join(self) -> int:
        """Return a descriptor of the finished region, under LOCK_SH."""
        while True:
            fd = names.open_name(self._name)
            try:
                if self._has_joined(fd):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            names.pause()

    def _has_joined(self, fd: int) -> bool:
        if names.try_lock(fd, exclusive=True):
            if names.is_unlinked(fd):
                return False
            self._build(fd)
            # The change to LOCK_SH loses the lock for an instant in which another
            # may build: go on like one who only joins.
        if not names.try_lock(fd, exclusive=False):
            self._fail_at_deadline()
            return False
        if names.is_unlinked(fd):
            return False
        found = Geometry.read(fd)
        if found is None:
            self._fail_at_deadline()
            return False
        if _phase(fd) == OWNED:
            self._meet_owner(fd)
            return False
        if found != self._want and time.monotonic() > self._probed_at:
            raise RegionMismatchError(
                f'session "{self._session}" is live with {found}, the configuration '
                f"says {self._want}: use one configuration for both, or another "
                f"session.name"
            )
        return found == self._want

    def _build(self, fd: int) -> None:
        """Clear a region that fits, or make one; under LOCK_EX."""
        if Geometry.read(fd) == self._want:
            if names.keep_of(fd) is names.Keep.NOBODY or _is_cut(fd):
                table_bytes = self._want.num_slots * layout.SLOT_RECORD_BYTES
                os.pwrite(fd, bytes(table_bytes), layout.PAGE_BYTES)
                os.pwrite(fd, bytes(8), layout.SEQUENCE_AT)  # last: see ``_is_cut``
            done = layout.COPIES_DONE
            os.pwrite(fd, bytes(done.stop - done.start), done.start)
            os.pwrite(fd, FRESH.to_bytes(8, "little"), PHASE_WORD * 8)
            return
        try:
            os.ftruncate(fd, 0)
            room.allocate(fd, self._want.file_bytes)
        except BaseException:
            names.unlink_same(self._name, fd)
            raise
        os.pwrite(fd, self._want.pack(), 0)
        os.pwrite(fd, _MAGIC.to_bytes(8, "little"), 0)

    def _meet_owner(self, fd: int) -> None:
        if names.is_held(names.owner_name(self._session), exclusively=True):
            if time.monotonic() > self._probed_at:
                raise in_use(self._session)
        elif time.monotonic() > self._owner_deadline:
            names.unlink_same(self._name, fd)
            self._owner_deadline = time.monotonic() + self._owner_patience_s
            self._deadline = max(self._deadline, self._owner_deadline)

    def _fail_at_deadline(self) -> None:
        if time.monotonic() > self._deadline:
            raise StartError(
                f'the region of session "{self._session}" is held by a start that does '
                f"not finish, or by another version: end it, or choose another "
                f"session.name"
            )


def in_use(session: str) -> SessionInUseError:
    """Return the refusal of a session that a live engine owns."""
    pid = ""
    with contextlib.suppress(OSError):
        pid = Path(f"{names.SHM_DIR}{names.owner_name(session)}").read_text()
    who = f"process {pid}" if pid else "another engine"
    return SessionInUseError(
        f'session "{session}" is in use by {who}: end it, or choose another '
        f"session.name"
    )


def _is_cut(fd: int) -> bool:
    return os.pread(fd, 1, layout.SEQUENCE_AT)[0] % 2 == 1


def _phase(fd: int) -> int:
    return int.from_bytes(os.pread(fd, 8, PHASE_WORD * 8), "little")
