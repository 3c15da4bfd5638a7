"""What a soak is told, and the two sessions that it runs.

Covers: the run's settings, both configurations, the shape of the trace.
Does not cover: the command line (``tools/soak.py``).
Who calls it: ``driver``, ``child`` and tests; pure but for the checks of a folder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shmoffload.errors import BadInputError
from shmoffload.replay.generate import MultiTurn
from shmoffload.replay.live import LoopSettings
from shmoffload.testing.soak.plan import known_kinds
from shmoffload.wire.config import closest, from_dict
from shmoffload.wire.layout import stride_of

if TYPE_CHECKING:
    from pathlib import Path

    from shmoffload.wire.config import Config

BLOCK_BYTES: Final = 16 * 1024
MAX_MINUTES: Final = 7 * 24 * 60
FAULTY_TIERS: Final = ("slab", "fs")
"""Real tiers behind the first two tiers of the live session; the third is memory."""
LOOP: Final = LoopSettings(max_decode=32)
SHAPE: Final = MultiTurn(
    num_conversations=24, num_turns=6, spread_s=3.0, turn_gap_s=(0.7, 1.3)
)
"""About 8 s, 144 requests, 500 distinct blocks."""
_LIMITS: Final[dict[str, Any]] = {
    # Short, so that a fault is over soon; a hang is told from a busy machine by it.
    "job_deadline_s": 2.0,
    "heartbeat_s": 0.1,
    "hung_after_s": 2.5,
    "restart_backoff_s": 0.05,
    "restart_backoff_max_s": 0.2,
    "start_timeout_s": 10.0,
    "close_timeout_s": 20.0,
}
_SESSION: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,25}")


@dataclass(frozen=True, slots=True)
class SoakSettings:
    """What is asked of one soak.

    Attributes:
        minutes: how long; a piece that has begun is ended.
        seed: of the plan of faults and of the requests.
        session: name of the live session; the second one adds ``-2nd``.
        folder: for the tiers' files; empty, and left as it ends.
        kinds: only these kinds of faults; empty: all.
        shape: of the trace.
        min_faults: struck at open jobs; fewer are not green.
    """

    minutes: float
    seed: int
    session: str
    folder: Path
    kinds: tuple[str, ...] = ()
    shape: MultiTurn = SHAPE
    min_faults: int = 1

    def check(self) -> None:
        """Refuse what cannot be run.

        Raises:
            BadInputError: a sentence that says what to type.
        """
        if not 0 < self.minutes <= MAX_MINUTES:
            raise BadInputError(
                f"{self.minutes:g} minutes are out of range: give more than 0 and at "
                f"most {MAX_MINUTES}"
            )
        if not _SESSION.fullmatch(self.session):
            raise BadInputError(
                f'session name "{self.session}" is not usable: take 1 to 26 of '
                f"a-z 0-9 _ -, beginning with a letter or digit"
            )
        known = tuple(known_kinds())
        for kind in self.kinds:
            if kind not in known:
                raise BadInputError(
                    f'there is no fault "{kind}": '
                    f"{closest(kind, known, 'did you mean {}?', 'known are {}')}"
                )

    @property
    def second_session(self) -> str:
        """Name of the session whose engine is killed."""
        return second_session_of(self.session)


def second_session_of(session: str) -> str:
    """Name the session whose engine is killed, beside a live one."""
    return f"{session}-2nd"


def live_config(settings: SoakSettings, num_distinct: int) -> Config:
    """Return the live session: two faulty tiers, and memory beside them.

    The first forgets and the primary is small, so that all tiers have to give.

    Args:
        settings: of the run.
        num_distinct: blocks of the trace.
    """
    caps = (0.4, 1.5)
    tiers = [
        _tier("faulty", int(cap * num_distinct), settings.folder / name, name=name)
        for name, cap in zip(FAULTY_TIERS, caps, strict=True)
    ]
    tiers.append(_tier("memory", int(0.2 * num_distinct), None))
    return _config(settings.session, max(40, int(0.2 * num_distinct)), tiers)


def second_config(session: str, folder: Path, num_distinct: int) -> Config:
    """Return the session whose engine is killed: one faulty tier.

    Args:
        session: its name.
        folder: the tier's.
        num_distinct: blocks of the trace.
    """
    tiers = [_tier("faulty", num_distinct, folder)]
    return _config(session, max(40, int(0.2 * num_distinct)), tiers)


def _tier(
    kind: str, num_blocks: int, folder: Path | None, **more: str
) -> dict[str, Any]:
    # Nice 0: a nice worker starves beside a busy replay, and nothing is open.
    tier: dict[str, Any] = {"type": kind, "min_free": 0, "nice": 0, **more}
    if folder is not None:
        tier["path"] = str(folder)
    return {**tier, "max_bytes": max(40, num_blocks) * stride_of(BLOCK_BYTES)}


def _config(session: str, num_slots: int, tiers: list[dict[str, Any]]) -> Config:
    return from_dict(
        {
            "session": {"name": session, "namespace": "shmoffload soak 1"},
            "primary": {"block_bytes": BLOCK_BYTES, "slots": num_slots},
            "tier": tiers,
            "limits": _LIMITS,
        }
    )
