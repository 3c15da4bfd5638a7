"""The session page: what a live system says of itself, in shared memory.

Covers: words and texts of the page, who writes which, create / join / look.
Does not cover: what the numbers mean to a person (``cli.status``), the primary
region (``wire.region``).
Who calls it: engine, supervisor and workers write their own words; ``status`` and
tools only read. Any thread of the one writing process.

One page answers "is it alive, how much, how fast" without asking anybody. Every
word is 8 bytes, aligned, with a single writing process, stored and read through
``memoryview('Q')`` (measured: 38 ns a read, 44 ns a write, never torn). Texts are
written rarely and carry a sequence word: odd while a write is under way.
"""

from __future__ import annotations

import enum
import mmap
import os
import time
from typing import TYPE_CHECKING, Final

from shmoffload.errors import NoSessionError, StartError
from shmoffload.wire.names import (
    NAME_PREFIX,
    SHM_DIR,
    is_unlinked,
    live_sessions,
    open_name,
    owner_name,
    page_name,
    pause,
    region_name,
    sweep,
    try_lock,
    unlink_same,
)

if TYPE_CHECKING:
    from shmoffload.wire.config import Config

__all__ = [
    "NAME_PREFIX",
    "SHM_DIR",
    "Fault",
    "SessionPage",
    "TierState",
    "TierWord",
    "Word",
    "live_sessions",
    "owner_name",
    "page_name",
    "region_name",
    "sweep",
    "unlink_same",
]

MAGIC: Final = int.from_bytes(b"SHMOPAGE", "little")
PAGE_VERSION: Final = 1
MAX_WORD: Final = (1 << 64) - 1
_TIER_WORDS: Final = 128
_TIER_TEXT_WORDS: Final = 64
_TEXT_BYTES: Final = 240
_JOIN_TIMEOUT_S: Final = 1.0


class TierState(enum.IntEnum):
    """State of a tier's worker; written by the supervisor."""

    STOPPED = 0
    STARTING = 1
    UP = 2
    DOWN = 3
    """Dead, waiting for its restart."""
    STUCK = 4
    """Killed but not gone: its slots stay quarantined, its storage stays closed."""
    REFUSED = 5
    """Cannot work as configured; not tried again until an engine attaches."""


class Word(enum.IntEnum):
    """Words of the whole session; the writer is named in each comment."""

    MAGIC = 0  # creator, last
    VERSION = 1  # creator
    NUM_TIERS = 2  # creator
    CREATED_NS = 3  # creator; CLOCK_REALTIME
    ENGINE_EPOCH = 4  # engine, at attach
    ENGINE_PID = 5  # engine; display only: means nothing in another namespace
    ENGINE_HEARTBEAT_NS = 6  # engine, at step end; CLOCK_MONOTONIC
    SUPERVISOR_PID = 7  # supervisor
    SUPERVISOR_HEARTBEAT_NS = 8  # supervisor, every second
    NUM_SLOTS = 9  # engine
    STRIDE_BYTES = 10  # engine
    BLOCK_BYTES = 11  # engine
    SLOTS_READY = 12  # engine, at step end
    SLOTS_PENDING = 13  # engine
    SLOTS_QUARANTINED = 14  # engine
    STEPS = 15  # engine
    REQUESTS = 16  # engine
    LOOKUPS = 17  # engine
    HITS_PRIMARY = 18  # engine; blocks
    MISSES = 19  # engine; blocks
    STORED_BLOCKS = 20  # engine; GPU -> primary
    LOADED_BLOCKS = 21  # engine; primary -> GPU
    EVICTED_BLOCKS = 22  # engine
    STORES_REFUSED = 23  # engine; calls
    ALLOCATION_FAILURES = 24  # engine; promotions without room
    ENGINE_CLOSED = 25  # engine; 1 = orderly end
    TEXT_SEQ = 26  # creator


