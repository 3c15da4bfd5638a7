"""Headers on the way out, proof on the way in: right bytes or a miss.

Covers: filling the header page of a slot, checking a whole slot, which slots a tier
gets for it.
Does not cover: the header's layout (``wire.layout``), encryption (``bounce``).
Who calls it: ``serve`` makes it; ``executor``, from its I/O threads; two workers may
fill one slot.

Every byte of a stride has one right value, the padding's and the rest of the header
page's included: zero. So any flipped bit is noticed, and counted while it still is
harmless. Both cost under 1 us a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmoffload.wire.layout import PAGE_BYTES, seal_header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmoffload.wire.config import TierConfig
    from shmoffload.worker.tier import Region


class Pages:
    """Fills and compares the header pages of one region."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._padding = slice(region.block_bytes, region.stride - PAGE_BYTES)
        self._no_padding = bytes(region.stride - PAGE_BYTES - region.block_bytes)

    def seal(self, key: bytes, slot: int, extra: bytes = b"") -> None:
        """Write the header page; what is not header or payload becomes zero.

        Args:
            key: of the block.
            slot: its payload is there already.
            extra: bytes behind the header.
        """
        region = self._region
        if self._no_padding:
            region.stride_view(slot)[self._padding] = self._no_padding
        # One assignment, never cleared first: another tier's worker may read it.
        region.header_view(slot)[:] = self._page(key, slot, extra)

    def is_whole(self, key: bytes, slot: int, extra: bytes = b"") -> bool:
        """Say whether a slot holds exactly the block that was sealed for ``key``."""
        region = self._region
        if bytes(region.stride_view(slot)[self._padding]) != self._no_padding:
            return False
        return bytes(region.header_view(slot)) == self._page(key, slot, extra)

    def _page(self, key: bytes, slot: int, extra: bytes) -> bytes:
        payload = self._region.slot_view(slot)
        page = seal_header(key, payload, self._region.namespace) + extra
        return page + bytes(PAGE_BYTES - len(page))


class Sealer:
    """What happens to a block between the primary and its tier; here: a header.

    Attributes:
        region: the one that the tier sees; here the primary itself.
        words: what to say of it behind the tier's limits.
    """

    words = ""

    def __init__(self, region: Region) -> None:
        """Work on the slots of a region.

        Args:
            region: the primary.
        """
        self.region = region
        self._pages = Pages(region)

    def outgoing(self, keys: Sequence[bytes], slots: Sequence[int]) -> list[int]:
        """Seal blocks of the primary; return the slots for ``Tier.put``.

        Args:
            keys: at most ``blocks_a_piece``.
            slots: of the primary, co-indexed.
        """
        for key, slot in zip(keys, slots, strict=True):
            self._pages.seal(key, slot)
        return list(slots)

    def incoming(self, slots: Sequence[int]) -> list[int]:
        """Return the slots for ``Tier.get``; at most ``blocks_a_piece``."""
        return list(slots)

    def accept(self, key: bytes, slot: int, got: int) -> bool:
        """Say whether a block came back as it left; then the primary's slot has it.

        Args:
            key: of the block.
            slot: of the primary.
            got: what ``incoming`` made of it, on the same thread.
        """
        return self._pages.is_whole(key, slot)


def sealer_of(config: TierConfig, primary: Region, *, max_threads: int) -> Sealer:
    """Return what a tier's blocks go through, as configured; may read a key file.

    Args:
        config: the ``[[tier]]`` section.
        primary: where the blocks are.
        max_threads: concurrent loads that the tier bears.

    Raises:
        TierConfigError: the key or the library cannot be used.
        OSError: the key file cannot be read now.
    """
    if config.key_file is None:
        return Sealer(primary)
    # Here and not above: libraries that a worker without a key does not load.
    from shmoffload.worker.bounce import CipherSealer

    return CipherSealer.from_config(config, primary, max_threads=max_threads)
