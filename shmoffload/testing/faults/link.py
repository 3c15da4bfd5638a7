"""Late, doubled and lost answers: between a worker's queue and the core.

Covers: one ``TierLink``, in the engine's process.
Does not cover: bytes on the queue (``testing.frames`` draws those), the worker.
Who calls it: tests and tools, in the thread that steps the engine.

It stands in front of the link's ``receive``, so that everything behind is the real
thing: decoding before it, the mailbox after it. Words that are no answer (what is
resident, deaths) are never held.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from shmoffload.core.types import JobReply

if TYPE_CHECKING:
    from shmoffload.core.types import TierInput
    from shmoffload.engine import Engine
    from shmoffload.engine.tier_link import TierLink

KINDS: Final = ("hold", "duplicate", "lose")


class FaultyLink:
    """Stands between one tier's link and its core until ``close``.

    Use it as a context manager, or leave it in place: without orders it changes
    nothing.
    """

    def __init__(self, link: TierLink) -> None:
        """Stand in front of ``link.receive``."""
        self._link = link
        self._receive = link.receive
        self._struck: Counter[str] = Counter()
        self._is_holding = False
        self._kept: list[TierInput] = []
        self._num_duplicates = 0
        self._num_lost = 0
        link.receive = self._bent  # type: ignore[method-assign]

    @classmethod
    def of(cls, engine: Engine, tier_idx: int = 0) -> FaultyLink:
        """Stand in front of an engine's link to one tier."""
        return cls(engine._links[tier_idx])  # noqa: SLF001  (nobody else needs it)

    def hold(self) -> None:
        """Keep answers back until ``release``: they are late."""
        self._is_holding = True

    def release(self) -> None:
        """Deliver what was kept, in order, with the next receive; hold no more."""
        self._is_holding = False

    def duplicate(self, *, times: int = 1) -> None:
        """Deliver the next ``times`` answers twice."""
        self._num_duplicates += times

    def lose(self, *, times: int = 1) -> None:
        """Never deliver the next ``times`` answers."""
        self._num_lost += times

    def num_struck(self, kind: str) -> int:
        """Return how many answers a fault has struck; one of ``KINDS``."""
        assert kind in KINDS, f"{kind} is none of {KINDS}"
        return self._struck[kind]

    @property
    def num_kept(self) -> int:
        """Answers that wait for ``release``."""
        return len(self._kept)

    def clear(self) -> None:
        """Order nothing more; what is kept is delivered."""
        self._is_holding = False
        self._num_duplicates = self._num_lost = 0

    def close(self) -> None:
        """Stand there no more; what is kept is lost."""
        self._link.__dict__.pop("receive", None)

    def __enter__(self) -> FaultyLink:
        """Return the link; it stands there already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stand there no more."""
        self.close()

    def _bent(self) -> list[TierInput]:
        inputs: list[TierInput] = []
        for item in self._receive():
            if isinstance(item, JobReply):
                inputs += self._bend(item)
            else:
                inputs.append(item)
        if self._kept and not self._is_holding:
            kept, self._kept = self._kept, []
            # After what came now: an answer that overtakes none was not late.
            inputs += kept
        return inputs

    def _bend(self, reply: JobReply) -> list[TierInput]:
        if self._num_lost:
            self._num_lost -= 1
            self._struck["lose"] += 1
            return []
        replies: list[TierInput] = [reply]
        if self._num_duplicates:
            self._num_duplicates -= 1
            self._struck["duplicate"] += 1
            replies.append(reply)
        if self._is_holding:
            self._struck["hold"] += 1
            self._kept += replies
            return []
        return replies
