"""The bytes of a block, as a function of its key alone.

Covers: filling and verifying a buffer of any length.
Does not cover: who holds the buffer (``gpu``).
Who calls it: replays and tests; any thread, one ``BlockContent`` per thread.

Word ``j`` of a block is ``table[j] * a(key) + b(key)`` modulo 2**64: ``table`` is a
fixed pseudo-random stream of odd words, ``a`` and ``b`` are the two halves of the
key's xxh3. So each 8-byte word depends on key and position (a shifted, swapped or
half-written block differs everywhere), at memory speed (measured: 64 KiB in 4 us;
a fresh SFC64 stream per key takes 53).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash

if TYPE_CHECKING:
    from shmoffload.core.types import OffloadKey

_WORD_BYTES: Final = 8
_TABLE_SEED: Final = 0x5EED


class BlockContent:
    """What blocks of one size contain.

    Args:
        block_bytes: payload of a block; need not be a multiple of 8.
    """

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        num_words = -(-block_bytes // _WORD_BYTES)
        stream = np.random.Generator(np.random.SFC64(_TABLE_SEED))
        self._table = stream.integers(
            1 << 64, size=num_words, dtype=np.uint64, endpoint=False
        ) | np.uint64(1)
        self._words = np.empty(num_words, np.uint64)
        self._bytes = self._words.view(np.uint8)[:block_bytes]

    def bytes_of(self, key: OffloadKey) -> bytes:
        """Return the content of a block."""
        self._make(key)
        return self._bytes.tobytes()

    def fill(self, view: memoryview | bytearray, key: OffloadKey) -> None:
        """Write the content of a block over ``view``, ``block_bytes`` long."""
        self._make(key)
        np.frombuffer(view, np.uint8)[:] = self._bytes

    def verify(self, view: memoryview | bytearray, key: OffloadKey) -> bool:
        """Compare every byte of ``view`` with the content of a block."""
        self._make(key)
        there = np.frombuffer(view, np.uint8)
        # Whole words where they exist: eight times fewer comparisons.
        whole = self.block_bytes // _WORD_BYTES * _WORD_BYTES
        return (
            len(there) == self.block_bytes
            and np.array_equal(
                there[:whole].view(np.uint64), self._bytes[:whole].view(np.uint64)
            )
            and np.array_equal(there[whole:], self._bytes[whole:])
        )

    def _make(self, key: OffloadKey) -> None:
        digest = xxhash.xxh3_128_intdigest(key)
        np.multiply(
            self._table, np.uint64(digest & 0xFFFF_FFFF_FFFF_FFFF), out=self._words
        )
        np.add(self._words, np.uint64(digest >> 64), out=self._words)
