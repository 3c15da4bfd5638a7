"""The second session: its engine is killed over and over, beside the live one.

Covers: one life of ``child`` from start to death, at the stage that a fault asks for;
that nothing of it is left; that the next one starts over what it has stored.
Does not cover: the live session (``strikes``).
Who calls it: ``lane``, in the thread that steps the live engine; nothing here waits.

Every block that a life loads is compared, so a life also proves that what the killed
ones have left on disk is right or a miss.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from typing import TYPE_CHECKING, Final

from shmoffload.supervisor.spawn import child_env, python_command
from shmoffload.testing.faults.control import Call, Control
from shmoffload.testing.faults.deaths import (
    Death,
    resume,
    strike,
    supervisor_pid,
    worker_pid,
)
from shmoffload.testing.soak.plan import Stage
from shmoffload.testing.soak.strikes import EXIT_CODE, SUPERVISOR_HANGS_S
from shmoffload.testing.soak.target import TryLaterError
from shmoffload.testing.soak.watch import names_of, pids_of

if TYPE_CHECKING:
    from pathlib import Path

    from shmoffload.testing.soak.plan import Fault
    from shmoffload.testing.soak.strikes import Strike

CLOSE_S: Final = 40.0
"""Twice ``close_timeout_s``."""
_GONE_S: Final = 60.0


class SecondSession:
    """Lives and deaths of one more session.

    Args:
        session: its name; nobody else may use it.
        folder: of its tier.
        seed: of its requests.

    Attributes:
        num_lives: begun.
        num_loaded: blocks that were loaded and compared, in all lives.
        problems: sentences about what was not as it has to be.
    """

    def __init__(self, session: str, folder: Path, seed: int) -> None:
        self.num_lives = 0
        self.num_loaded = 0
        self.problems: list[str] = []
        self._num_bad = 0
        self._session = session
        self._control = Control(folder, inner="slab")
        self._seed = seed
        self._log = folder / "engine.log"

    def strike_of(self, fault: Fault) -> Strike:
        """Return one life that ends of this fault, ready to begin."""
        self.num_lives += 1
        life = _Life(self._command(), self._log)
        try:
            yield from self._live(life, fault)
        finally:
            self._control.clear()
            life.end()
            self._num_bad += life.num_bad
            self.num_loaded += life.num_loaded
        # Too long is a problem, and the lane names the fault.
        while names_of(self._session) or pids_of(self._session):
            yield False

    def take_bad(self) -> int:
        """Return how many loaded blocks had a wrong byte since the last time."""
        num_bad, self._num_bad = self._num_bad, 0
        return num_bad

    def _command(self) -> list[str]:
        where = [self._session, str(self._control.folder)]
        numbers = [str(self._seed), str(self.num_lives)]
        return [*python_command("shmoffload.testing.soak.child"), *where, *numbers]

    def _live(self, life: _Life, fault: Fault) -> Strike:
        call = {Stage.STARTING: Call.OPEN, Stage.LOAD: Call.GET}.get(
            fault.stage, Call.PUT
        )
        if fault.stage is not Stage.STARTING:
            # Loaded at least once: from what the lives before it have stored, since a
            # primary is empty at first.
            while not life.has_said("loaded"):
                yield False
        self._control.hold(call)
        while not (self._control.is_held(call) and worker_pid(self._session)):
            life.check()
            yield False
        if fault.stage is Stage.DRAINING:
            life.ask_to_close()
            while not life.has_said("closing"):
                yield False
        if not self._control.is_held(call):
            raise TryLaterError  # given up meanwhile: nothing is open any more
        if fault.who == "engine":
            strike(life.pid, Death.SIGKILL)
            yield True
            while life.lives():
                yield False
        else:
            yield from self._die_under(life, fault)
            yield from self._close(life, fault)

    def _die_under(self, life: _Life, fault: Fault) -> Strike:
        """Strike worker or supervisor while the engine waits for its last store."""
        is_worker = fault.who == "worker"
        find = worker_pid if is_worker else supervisor_pid
        pid, death = find(self._session), Death(fault.how)
        if not pid:
            raise TryLaterError
        if is_worker and death is Death.EXIT:
            self._control.exit(EXIT_CODE)
        elif not strike(pid, death):
            raise TryLaterError
        yield True
        if death is not Death.HANG:
            while life.lives() and find(self._session) == pid:
                yield False
        elif not is_worker:
            try:
                until_s = time.monotonic() + SUPERVISOR_HANGS_S
                while time.monotonic() < until_s:
                    yield False
            finally:
                resume(pid)
        self._control.clear()

    def _close(self, life: _Life, fault: Fault) -> Strike:
        until_s = time.monotonic() + CLOSE_S
        while life.lives():
            if time.monotonic() > until_s:
                break
            yield False
        if life.code != 0 or not life.has_said("closed"):
            self.problems.append(
                f"the second engine did not close in order after {fault.kind}, "
                f"{fault.stage}: exit code {life.code}"
            )


class _Life:
    """The process of one life."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.num_bad = 0
        self.num_loaded = 0
        self._words: set[str] = set()
        self._rest = b""
        with log.open("ab") as said:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env=child_env(),
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self.pid = self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code, None while it lives."""
        return self._process.poll()

    def lives(self) -> bool:
        """Say whether the process runs; listens to it."""
        code = self.code  # before: what it said last is there then
        self._listen()
        return code is None

    def has_said(self, word: str) -> bool:
        """Say whether a word has come.

        Raises:
            TryLaterError: it never will.
        """
        self._listen()
        if word in self._words:
            return True
        self.check()
        return False

    def check(self) -> None:
        """Make sure that it still lives.

        Raises:
            TryLaterError: it has ended by itself.
        """
        if not self.lives():
            raise TryLaterError

    def ask_to_close(self) -> None:
        """Tell it to close in order."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self) -> None:
        """Kill it if it lives, and let go of its pipes."""
        self._process.kill()
        self._process.wait(_GONE_S)
        self._listen()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        try:
            while data := os.read(self._process.stdout.fileno(), 65536):
                self._rest += data
        except BlockingIOError:
            pass
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            word, _, number = line.decode().partition(" ")
            self._words.add(word)
            if word == "bad":
                self.num_bad = int(number)
            elif word == "loaded":
                self.num_loaded = int(number)
