"""Which blocks a tier is worth writing to it at their first store.

Covers: ``admit = second`` and ``admit = tail:N``: what is withheld until another
request uses it.
Does not cover: tiers that want whole requests (nothing is withheld from them),
credits (``cascades``).
Who calls it: ``cascades``, scheduler thread.

Most blocks are never read again, and those at the end of a request least of all.
A withheld block is remembered by name; its second use, by another request, sends
it, be it that the block is still in the primary or that it is stored again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from shmoffload.core.types import WITHHOLD_ALL

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from shmoffload.core.requests import Request
    from shmoffload.core.slots import Block
    from shmoffload.core.types import OffloadKey

KEYS_PER_SLOT: Final = 4
"""Names remembered per slot of the primary; the longest unused go first."""

_SENT: Final = -1  # no request's age


class Gate:
    """What one tier gets of requests that it did not ask for as a whole.

    Args:
        withheld: blocks at the end of a request, or ``WITHHOLD_ALL``.
        max_keys: names that are remembered.
    """

    def __init__(self, withheld: int, *, max_keys: int) -> None:
        self._withheld = withheld
        self._max_keys = max_keys
        # Key -> age of the request that used it first, or that it was sent.
        self._seen: OrderedDict[OffloadKey, int] = OrderedDict()

    @property
    def num_keys(self) -> int:
        """Names that are remembered."""
        return len(self._seen)

    def stored(self, request: Request, blocks: Sequence[Block]) -> list[Block]:
        """Return what goes now of a request's new blocks; remember the rest."""
        tail = self._tail(request, blocks)
        return [
            block
            for block in blocks
            if block.key not in tail or self._is_second(block.key, request)
        ]

    def used(self, request: Request, blocks: Iterable[Block]) -> list[Block]:
        """Return the withheld ones of readable blocks that a request uses."""
        seen, nothing_to_do = self._seen, (_SENT, request.seq)
        return [b for b in blocks if seen.get(b.key, _SENT) not in nothing_to_do]

    def sent(self, blocks: Iterable[Block]) -> None:
        """Note that the tier gets these: no later use sends them again."""
        for block in blocks:
            if block.key in self._seen:
                self._seen[block.key] = _SENT

    def _is_second(self, key: OffloadKey, request: Request) -> bool:
        first = self._seen.setdefault(key, request.seq)
        self._seen.move_to_end(key)
        while len(self._seen) > self._max_keys:
            self._seen.popitem(last=False)
        return first != request.seq

    def _tail(
        self, request: Request, blocks: Sequence[Block]
    ) -> Collection[OffloadKey]:
        """Return the keys that are withheld at first store.

        By position in the whole request, which a chunk of a prompt is not the end
        of; without positions the call is all that we know of the request.
        """
        if self._withheld == WITHHOLD_ALL:
            return {block.key for block in blocks}
        positions = request.ctx.key_positions
        if not all(block.key in positions for block in blocks):
            return {block.key for block in blocks[-self._withheld :]}
        ends = sorted(set(positions.values()))[-self._withheld :]
        return {block.key for block in blocks if positions[block.key] >= ends[0]}
