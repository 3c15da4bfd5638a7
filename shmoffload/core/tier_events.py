"""What a tier holds, and what of it a mirror has been told.

Covers: the difference between both, given out in pieces.
Does not cover: the primary (``events``); who holds what (``mailbox``).
Who calls it: ``mailbox`` only, scheduler thread.

Not a queue but a difference: what comes and goes between two drains is never told,
nothing is ever lost, and no bound is needed besides the tier's own: there are never
more differences than the keys that it holds and those that the mirror believes in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shmoffload.core.events import OffloadingEvent

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shmoffload.core.types import OffloadKey

MAX_KEYS_PER_TAKE: Final = 1024
"""A tier comes up with an index of a million keys; one step must not pay for it."""


class TierLog:
    """Keys that a tier holds, told and not told yet."""

    def __init__(self) -> None:
        self._told: set[OffloadKey] = set()
        self._waiting: dict[OffloadKey, None] = {}  # told, and gone; or the reverse

    @property
    def num_waiting(self) -> int:
        """Keys that a mirror has wrong as yet."""
        return len(self._waiting)

    def note(self, keys: Iterable[OffloadKey], resident: set[OffloadKey]) -> None:
        """Hear of keys that may have come or gone; ``resident`` is what is there."""
        told, waiting = self._told, self._waiting
        for key in keys:
            if (key in told) is (key in resident):
                waiting.pop(key, None)
            else:
                waiting[key] = None

    def replace(self, resident: set[OffloadKey]) -> None:
        """Hear of a tier that came up or went down."""
        self._waiting = dict.fromkeys(self._told ^ resident)

    def restart(self, resident: set[OffloadKey]) -> None:
        """Hear of a mirror that has forgotten all."""
        self._told = set()
        self._waiting = dict.fromkeys(resident)

    def take(self, max_keys: int = MAX_KEYS_PER_TAKE) -> list[OffloadingEvent]:
        """Return what has changed, the latest first, ``max_keys`` keys at most."""
        waiting, told = self._waiting, self._told
        # From the end: a dict that loses its front is searched from there each time.
        keys = [waiting.popitem()[0] for _ in range(min(max_keys, len(waiting)))]
        gone = [key for key in keys if key in told]
        new = [key for key in keys if key not in told]
        told.difference_update(gone)
        told.update(new)
        return [
            OffloadingEvent(of_kind, is_removed=is_removed)
            for of_kind, is_removed in ((gone, True), (new, False))
            if of_kind
        ]
