"""What the use of a block means beyond its place in the eviction order.

Covers: the time that it is kept for, tiers that waited for its second use.
Does not cover: the eviction order (``policies``).
Who calls it: ``manager`` only, scheduler thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmoffload.core.slots import READY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmoffload.core.cascades import Cascades
    from shmoffload.core.requests import Request
    from shmoffload.core.retention import Retention
    from shmoffload.core.slots import Block


class Uses:
    """Tells retention and cascades of blocks that a request has used."""

    def __init__(self, retention: Retention, cascades: Cascades) -> None:
        self._retention = retention
        self._cascades = cascades

    def note(self, request: Request, blocks: Sequence[Block]) -> None:
        """Let a use of blocks count for their time, and for what was withheld."""
        if self._retention.marks or request.words is not None:
            ready = [block for block in blocks if block.state == READY]
            self._retention.used(request, ready)
        if self._cascades.withholds:
            ready = [block for block in blocks if block.state == READY]
            self._cascades.send_used(request, ready)
