"""Which faults, at which stages, in which order.

Covers: the kinds, the stages at which each makes sense, the seeded order.
Does not cover: how a fault is brought about (``strikes``, ``second``).
Who calls it: ``driver`` makes decks, ``lane`` draws from them. Pure.

The seed alone decides the order in which faults are tried. When each strikes depends
on the machine: it has to find an open job.
"""

from __future__ import annotations

import random
from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


class Stage(StrEnum):
    """What the target is at when a fault strikes."""

    STARTING = "starting"
    """A tier is being opened: no job can be open, so it is counted apart."""
    LOAD = "mid-load"
    STORE = "mid-store"
    DRAINING = "draining"
    """The engine is being closed and waits for its last store."""


class Fault(NamedTuple):
    """One fault to be.

    Attributes:
        kind: whom it strikes and how, like ``worker SIGKILL``.
        stage: at what.
    """

    kind: str
    stage: Stage

    @property
    def who(self) -> str:
        """Whom it strikes: worker, supervisor, engine, call, disk or answer."""
        return self.kind.partition(" ")[0]

    @property
    def how(self) -> str:
        """What happens to it."""
        return self.kind.partition(" ")[2]


DEATHS: Final = ("SIGKILL", "SIGSEGV", "SIGBUS", "exit code", "hang")
_JOBS: Final = (Stage.LOAD, Stage.STORE)
_LOAD: Final = (Stage.LOAD,)
_STORE: Final = (Stage.STORE,)

LIVE: Final[dict[str, Sequence[Stage]]] = {
    **{f"worker {death}": (*_JOBS, Stage.STARTING) for death in DEATHS},
    "worker garbage": _JOBS,
    "worker hang-up": _JOBS,
    "supervisor SIGKILL": (*_JOBS, Stage.STARTING),
    "supervisor hang": (*_JOBS, Stage.STARTING),
    "call overdue": _JOBS,
    "call slow": _JOBS,
    "call EIO": (*_JOBS, Stage.STARTING),
    "call EMFILE": _JOBS,
    "call EACCES": _JOBS,
    "call ENOSPC": _STORE,
    "call EROFS": _STORE,
    "disk full": _STORE,
    "call short write": _STORE,
    "call flipped bit": _LOAD,
    **{
        f"disk {damage}": _JOBS
        for damage in ("flip", "truncate", "swap", "rename", "append")
    },
    "answer doubled": _JOBS,
    "answer late": _JOBS,
    "answer too late": _JOBS,
    "answer lost": _JOBS,
}
"""Strike the live engine's tiers, while it goes on."""

SECOND: Final[dict[str, Sequence[Stage]]] = {
    "engine SIGKILL": (Stage.STARTING, *_JOBS, Stage.DRAINING),
    **{f"worker {death}": (Stage.DRAINING,) for death in DEATHS},
    "supervisor SIGKILL": (Stage.DRAINING,),
    "supervisor hang": (Stage.DRAINING,),
}
"""Strike the second session, whose engine does not survive them."""


def faults_of(
    table: dict[str, Sequence[Stage]], kinds: Collection[str] = ()
) -> list[Fault]:
    """Return every kind at every stage of a table; only ``kinds``, if given."""
    return [
        Fault(kind, stage)
        for kind, stages in table.items()
        if not kinds or kind in kinds
        for stage in stages
    ]


def known_kinds() -> list[str]:
    """Return the kinds of both tables, each once."""
    return list(dict.fromkeys((*LIVE, *SECOND)))


class Deck:
    """Faults in an order that never ends: all of them, shuffled, again and again.

    Args:
        faults: each comes once per round.
        seed: same seed, same order.
        offset: of the first round, this part of the faults comes last: two decks
            with one seed and the offsets 0 and 0.5 have tried all of them in half
            the time.
    """

    def __init__(
        self, faults: Iterable[Fault], seed: str, *, offset: float = 0.0
    ) -> None:
        self._faults = list(faults)
        self._offset = int(len(self._faults) * offset)
        self._rng = random.Random(seed)
        self._next: deque[Fault] = deque()

    def __bool__(self) -> bool:
        """Say whether there is any fault to draw."""
        return bool(self._faults)

    def draw(self) -> Fault:
        """Return the next fault."""
        if not self._next:
            self._rng.shuffle(self._faults)
            self._next.extend(self._faults)
            self._next.rotate(-self._offset)
        return self._next.popleft()

    def put_back(self, fault: Fault) -> None:
        """Try a fault that did not strike once more, soon but not next."""
        self._next.insert(min(2, len(self._next)), fault)