class TierWord(enum.IntEnum):
    """Words of one tier; the writer is named in each comment."""

    STATE = 0  # supervisor
    WORKER_PID = 1  # supervisor
    WORKER_EPOCH = 2  # supervisor
    RESTARTS = 3  # supervisor
    STARTED_NS = 4  # supervisor; CLOCK_MONOTONIC
    TEXT_SEQ = 5  # supervisor, and a refusing worker: the tier's last error
    HEARTBEAT_NS = 8  # worker; CLOCK_MONOTONIC; by the thread that serves the queue
    COMPLETIONS = 9  # worker; +1 after each reply has been sent
    CAPACITY_BYTES = 10  # worker
    USED_BYTES = 11  # worker
    RESIDENT_BLOCKS = 12  # worker
    BLOCKS_WRITTEN = 13  # worker; physical writes
    BLOCKS_SKIPPED = 14  # worker; stores of blocks that it had
    BLOCKS_READ = 15  # worker; loads, verified
    BLOCKS_BAD = 16  # worker; header, key or checksum wrong
    BLOCKS_MISSED = 17  # worker; asked for and not there
    BLOCKS_FAILED = 18  # worker; the system refused a read or a write
    BLOCKS_EVICTED = 19  # worker
    BYTES_WRITTEN = 20  # worker; physical, with headers
    BYTES_READ = 21  # worker
    JOBS_DONE = 22  # worker; +1 after a job's answer has been sent
    QUEUE_BYTES_IN = 23  # worker; bytes of frames received
    QUEUE_BYTES_OUT = 24  # worker; bytes of frames sent
    QUEUE_KEYS = 25  # worker; keys in those frames
    GARBAGE_FRAMES = 26  # worker; frames refused
    JOBS_QUEUED = 27  # worker; waiting or running
    WORKER_READY = 28  # worker; its epoch, once its tier is open
    DIRECT_IO = 29  # worker; 1 = O_DIRECT in use
    LOAD_NS = 30  # worker; time in promotions, added over its threads
    STORE_NS = 31  # worker; time in cascades
    HITS = 40  # engine; blocks found in this tier
    STORE_JOBS = 41  # engine
    STORE_BLOCKS = 42  # engine
    LOAD_JOBS = 43  # engine
    LOAD_BLOCKS = 44  # engine
    JOBS_FAILED = 45  # engine
    BLOCKS_DROPPED = 46  # engine; cascades without credit
    LATE_REPLIES = 47  # engine
    IN_FLIGHT_BYTES = 48  # engine
    ENGINE_TIER_UP = 49  # engine; 1 = the engine uses the tier
    JOBS_DROPPED = 50  # engine; cascades without credit
    BLOCKS_DECLINED = 51  # engine; promotions slower than prefill
    FAILED_NO_SPACE = 64  # worker; BLOCKS_FAILED by what the system said, see Fault
    FAILED_IO = 65  # worker
    FAILED_NO_FILES = 66  # worker
    FAILED_NO_ACCESS = 67  # worker
    FAILED_READ_ONLY = 68  # worker
    FAILED_OTHER = 69  # worker
    BACKING_OFF = 70  # worker; why stores wait for the next probe: a Fault, 0 = not


class Fault(enum.IntEnum):
    """Why the system refused a block; ``TierWord.FAILED_NO_SPACE + n - 1`` counts."""

    NO_SPACE = 1
    """ENOSPC, EDQUOT, or below the tier's ``min_free``."""
    IO = 2
    """EIO."""
    NO_FILES = 3
    """EMFILE, ENFILE."""
    NO_ACCESS = 4
    """EACCES, EPERM."""
    READ_ONLY = 5
    """EROFS."""
    OTHER = 6

    @property
    def word(self) -> TierWord:
        """Return the word that counts its blocks."""
        return TierWord(TierWord.FAILED_NO_SPACE + self - 1)


_HEADER_WORDS: Final = 256  # words, then session name text
_NAME_WORD: Final = 64  # text area inside the header


