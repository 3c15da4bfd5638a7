"""Beginning with blocks that are there already.

Covers: the slot table and the eviction order of an engine that takes a region over.
Does not cover: which blocks may be trusted (``wire.adopt``).
Who calls it: ``Engine``, once, before the manager is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shmoffload.core.types import ReqContext

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmoffload.core.policies import CachePolicy
    from shmoffload.core.slots import SlotTable
    from shmoffload.core.types import OffloadKey

_NOBODY: Final = "shmoffload-adopted"


def adopt(
    table: SlotTable,
    policy: CachePolicy,
    blocks: Sequence[tuple[OffloadKey, int]],
    generations: Sequence[int],
) -> None:
    """Make ``blocks`` readable; all other slots become free.

    In the eviction order they are what one finished request has brought: older
    than all that comes. Which of them was used last is not known any more.

    Args:
        table: unused.
        policy: unused, of the same manager.
        blocks: distinct keys, each with its slot.
        generations: the last ones of all slots.
    """
    table.adopt(blocks, generations)
    keys = [key for key, _ in blocks]
    positions = {key: place for place, key in enumerate(keys)}
    ctx = ReqContext(_NOBODY, key_positions=positions)
    policy.insert_all(keys, ctx)
    policy.finish(ctx)
