"""The primary region: slots that the GPU copies to and tier workers work in.

Covers: mapping, ownership, the slot table, views of slots, words of GPU copies.
Does not cover: create or join (``wire.region_join``), what a next engine takes over
(``wire.adopt``), which block is in which slot (the core decides), block headers
(``wire.layout``), populating (``wire.room``).
Who calls it: the engine's process makes and owns it; tier workers map it from an
inherited descriptor; GPU workers open it too. One thread writes the slot table: the
scheduler's. A rank's words of copies are written by that rank's GPU worker.

File: ``[header page][slot table, 64 bytes a slot, page-rounded][slots]``, a slot is
``[payload, page-rounded][header page]``. The second half of the region's header page
has the words of copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import time
from typing import TYPE_CHECKING, Final

from shmoffload.core.types import SlotState
from shmoffload.errors import SessionInUseError, ShmoffloadError, StartError
from shmoffload.wire import layout, names, room
from shmoffload.wire.region_join import (
    FRESH,
    OWNED,
    PHASE_WORD,
    PROBE_S,
    Geometry,
    Joining,
    in_use,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmoffload.core.types import OffloadKey
    from shmoffload.wire.config import Config

MAX_RANKS: Final = layout.MAX_RANKS
_KINDS: Final = layout.NUM_COPY_KINDS
_RECORD_WORDS: Final = layout.SLOT_RECORD_BYTES // 8
_WRITE_KEY: Final = struct.Struct("<IHH40s").pack_into
_PENDING: Final = int(SlotState.PENDING)  # a plain int: IntEnum costs 0.1 us here
_READY: Final = int(SlotState.READY)
_KEEP_WORD: Final = layout.KEEP_AT // 8
_SEQUENCE_WORD: Final = layout.SEQUENCE_AT // 8


class PrimaryRegion:
    """A mapped, populated primary region.

    Attributes:
        fd: its descriptor, for hand-over; carries LOCK_SH.
        num_slots: slots, indexed from 0.
        stride: bytes of a slot.
        block_bytes: payload bytes of a slot.
        namespace: 16-byte digest that its block headers carry.
    """

    def __init__(self, fd: int, geometry: Geometry, session: str) -> None:
        """Map ``fd`` and take it over; use ``open`` or ``from_fd`` instead."""
        self.fd = fd
        self.num_slots, self.block_bytes, self.namespace = geometry
        self.stride = geometry.stride
        self._session = session
        self._owner_fd = -1
        try:
            self._mapping = mmap.mmap(fd, geometry.file_bytes)
        except OSError as error:
            os.close(fd)
            raise StartError(
                f"{geometry.file_bytes} bytes cannot be mapped ({error.strerror}): "
                f"raise the limit of address space (ulimit -v) or lower primary.slots"
            ) from error
        self._bytes = memoryview(self._mapping)
        self._slots_offset = geometry.slots_offset
        self._payload_room = self.stride - layout.PAGE_BYTES
        table_end = layout.PAGE_BYTES + self.num_slots * layout.SLOT_RECORD_BYTES
        self._keys = self._bytes[layout.PAGE_BYTES : table_end]
        self._table = self._keys.cast("Q")
        self._header = self._bytes[: layout.SEQUENCE_AT + 8].cast("Q")
        # No name for the slice: while one is out the mapping cannot be closed.
        self._copies_done = self._bytes[layout.COPIES_DONE].cast("Q")
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        try:
            room.populate(self._mapping)
        except ShmoffloadError:
            self.close()
            raise

    # ------------------------------------------------------------ make and leave

    @classmethod
    def open(cls, config: Config, *, timeout_s: float = 3.0) -> PrimaryRegion:
        """Create the session's region or join it, populated; hold LOCK_SH.

        Blocks for ``timeout_s`` at most, and 0.5 s for each GiB of the region. A
        failure leaves no name that this call made.

        Raises:
            RegionTooSmallError: no room; says needed and free bytes and the fix.
            RegionMismatchError: a live one has another geometry.
            SessionInUseError: a live engine owns it.
            StartError: another start hangs, or the name is not ours.
        """
        want = Geometry(config.num_slots, config.block_bytes, config.namespace_digest)
        fd = Joining(config.session.name, want, timeout_s).join()
        try:
            return cls(fd, want, config.session.name)
        except ShmoffloadError:
            names.sweep(config.session.name)  # ours, unless others have joined
            raise

    @classmethod
    def from_fd(cls, fd: int) -> PrimaryRegion:
        """Map an inherited or received descriptor, populated; takes it over.

        Raises:
            StartError: its header does not hold, or not for its size.
        """
        os.set_inheritable(fd, False)
        geometry = Geometry.read(fd)
        if geometry is None:
            os.close(fd)
            raise StartError(
                f"descriptor {fd} is no primary region of this version: start engine, "
                f"supervisor and workers from one installation"
            )
        return cls(fd, geometry, "")

    def own(self) -> None:
        """Become the one engine of the session; ends with ``close``.

        Blocks for at most 0.5 s. A failure leaves the other engine undisturbed.

        Raises:
            SessionInUseError: another live engine is.
        """
        name = names.owner_name(self._session)
        deadline = time.monotonic() + PROBE_S
        while True:
            fd = names.open_name(name)
            if names.try_lock(fd, exclusive=True) and not names.is_unlinked(fd):
                break
            os.close(fd)
            if time.monotonic() > deadline:
                raise in_use(self._session)
            names.pause()
        words = self._header
        if words[PHASE_WORD] != FRESH or names.is_unlinked(self.fd):
            names.unlink_same(name, fd)
            os.close(fd)
            raise SessionInUseError(
                f'session "{self._session}" was taken by another engine while this one '
                f"started: start again, or choose another session.name"
            )
        with contextlib.suppress(OSError):  # no room: display only, see ``in_use``
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        self._owner_fd = fd
        words[PHASE_WORD] = OWNED

    def keep(self, whom: names.Keep) -> None:
        """Say whom the region outlives; the owner, once it has started."""
        self._header[_KEEP_WORD] = whom

    def unlink(self) -> None:
        """Remove the names that still are ours, but of a region that is kept.

        The memory lives on while mapped.
        """
        is_kept = self.fd >= 0 and names.keep_of(self.fd) is not names.Keep.NOBODY
        if self.fd >= 0 and self._session and not is_kept:
            names.unlink_same(names.region_name(self._session), self.fd)
        if self._owner_fd >= 0:
            names.unlink_same(names.owner_name(self._session), self._owner_fd)

    def close(self) -> None:
        """Give up ownership and mapping. Twice is fine.

        Views that are still out stay usable; they and this object then keep the
        memory, and its lock, until they are gone.
        """
        views = (self._table, self._keys, self._copies_done, self._header)
        for view in (*views, self._bytes):
            view.release()
        with contextlib.suppress(BufferError):  # views are out
            self._mapping.close()
        for fd in (self._owner_fd, self.fd):
            if fd >= 0:
                os.close(fd)
        self._owner_fd = self.fd = -1

    # ------------------------------------------------------------ slots

    def slot_view(self, slot: int) -> memoryview:
        """Return the writable payload of a slot, ``block_bytes`` long.

        Raises:
            IndexError: no such slot.
        """
        start = self._start(slot)
        return self._bytes[start : start + self.block_bytes]

    def stride_view(self, slot: int) -> memoryview:
        """Return the whole slot, payload and header page; see ``slot_view``."""
        start = self._start(slot)
        return self._bytes[start : start + self.stride]

    def header_view(self, slot: int) -> memoryview:
        """Return the header page behind the payload; see ``slot_view``."""
        start = self._start(slot) + self._payload_room
        return self._bytes[start : start + layout.PAGE_BYTES]

    def address(self, slot: int) -> int:
        """Return where the slot lies in this process; see ``slot_view``."""
        return self._base + self._start(slot)

    def _start(self, slot: int) -> int:
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} is not in 0..{self.num_slots - 1}")
        return self._slots_offset + slot * self.stride

    # ------------------------------------------------------------ GPU copies

    def copies_done(self, rank: int, kind: int) -> int:
        """Return the last ticket that a GPU worker has published; 0 before any.

        Args:
            rank: of the GPU worker, below ``MAX_RANKS``.
            kind: 0 or 1, the direction of the copies; the caller's to name.

        Raises:
            IndexError: no such word.
        """
        return self._copies_done[_word_of(rank, kind)]

    def set_copies_done(self, rank: int, kind: int, ticket: int) -> None:
        """Publish a ticket, in one store; only that rank's process may.

        The words begin at 0 whenever a region is made or taken over from the dead.

        Raises:
            IndexError: no such word.
        """
        self._copies_done[_word_of(rank, kind)] = ticket

    # ------------------------------------------------------------ slot table

    def hand_out(
        self, slot: int, generation: int, key: OffloadKey, num_bytes: int
    ) -> None:
        """Write the word PENDING, then key and length (``SlotSink``).

        In this order a SIGKILL in between never shows a READY word beside another
        key (250 kills, 0 wrong; each other order gave wrong ones).
        """
        if slot < 0:
            raise IndexError(f"slot {slot} is negative")
        self._table[slot * _RECORD_WORDS] = generation << 8 | _PENDING
        _WRITE_KEY(self._keys, slot * 64 + 8, num_bytes, len(key), 0, key)

    def publish(self, slot: int, generation: int) -> None:
        """Write the word READY (``SlotSink``)."""
        if slot < 0:
            raise IndexError(f"slot {slot} is negative")
        self._table[slot * _RECORD_WORDS] = generation << 8 | _READY

    def set_state(self, slot: int, generation: int, state: SlotState) -> None:
        """Write any state (``SlotSink``)."""
        if slot < 0:
            raise IndexError(f"slot {slot} is negative")
        self._table[slot * _RECORD_WORDS] = generation << 8 | state

    def begin_change(self) -> None:
        """Make the sequence number odd: from here on all of the table is one write.

        A slot needs no such mark, its word is one (see ``hand_out``). A reset does:
        were it cut, a next engine would take over what the reset was to remove.
        """
        self._header[_SEQUENCE_WORD] |= 1

    def end_change(self) -> None:
        """Make the sequence number even again."""
        self._header[_SEQUENCE_WORD] += self._header[_SEQUENCE_WORD] % 2

    def records(self) -> Iterator[tuple[int, int, int, int, bytes, int]]:
        """Yield all records of the table, in order; see ``layout.SLOT_RECORD``."""
        return layout.SLOT_RECORD.iter_unpack(self._keys)

    def record(self, slot: int) -> tuple[int, SlotState, bytes, int]:
        """Return generation, state, key and length of a slot, for tools and tests."""
        self._start(slot)
        word, num_bytes, key_bytes, _, key, _ = layout.SLOT_RECORD.unpack_from(
            self._keys, slot * layout.SLOT_RECORD_BYTES
        )
        return word >> 8, SlotState(word & 0xFF), key[:key_bytes], num_bytes


def _word_of(rank: int, kind: int) -> int:
    if not (0 <= rank < MAX_RANKS and 0 <= kind < _KINDS):
        raise IndexError(
            f"rank {rank}, kind {kind} has no word: ranks are below {MAX_RANKS}, "
            f"kinds below {_KINDS}"
        )
    return rank * _KINDS + kind
