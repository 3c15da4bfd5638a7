"""What became readable in the primary, and what went.

Covers: events for whoever mirrors the set of readable blocks (a router, a log).
Does not cover: what a tier holds (``tier_events``); translating for an inference
server (``vllm``).
Who calls it: ``manager``, scheduler thread; ``take_events`` of the manager drains.

It sits where slot states are published, so nothing can change a block behind its
back, and a manager without events pays nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmoffload.core.interfaces import SlotSink
    from shmoffload.core.types import OffloadKey, SlotState

MAX_WAITING_KEYS: Final = 65_536
"""Keys in events that wait for a drain; the oldest events go first beyond it."""
MAX_KEYS_PER_EVENT: Final = 1024
"""So that what goes is little, and its consumer gets no huge message."""


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """A change of the set of readable blocks (vLLM ``kv_offload/base.py``).

    Attributes:
        keys: distinct keys, in the order of the changes.
        is_removed: they can no longer be read; otherwise they can be from now on.
        metadata_only: they never could be read: their write failed. Whoever keeps
            a payload per key drops it.
        tier: index of the tier that holds them; None: the primary.
    """

    keys: Sequence[OffloadKey]
    is_removed: bool = False
    metadata_only: bool = False
    tier: int | None = None


class EventLog:
    """A ``SlotSink`` that passes everything on and remembers what it means.

    Attributes:
        num_lost: keys of events that nobody took in time.
    """

    def __init__(self, sink: SlotSink, *, max_keys: int = MAX_WAITING_KEYS) -> None:
        self.num_lost = 0
        self._sink = sink
        self._max_keys = max_keys
        self._max_event = min(MAX_KEYS_PER_EVENT, max_keys)
        self._num_keys = 0  # of all events
        self._failed: dict[OffloadKey, dict[OffloadKey, None]] = {}  # -> its event
        self._keys: dict[int, OffloadKey] = {}  # slot -> key, while PENDING or READY
        self._readable: set[int] = set()
        # (is_removed, metadata_only), keys: neighbours of one kind are one event.
        self._events: deque[tuple[tuple[bool, bool], dict[OffloadKey, None]]] = deque()

    def take(self) -> list[OffloadingEvent]:
        """Return the events since the last call, each once.

        They are detached first: a caller that reads only half of them does not
        see the other half again, and what happens meanwhile is not lost.
        """
        events, self._events, self._num_keys = self._events, deque(), 0
        self._failed.clear()
        return [OffloadingEvent(list(keys), *kind) for kind, keys in events if keys]

    def clear(self) -> None:
        """Forget everything at a reset, which the caller announces as a whole."""
        self._events, self._num_keys = deque(), 0
        self._failed.clear()
        self._keys.clear()
        self._readable.clear()

    def hand_out(
        self, slot: int, generation: int, key: OffloadKey, num_bytes: int
    ) -> None:
        """Remember whose slot it is; a failed write of the key is forgotten.

        Whoever drops a payload for that failure would drop the new write's.
        """
        self._keys[slot] = key
        if self._failed:
            failed = self._failed.pop(key, None)
            if failed is not None and failed.pop(key, False) is None:
                self._num_keys -= 1
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
        events = self._events
        if not events or events[-1][0] != kind or len(events[-1][1]) >= self._max_event:
            events.append((kind, {}))
        last = events[-1][1]
        if key in last:
            return  # a write may fail time and again
        last[key] = None
        self._num_keys += 1
        if metadata_only:
            self._failed[key] = last
        while self._num_keys > self._max_keys:
            gone = events.popleft()[1]
            self._num_keys -= len(gone)
            self.num_lost += len(gone)
            for lost in gone:
                if self._failed.get(lost) is gone:
                    del self._failed[lost]
