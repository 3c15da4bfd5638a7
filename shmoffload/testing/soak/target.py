"""A tier of the live engine, as faults see it.

Covers: whether it has an open job, its worker, its faults' switches, taking turns
with faults that concern all tiers.
Does not cover: the faults themselves (``strikes``).
Who calls it: ``strikes`` and ``driver``, in the thread that steps the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmoffload.testing.faults.link import FaultyLink
from shmoffload.testing.soak.plan import Stage
from shmoffload.wire.session import TierState, TierWord, Word

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from shmoffload.engine import Engine
    from shmoffload.testing.faults.control import Control


class TryLaterError(Exception):
    """A fault cannot strike now; it is no failure of anybody."""


class Gate:
    """Lets one fault that concerns all tiers strike alone."""

    def __init__(self) -> None:
        self._busy: set[int] = set()
        self._alone: int | None = None

    def enter(self, lane: int) -> bool:
        """Begin a fault of this lane; False while another lane strikes alone."""
        if self._alone not in (None, lane):
            return False
        self._busy.add(lane)
        return True

    def leave(self, lane: int) -> None:
        """End this lane's fault."""
        self._busy.discard(lane)
        if self._alone == lane:
            self._alone = None

    def ask_alone(self, lane: int) -> bool:
        """Say whether this lane, which has entered, is alone from now on.

        Until it is, nobody else begins.

        Raises:
            TryLaterError: another lane has asked before and waits for this one.
        """
        if self._alone not in (None, lane):
            raise TryLaterError
        self._alone = lane
        return self._busy == {lane}


class TierTarget:
    """One faulty tier of a live engine.

    Attributes:
        engine: it is stepped by the caller.
        tier_idx: which of its tiers.
        control: of the tier's calls.
        link: of its answers.
        rng: for what a fault has to choose.
        gate: shared by all targets of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        tier_idx: int,
        control: Control,
        *,
        rng: random.Random,
        gate: Gate,
    ) -> None:
        self.engine = engine
        self.tier_idx = tier_idx
        self.control = control
        self.link = FaultyLink.of(engine, tier_idx)
        self.rng = rng
        self.gate = gate
        self._tier = engine.tiers[tier_idx]

    @property
    def store(self) -> Path:
        """Directory of the real tier's files."""
        return self.control.store

    @property
    def worker_pid(self) -> int:
        """The worker, 0 while there is none."""
        return self._word(TierWord.WORKER_PID)

    @property
    def supervisor_pid(self) -> int:
        """The supervisor, 0 while there is none."""
        return self.engine.page.get(Word.SUPERVISOR_PID)

    @property
    def epoch(self) -> int:
        """Incarnation of the worker."""
        return self._word(TierWord.WORKER_EPOCH)

    def has_open(self, stage: Stage) -> bool:
        """Say whether a job of this kind is open: sent, and not answered."""
        if stage is Stage.LOAD:
            return self._tier.num_open_loads > 0
        return self._tier.open_store_bytes > 0

    def is_up(self) -> bool:
        """Say whether the engine uses the tier."""
        return self._tier.is_up and self._word(TierWord.STATE) == TierState.UP

    def is_back(self, old_epoch: int) -> bool:
        """Say whether a worker after this one is up."""
        return self.epoch > old_epoch and self.is_up()

    def are_all_up(self) -> bool:
        """Say whether the engine uses every tier."""
        return all(tier.is_up for tier in self.engine.tiers)

    def clear(self) -> None:
        """Let no fault of calls or answers go on."""
        self.control.clear()
        self.link.clear()

    def _word(self, word: TierWord) -> int:
        return self.engine.page.get_tier(self.tier_idx, word)
