"""Encrypted tiers: ciphertext has memory of its own, the primary is never changed.

Covers: the region that such a tier sees, the way of a block through it.
Does not cover: the cipher (``crypt``), the header (``seal``).
Who calls it: ``seal.sealer_of`` makes it; ``executor``, from its I/O threads.

A slot of the primary is read by the GPU and by other tiers at any time, so it is never
encrypted in place. Each I/O thread has the blocks of one piece, 8 MiB, aligned as the
primary (O_DIRECT), so a tier moves these strides as it would the primary's::

    primary   [payload][padding][header of the payload]
                  | encrypt            ^ written, too: who adopts the region reads it
    bounce    [ciphertext][padding][header of the ciphertext | nonce, tag]  <-> tier

A tier's files can be checked without the key, for the header's checksum is that of
the ciphertext; only the tag proves that nobody has made them up.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import TYPE_CHECKING

from shmoffload.wire.layout import (
    CIPHER_BYTES,
    HEADER_BYTES,
    PAGE_BYTES,
    blocks_a_piece,
    open_cipher,
    seal_cipher,
)
from shmoffload.worker.crypt import TAG_BYTES, Cipher, read_key
from shmoffload.worker.seal import Pages, Sealer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmoffload.wire.config import TierConfig
    from shmoffload.worker.tier import Region


class BounceRegion:
    """Slots of ciphertext in this process's own memory (``tier.Region``)."""

    def __init__(self, num_slots: int, like: Region, namespace: bytes) -> None:
        """Map slots of the size of another region's; touched ones cost memory."""
        self.num_slots = num_slots
        self.stride = like.stride
        self.block_bytes = like.block_bytes
        self.namespace = namespace
        self._mapping = mmap.mmap(-1, num_slots * self.stride)
        self._view = memoryview(self._mapping)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def stride_view(self, slot: int) -> memoryview:
        """Whole slot."""
        at = self._offset(slot)
        return self._view[at : at + self.stride]

    def slot_view(self, slot: int) -> memoryview:
        """Ciphertext of a slot."""
        at = self._offset(slot)
        return self._view[at : at + self.block_bytes]

    def sealed_view(self, slot: int) -> memoryview:
        """Ciphertext, and room for a tag behind it."""
        at = self._offset(slot)
        return self._view[at : at + self.block_bytes + TAG_BYTES]

    def header_view(self, slot: int) -> memoryview:
        """Header page of a slot."""
        end = self._offset(slot) + self.stride
        return self._view[end - PAGE_BYTES : end]

    def address(self, slot: int) -> int:
        """Address of a slot."""
        return self._base + self._offset(slot)

    def _offset(self, slot: int) -> int:
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} of {self.num_slots}")
        return slot * self.stride


class CipherSealer(Sealer):
    """Encrypts blocks on their way to the tier, and back."""

    region: BounceRegion

    def __init__(self, primary: Region, cipher: Cipher, *, num_threads: int) -> None:
        """Map memory for the threads that will call.

        Args:
            primary: where the plain bytes are.
            cipher: of the tier.
            num_threads: that ever call ``outgoing`` or ``incoming``.
        """
        super().__init__(primary)
        self._primary = primary
        self._plain = self._pages
        self._cipher = cipher
        self.words = f", encrypted with key {cipher.fingerprint}"
        self._a_thread = blocks_a_piece(primary.stride)
        num_slots = num_threads * self._a_thread
        self.region = BounceRegion(num_slots, primary, cipher.namespace)
        self._pages = Pages(self.region)
        self._free = list(range(0, num_slots, self._a_thread))
        self._own = threading.local()

    def outgoing(self, keys: Sequence[bytes], slots: Sequence[int]) -> list[int]:
        """See ``Sealer.outgoing``; the slots are the thread's own until its next."""
        bounces = self._bounces(len(keys))
        for key, slot, bounce in zip(keys, slots, bounces, strict=True):
            self._plain.seal(key, slot)
            sealed = self.region.sealed_view(bounce)
            nonce = self._cipher.encrypt(key, self._primary.slot_view(slot), sealed)
            record = seal_cipher(nonce, bytes(sealed[-TAG_BYTES:]))
            self._pages.seal(key, bounce, record)  # over the tag: it is in the record
        return bounces

    def incoming(self, slots: Sequence[int]) -> list[int]:
        """See ``Sealer.incoming``; the slots are the thread's own until its next."""
        return self._bounces(len(slots))

    def accept(self, key: bytes, slot: int, got: int) -> bool:
        """See ``Sealer.accept``; checked as ciphertext first, every byte of it."""
        page = self.region.header_view(got)
        opened = open_cipher(page)
        record = bytes(page[HEADER_BYTES : HEADER_BYTES + CIPHER_BYTES])
        if opened is None or not self._pages.is_whole(key, got, record):
            return False
        nonce, tag = opened
        sealed = self.region.sealed_view(got)
        sealed[-TAG_BYTES:] = tag  # over padding or header: both have been looked at
        payload = self._primary.slot_view(slot)
        if not self._cipher.decrypt(key, nonce, sealed, payload):
            return False
        self._plain.seal(key, slot)
        return True

    def _bounces(self, num_blocks: int) -> list[int]:
        start: int | None = getattr(self._own, "start", None)
        if start is None:
            start = self._own.start = self._free.pop()  # atomic
        assert num_blocks <= self._a_thread, "more than a piece"
        return list(range(start, start + num_blocks))

    @classmethod
    def from_config(
        cls, config: TierConfig, primary: Region, *, max_threads: int
    ) -> CipherSealer:
        """Read the tier's key; see ``seal.sealer_of``."""
        assert config.key_file is not None
        cipher = Cipher(read_key(config.key_file), primary.namespace)
        num_threads = 1 + min(config.threads, max_threads)  # stores, and loads
        return cls(primary, cipher, num_threads=num_threads)
