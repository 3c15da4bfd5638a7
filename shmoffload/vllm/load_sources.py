"""Where the blocks of a request's last load came from.

Covers: remembering it over ``prepare_load``, where the core forgets it, because
vLLM (since 0.32) asks afterwards.
Does not cover: what vLLM calls the sources (``report.events.describe_tiers``).
Who calls it: ``vllm.manager``, in the scheduler process, one thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shmoffload.core.slots import Block
    from shmoffload.core.types import OffloadKey


class LoadSources:
    """Tiers by request and key, where it was not the primary.

    Bounded: one load per request, until its next load or last word.
    """

    def __init__(self, blocks: Mapping[OffloadKey, Block]) -> None:
        """Look into the core's slot table; nothing is changed there."""
        self._blocks = blocks
        self._tiers: dict[str, dict[OffloadKey, int]] = {}

    def note(self, keys: Iterable[OffloadKey], req_id: str) -> None:
        """Remember a load that is about to be prepared, instead of the last one."""
        blocks = self._blocks
        found = {
            key: block.origin
            for key in keys
            if (block := blocks.get(key)) is not None and block.origin >= 0
        }
        if found:
            self._tiers[req_id] = found
        else:
            self._tiers.pop(req_id, None)

    def tier_of(self, key: OffloadKey, req_id: str) -> int | None:
        """Return the tier that gave a block of the last load; None: none did."""
        loaded = self._tiers.get(req_id)
        return loaded.get(key) if loaded else None

    def forget(self, req_id: str) -> None:
        """Hear a request's last word."""
        self._tiers.pop(req_id, None)

    def clear(self) -> None:
        """Forget all, at a reset."""
        self._tiers.clear()
