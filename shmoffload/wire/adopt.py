"""What a primary region still has of an engine that is gone.

Covers: reading the slot table, checking what it promises.
Does not cover: whether an old writer lives (``wire.region_join``: LOCK_EX), taking
the blocks over (``core.slots``).
Who calls it: ``Engine``, once, at its start, after it owns the region. Blocks: 1 us
a slot, and the time to read the blocks where they are checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shmoffload.core.types import GROUP_BYTES, OffloadKey, SlotState
from shmoffload.wire.layout import HEADER_BYTES, header_matches

if TYPE_CHECKING:
    from shmoffload.wire.region import PrimaryRegion

_MAX_KEY_BYTES = 40
MAX_GENERATION = 1 << 48
"""Of 56 bits; the rest is for the engines to come."""
_READY = int(SlotState.READY)  # a plain int: IntEnum costs 0.1 us here


class Residents(NamedTuple):
    """Blocks that may be read as they are.

    Attributes:
        blocks: key and slot of each, in the order of the slots.
        generations: of all slots; they go on rising.
        num_dropped: slots that said READY and did not hold it.
        num_unfinished: slots whose write or last use the end has cut.
    """

    blocks: list[tuple[OffloadKey, int]]
    generations: list[int]
    num_dropped: int
    num_unfinished: int

    @property
    def is_empty(self) -> bool:
        """No slot was ever handed out: the region is new, or was cleared."""
        return not any(self.generations)


def find_residents(region: PrimaryRegion, *, check: bool) -> Residents:
    """Return the blocks of slots that are READY; changes nothing.

    Args:
        region: owned, with no old writer left.
        check: take only blocks with a block header that their bytes match. Tier
            workers write it: a block that no tier has stored or given has none.
    """
    blocks: dict[OffloadKey, int] = {}
    generations = []
    num_dropped = num_unfinished = 0
    for slot, record in enumerate(region.records()):
        word, num_bytes, key_bytes, _, padded_key, _ = record
        generation, state = word >> 8, word & 0xFF
        if generation > MAX_GENERATION:  # no engine lives so long: damage
            generations.append(0)
            num_dropped += 1
            continue
        generations.append(generation)
        if state != _READY:
            num_unfinished += state != SlotState.FREE
            continue
        key = OffloadKey(padded_key[:key_bytes])
        is_whole = (
            num_bytes == region.block_bytes
            and GROUP_BYTES < key_bytes <= _MAX_KEY_BYTES
            and key not in blocks
        )
        if is_whole and (not check or _has_checksum(region, slot, key)):
            blocks[key] = slot
        else:
            num_dropped += 1
    return Residents(list(blocks.items()), generations, num_dropped, num_unfinished)


def _has_checksum(region: PrimaryRegion, slot: int, key: OffloadKey) -> bool:
    header = region.header_view(slot)[:HEADER_BYTES]
    return header_matches(header, key, region.slot_view(slot), region.namespace)
