"""One fault after the other at one target.

Covers: drawing, beginning, patience with what finds no open job, counting what
strikes, how long a target may take to be well again.
Does not cover: the faults (``strikes``, ``second``).
Who calls it: ``driver``, after each step, in the thread that steps the engine.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from shmoffload.testing.soak.target import TryLaterError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from shmoffload.testing.soak.plan import Deck, Fault

PATIENCE_S: Final = 8.0
"""A fault that has found no open job for so long is tried again later."""
RECOVERY_S: Final = 60.0
"""Deadlines, back-off and a start, all on a machine that is busy with other things."""


class Lane:
    """Tries the faults of a deck, one at a time.

    Args:
        deck: what to try in which order.
        make: returns a fault, ready to begin; see ``strikes`` for what it yields.
        enter: says whether a fault may begin now; it is asked again and again.
        leave: called when one has ended.

    Attributes:
        struck: how often each fault has struck.
        missed: how often each has found no open job.
        problems: sentences about targets that did not recover.
    """

    def __init__(
        self,
        deck: Deck,
        make: Callable[[Fault], Generator[bool, None, None]],
        *,
        enter: Callable[[], bool] = lambda: True,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self.struck: Counter[Fault] = Counter()
        self.missed: Counter[Fault] = Counter()
        self.problems: list[str] = []
        self._deck = deck
        self._make = make
        self._enter = enter
        self._leave = leave
        self._fault: Fault | None = None
        self._strike: Generator[bool, None, None] | None = None
        self._has_struck = False
        self._since_s = 0.0

    @property
    def is_idle(self) -> bool:
        """No fault is under way."""
        return self._strike is None

    def turn(self, *, may_begin: bool) -> None:
        """Go on with the present fault, or begin the next one."""
        if self._strike is None:
            if may_begin and self._deck and self._enter():
                self._fault = self._deck.draw()
                self._strike = self._make(self._fault)
                self._enter_phase(has_struck=False)
            return
        try:
            if next(self._strike):
                self._count()
        except StopIteration:
            self._end()
        except TryLaterError:
            self._give_up()
        else:
            patience_s = RECOVERY_S if self._has_struck else PATIENCE_S
            if time.monotonic() - self._since_s > patience_s:
                self._give_up()

    def give_up_waiting(self) -> None:
        """End a fault that has not struck: no more jobs come for now."""
        if self._strike is not None and not self._has_struck:
            self._give_up()

    def close(self) -> None:
        """End whatever is under way."""
        if self._strike is not None:
            self._end()

    def _count(self) -> None:
        assert self._fault is not None
        assert not self._has_struck, "a fault strikes once"
        self.struck[self._fault] += 1
        self._enter_phase(has_struck=True)

    def _give_up(self) -> None:
        assert self._fault is not None
        if self._has_struck:
            self.problems.append(
                f"{self._fault.kind}, {self._fault.stage}: not well again after "
                f"{RECOVERY_S:g} s"
            )
        else:
            self.missed[self._fault] += 1
            self._deck.put_back(self._fault)
        self._end()

    def _end(self) -> None:
        assert self._strike is not None
        self._strike.close()
        self._strike = None
        self._leave()

    def _enter_phase(self, *, has_struck: bool) -> None:
        self._has_struck = has_struck
        self._since_s = time.monotonic()
