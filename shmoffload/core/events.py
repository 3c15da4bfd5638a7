"""What became readable in the primary, and what went.

Covers: events for whoever mirrors the set of readable blocks (a router, a log).
Does not cover: what a tier holds; translating for an inference server (``vllm``).
Who calls it: ``manager``, scheduler thread; ``take_events`` of the manager drains.

It sits where slot states are published, so nothing can change a block behind its
back, and a manager without events pays nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmoffload.core.interfaces import SlotSink
    from shmoffload.core.types import OffloadKey, SlotState

MAX_EVENTS: Final = 65_536
"""Events that wait for a drain; the oldest go first beyond it."""


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """A change of the set of readable blocks (vLLM ``kv_offload/base.py``).

    Attributes:
        keys: distinct keys, in the order of the changes.
        is_removed: they can no longer be read; otherwise they can be from now on.
        metadata_only: they never could be read: their write failed. Whoever keeps
            a payload per key drops it.
    """

    keys: Sequence[OffloadKey]
    is_removed: bool = False
    metadata_only: bool = False


class EventLog:
    """A ``SlotSink`` that passes everything on and remembers what it means.

    Attributes:
        num_lost: events that nobody took in time.
    """

    def __init__(self, sink: SlotSink, *, max_events: int = MAX_EVENTS) -> None:
        self.num_lost = 0
        self._sink = sink
        self._max_events = max_events
        self._keys: dict[int, OffloadKey] = {}  # slot -> key, while PENDING or READY
        self._readable: set[int] = set()
        # (is_removed, metadata_only), keys: neighbours of one kind are one event.
        self._events: list[tuple[tuple[bool, bool], dict[OffloadKey, None]]] = []

    def take(self) -> list[OffloadingEvent]:
        """Return the events since the last call, each once.

        They are detached first: a caller that reads only half of them does not
        see the other half again, and what happens meanwhile is not lost.
        """
        events, self._events = self._events, []
        return [OffloadingEvent(list(keys), *kind) for kind, keys in events]

    def clear(self) -> None:
        """Forget everything at a reset, which the caller announces as a whole."""
        self._events = []
        self._keys.clear()
        self._readable.clear()

    def hand_out(
        self, slot: int, generation: int, key: OffloadKey, num_bytes: int
    ) -> None:
        """Remember whose slot it is."""
        self._keys[slot] = key
        self._sink.hand_out(slot, generation, key, num_bytes)

    def publish(self, slot: int, generation: int) -> None:
        """Note a block that can be read from now on."""
        self._readable.add(slot)
        self._note(self._keys[slot], is_removed=False, metadata_only=False)
        self._sink.publish(slot, generation)

    def set_state(self, slot: int, generation: int, state: SlotState) -> None:
        """Note a block that has gone, whatever becomes of its slot."""
        key = self._keys.pop(slot, None)
        if key is not None:
            was_readable = slot in self._readable
            self._readable.discard(slot)
            self._note(key, is_removed=True, metadata_only=not was_readable)
        self._sink.set_state(slot, generation, state)

    def _note(self, key: OffloadKey, *, is_removed: bool, metadata_only: bool) -> None:
        kind = (is_removed, metadata_only)
        if self._events and self._events[-1][0] == kind:
            self._events[-1][1][key] = None  # a write may fail time and again
            return
        self._events.append((kind, {key: None}))
        if len(self._events) > self._max_events:
            del self._events[0]
            self.num_lost += 1
