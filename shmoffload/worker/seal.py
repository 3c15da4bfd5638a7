"""Headers on the way out, proof on the way in: right bytes or a miss.

Covers: filling the header page of a slot, checking a whole slot.
Does not cover: the header's layout (``wire.layout``).
Who calls it: ``executor``, from its I/O threads; two workers may fill one slot.

Every byte of a stride has one right value, the padding's and the rest of the header
page's included: zero. So any flipped bit is noticed, and counted while it still is
harmless. Both cost under 1 us a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmoffload.wire.layout import HEADER_BYTES, PAGE_BYTES, seal_header

if TYPE_CHECKING:
    from shmoffload.worker.tier import Region


class Sealer:
    """Seals and checks the slots of one region."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._padding = slice(region.block_bytes, region.stride - PAGE_BYTES)
        self._no_padding = bytes(region.stride - PAGE_BYTES - region.block_bytes)
        self._rest = bytes(PAGE_BYTES - HEADER_BYTES)

    def seal(self, key: bytes, slot: int) -> None:
        """Write the header page; what is not header or payload becomes zero."""
        region = self._region
        if self._no_padding:
            region.stride_view(slot)[self._padding] = self._no_padding
        # One assignment, never cleared first: another tier's worker may read it.
        region.header_view(slot)[:] = self._page(key, slot)

    def is_whole(self, key: bytes, slot: int) -> bool:
        """Say whether a slot holds exactly the block that was sealed for ``key``."""
        region = self._region
        if bytes(region.stride_view(slot)[self._padding]) != self._no_padding:
            return False
        return bytes(region.header_view(slot)) == self._page(key, slot)

    def _page(self, key: bytes, slot: int) -> bytes:
        payload = self._region.slot_view(slot)
        return seal_header(key, payload, self._region.namespace) + self._rest