def _page_bytes(num_tiers: int) -> int:
    words = _HEADER_WORDS + num_tiers * (_TIER_WORDS + _TIER_TEXT_WORDS)
    return -(-words * 8 // mmap.PAGESIZE) * mmap.PAGESIZE


class SessionPage:
    """A mapped session page.

    ``words`` is the whole page as unsigned 64-bit words. Hot paths take
    ``tier_base(i)`` once and index ``words`` themselves.
    """

    def __init__(self, fd: int, mapping: mmap.mmap) -> None:
        """Wrap a mapped page; use one of the class methods instead."""
        self.fd = fd
        self._mapping = mapping
        self.words = memoryview(mapping).cast("Q")

    @classmethod
    def open_or_create(cls, config: Config) -> SessionPage:
        """Make the page of ``config.session.name``, or join it; hold LOCK_SH.

        The engine or the daemon calls this at start; it may wait up to 1 s for
        a creator that is midway. A page that nobody holds is made anew, so that no
        counter of a dead session shows.

        Raises:
            RegionTooSmallError: there is no room for the page.
            BadInputError: shared memory as it is mounted takes no page.
            StartError: the page is in use with other tiers, or its name not ours.
        """
        name = config.session.name
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        while True:
            fd = open_name(page_name(name))
            try:
                page = cls._build_or_join(fd, config)
            except BaseException:
                os.close(fd)
                raise
            if page is not None and page.fits(config):
                return page
            # A misfit may be a dead page that another start looks at just now.
            if page is not None:
                page.close()
            else:
                os.close(fd)
            if time.monotonic() > deadline:
                raise StartError(
                    f'session "{name}" is in use '
                    + ("with other tiers" if page else "by a start that hangs")
                    + ": use its configuration, end it, or choose another session.name"
                )
            pause()

    @classmethod
    def _build_or_join(cls, fd: int, config: Config) -> SessionPage | None:
        """Build the page when alone with it, join it when others hold it."""
        size = _page_bytes(len(config.tier))
        if try_lock(fd, exclusive=True) and not is_unlinked(fd):
            # Here and not above: ``status`` looks only, and shall start quickly.
            from shmoffload.wire import room

            try:
                os.ftruncate(fd, 0)
                room.reserve(fd, size, "a session page")
            except BaseException:
                unlink_same(page_name(config.session.name), fd)
                raise
            page = cls(fd, mmap.mmap(fd, size))
            page._fill(config)
            page._unmap()  # the lock is lost for an instant now: join like others
        if not try_lock(fd, exclusive=False) or is_unlinked(fd):
            return None
        if _magic_of(fd) != MAGIC:
            return None
        return cls(fd, mmap.mmap(fd, os.fstat(fd).st_size))

    def fits(self, config: Config) -> bool:
        """Say whether the page has exactly the tiers of ``config``."""
        return self.num_tiers == len(config.tier) and all(
            self.tier_name(i) == (tier.name, tier.type)
            for i, tier in enumerate(config.tier)
        )

    @classmethod
    def from_fd(cls, fd: int) -> SessionPage:
        """Map an inherited or received descriptor; takes it over."""
        return cls(fd, mmap.mmap(fd, os.fstat(fd).st_size))

    @classmethod
    def look(cls, session: str) -> SessionPage:
        """Map a live page read-only, for ``status`` and tools; takes no lock.

        Raises:
            NoSessionError: there is none.
        """
        path = f"{SHM_DIR}{page_name(session)}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise NoSessionError(
                f'no session "{session}" is live here: start one with '
                f"`shmoffload serve -c FILE`, or name it with --session"
            ) from error
        size = os.fstat(fd).st_size
        if size < _HEADER_WORDS * 8 or _magic_of(fd) != MAGIC:
            os.close(fd)
            raise NoSessionError(f'session "{session}" is only now being made')
        return cls(fd, mmap.mmap(fd, size, prot=mmap.PROT_READ))

    def _fill(self, config: Config) -> None:
        self.set(Word.VERSION, PAGE_VERSION)
        self.set(Word.NUM_TIERS, len(config.tier))
        self.set(Word.CREATED_NS, time.time_ns())
        self._write_text(_NAME_WORD, config.session.name)
        for i, tier in enumerate(config.tier):
            self._write_text(self._text_word(i), f"{tier.name} {tier.type}")
        self.set(Word.MAGIC, MAGIC)

    def get(self, word: Word) -> int:
        """Read a session word."""
        return self.words[word]

    def set(self, word: Word, value: int) -> None:
        """Write a session word; only its one writer may."""
        self.words[word] = value

    def tier_base(self, tier_idx: int) -> int:
        """Return the index in ``words`` of word 0 of a tier."""
        return _HEADER_WORDS + tier_idx * (_TIER_WORDS + _TIER_TEXT_WORDS)

    def get_tier(self, tier_idx: int, word: TierWord) -> int:
        """Read a tier's word."""
        return self.words[self.tier_base(tier_idx) + word]

    def set_tier(self, tier_idx: int, word: TierWord, value: int) -> None:
        """Write a tier's word; only its one writer may."""
        self.words[self.tier_base(tier_idx) + word] = value

    def add_tier(self, tier_idx: int, word: TierWord, value: int) -> None:
        """Add to a counter; only its one writer, one thread at a time, may."""
        at = self.tier_base(tier_idx) + word
        self.words[at] = (self.words[at] + value) & MAX_WORD

    @property
    def num_tiers(self) -> int:
        """Number of tiers of the session; whatever the word says, within the page."""
        room = (len(self.words) - _HEADER_WORDS) // (_TIER_WORDS + _TIER_TEXT_WORDS)
        return min(self.get(Word.NUM_TIERS), room)

    @property
    def session(self) -> str:
        """Name of the session."""
        return self._read_text(_NAME_WORD)

    def tier_name(self, tier_idx: int) -> tuple[str, str]:
        """Return a tier's name and type."""
        name, _, kind = self._read_text(self._text_word(tier_idx)).partition(" ")
        return name, kind

    def set_tier_error(self, tier_idx: int, text: str) -> None:
        """Record a tier's last error; its worker while it lives, else supervisor."""
        word = self.tier_base(tier_idx) + TierWord.TEXT_SEQ
        odd = self.words[word] | 1
        self.words[word] = odd
        self._write_text(self._text_word(tier_idx) + _TIER_TEXT_WORDS // 2, text)
        self.words[word] = (odd + 1) & MAX_WORD

    def tier_error(self, tier_idx: int) -> str:
        """Return a tier's last error, "" if none or while it is written."""
        word = self.tier_base(tier_idx) + TierWord.TEXT_SEQ
        before = self.words[word]
        text = self._read_text(self._text_word(tier_idx) + _TIER_TEXT_WORDS // 2)
        return "" if before % 2 or before != self.words[word] else text

    def _text_word(self, tier_idx: int) -> int:
        return self.tier_base(tier_idx) + _TIER_WORDS

    def _write_text(self, word: int, text: str) -> None:
        room = min(_TEXT_BYTES, _TIER_TEXT_WORDS // 2 * 8 - 8)
        data = text.encode()[:room]
        self._mapping[word * 8 : word * 8 + room] = data.ljust(room, b"\0")

    def _read_text(self, word: int) -> str:
        room = min(_TEXT_BYTES, _TIER_TEXT_WORDS // 2 * 8 - 8)
        raw = self._mapping[word * 8 : word * 8 + room]
        return raw.rstrip(b"\0").decode(errors="replace")

    def unlink(self, session: str) -> None:
        """Remove the name, if it still names this page; see ``unlink_same``."""
        unlink_same(page_name(session), self.fd)

    def close(self) -> None:
        """Unmap; the name stays unless ``unlink`` was called. Twice is fine."""
        if self.fd >= 0:
            self._unmap()
            os.close(self.fd)
            self.fd = -1

    def _unmap(self) -> None:
        self.words.release()
        self._mapping.close()


def _magic_of(fd: int) -> int:
    return int.from_bytes(os.pread(fd, 8, 0), "little")
