"""The engine of the second session: serves until it is killed, or told to close.

Covers: one life: start, replay piece after piece, close; words on standard output.
Does not cover: what kills it (``second``).
Who calls it: ``second``, as ``python -m shmoffload.testing.soak.child``.

Arguments: session, folder, seed, number of the life. On standard output, a line each:
``bad N`` (loaded blocks with a wrong byte, whenever it rises), ``loaded N``,
``closing``, ``closed``. On standard input: the end of file, or any line, asks it to
close.
"""

from __future__ import annotations

import os
import select
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shmoffload.engine import Engine
from shmoffload.replay.live import SchedulerLoop
from shmoffload.testing.soak.settings import LOOP, SHAPE, second_config
from shmoffload.testing.soak.workload import make_piece, make_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

_STEPS_PER_WORD: Final = 20
_PIECES_OF_A_LIFE: Final = 1_000_000


class _ToldToCloseError(Exception):
    """Somebody wants this life to end in order."""


class _Life:
    """Says what was loaded, and listens, after each step."""

    def __init__(self) -> None:
        self._num_loaded = 0
        self._num_bad = 0
        self._said = (0, 0)

    def on_step(self, loop: SchedulerLoop) -> None:
        num_loaded = self._num_loaded + loop.figures.prefix_hits
        num_bad = self._num_bad + loop.gpu.num_bad
        if num_bad != self._said[1]:
            _say(f"bad {num_bad}")
        if loop.num_steps % _STEPS_PER_WORD == 0 and num_loaded != self._said[0]:
            _say(f"loaded {num_loaded}")
            self._said = (num_loaded, num_bad)
        self._said = (self._said[0], num_bad)
        if select.select([sys.stdin], [], [], 0)[0]:
            raise _ToldToCloseError

    def end_piece(self, loop: SchedulerLoop) -> None:
        self._num_loaded += loop.figures.prefix_hits
        self._num_bad += loop.gpu.num_bad


def main(arguments: Sequence[str]) -> None:
    """Live one life."""
    session, folder, seed, number = arguments
    trace = make_trace(replace(SHAPE, seed=int(seed), spread_s=0.5))
    config = second_config(session, Path(folder), trace.whole.num_distinct)
    with Engine(config) as engine:
        life = _Life()
        try:
            for piece in range(_PIECES_OF_A_LIFE):
                # No piece is served twice, in no life: its new blocks are new.
                workload = make_piece(trace, int(number) * _PIECES_OF_A_LIFE + piece)
                loop = SchedulerLoop(engine, workload, LOOP, on_step=life.on_step)
                loop.run()
                life.end_piece(loop)
        except _ToldToCloseError:
            _say("closing")
    _say("closed")


def _say(word: str) -> None:
    os.write(1, f"{word}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
