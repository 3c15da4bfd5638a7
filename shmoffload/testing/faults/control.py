"""What a ``faulty`` tier is told to do wrong: a folder of small files.

Covers: both ends of it, the driver's (``Control``) and the tier's (``Orders``).
Does not cover: what a fault does to a call (``tier``).
Who calls it: ``Control`` tests, tools and people, from any process and thread;
``Orders`` a ``FaultyTier``, in its worker or in the driver's own process.

A folder and no socket: it outlives every process that dies of it, and a driver that
never reads cannot hold a tier up. No locks: a stopped process would keep them. A
fault that strikes a number of times is that number of files; who removes one has
taken it. What has struck is the length of a file that is only appended to.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shmoffload.testing.poll import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmoffload.testing.faults.worker_queue import WorkerQueue

KINDS: Final = (
    *("hold", "fail", "slow", "short_write", "flip", "fill"),
    *("exit", "say", "narrow", "hang_up"),
)
_TO_THE_PROCESS: Final = ("exit", "say.", "narrow", "hang_up")
INNER_NAME: Final = "inner"
STORE_NAME: Final = "store"
CONTROL_NAME: Final = "control"
_TURN_S: Final = 0.002
_count = itertools.count(1)


class Call(StrEnum):
    """A call of a tier that can be made to fail, wait or take long."""

    OPEN = "open"
    PUT = "put"
    GET = "get"
    EXISTS = "exists"
    DELETE = "delete"


class Control:
    """Tells one faulty tier what to do wrong, from any process.

    Each call takes effect at the tier's next call. What is set stays for the next
    worker, too, until it has struck or is cleared.

    Attributes:
        folder: the tier's ``path``.
        store: the inner tier's ``path``: its files lie there.
    """

    def __init__(self, folder: Path, *, inner: str | None = None) -> None:
        """Make the folder if need be; what is set there stays so.

        Args:
            folder: the tier's ``path``.
            inner: type of the tier behind the faults; it sees every call that no
                fault stops. None: as it was, ``slab`` at first.
        """
        self.folder = Path(folder)
        self.store = self.folder / STORE_NAME
        self._control = self.folder / CONTROL_NAME
        self._control.mkdir(mode=0o700, parents=True, exist_ok=True)
        if inner is not None:
            _write(self.folder, INNER_NAME, inner)

    def hold(self, call: Call) -> None:
        """Stop each such call in its middle until ``release``.

        Half of its keys are done then; ``open`` is held before it begins.
        """
        if not _read(self._control, f"hold-{call}"):
            self._set(f"hold-{call}", _serial())

    def is_held(self, call: Call) -> bool:
        """Say whether a process that lives stands in such a call now."""
        serial = _read(self._control, f"hold-{call}")
        held, _, pid = _read(self._control, f"held-{call}").partition(" ")
        return bool(serial) and serial == held and _is_alive(pid)

    def wait_held(
        self,
        call: Call,
        *,
        timeout_s: float = 60.0,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> None:
        """Wait until ``is_held``.

        Args:
            call: that was told to ``hold``.
            timeout_s: give up after so long.
            meanwhile: called again and again: an engine needs its steps.

        Raises:
            AssertionError: no such call came in time.
        """

        def is_it() -> bool:
            meanwhile()
            return self.is_held(call)

        wait_until(is_it, timeout_s=timeout_s, what=f"the tier to be held in {call}")

    def release(self) -> None:
        """Let everything that is held go on, and hold nothing more."""
        self._remove("hold-")

    def fail(self, call: Call, errno_: int, *, times: int = 1) -> None:
        """Fail the next ``times`` calls with this errno.

        ``put`` and ``get`` answer FAIL for every block; the others raise.
        """
        self._add(f"fail-{call}", times, str(errno_))

    def slow(self, call: Call, seconds: float) -> None:
        """Let each such call take so much longer; 0 ends it."""
        if seconds > 0:
            self._set(f"slow-{call}", repr(seconds))
        else:
            self._remove(f"slow-{call}")

    def short_write(self, *, times: int = 1) -> None:
        """Cut the last block of the next ``times`` puts, and say OK.

        As after a power cut under a disk that said it had written: the first half
        of the block is there, the rest reads as zeros. (A write that comes back
        short is no fault to a tier: it goes on with the rest.)
        """
        self._add("short_write", times, "")

    def flip(self, *, times: int = 1) -> None:
        """Flip one bit in the last block that is read, in the next ``times`` gets.

        Below the checksum: the framework has to find it.
        """
        self._add("flip", times, "")

    def fill(self) -> None:
        """Have no space: every put fails with ENOSPC until ``drain``."""
        self._set("fill", "")

    def drain(self) -> None:
        """Have space again."""
        self._remove("fill")

    def exit(self, code: int) -> None:
        """Make the process leave at once with this code, also while it is held.

        Of a tier in the driver's own process that is the driver.
        """
        self._set("exit", str(code))

    def say(self, *datagrams: bytes) -> None:
        """Send these to the engine in the worker's name, also while it is held."""
        for datagram in datagrams:
            self._set(f"say.{_serial()}", datagram.hex())

    def narrow(self, num_bytes: int) -> None:
        """Let the worker's queue to the engine hold so little from now on.

        A frame that is larger can never be sent; see ``MAX_FRAME_BYTES``. The next
        worker's queue is as wide as ever.
        """
        self._set("narrow", str(num_bytes))

    def hang_up(self) -> None:
        """Close the worker's end of its queue, of which the worker knows nothing."""
        self._set("hang_up", "")

    def num_struck(self, kind: str) -> int:
        """Return how often a fault has struck; ``kind`` is one of ``KINDS``."""
        assert kind in KINDS, f"{kind} is none of {KINDS}"
        with contextlib.suppress(FileNotFoundError):
            return (self._control / f"struck-{kind}").stat().st_size
        return 0

    def clear(self) -> None:
        """Take all faults back; ``num_struck`` goes on counting."""
        for kind in KINDS:
            self._remove(kind)

    def _set(self, name: str, text: str) -> None:
        _write(self._control, name, text)

    def _add(self, name: str, times: int, text: str) -> None:
        for _ in range(times):
            self._set(f"{name}.{_serial()}", text)

    def _remove(self, prefix: str) -> None:
        for name in os.listdir(self._control):
            if name.startswith(prefix):
                (self._control / name).unlink(missing_ok=True)


class Orders:
    """The tier's end: asks what to do wrong, and says what it has done.

    Any thread. A folder that is gone orders nothing.
    """

    def __init__(self, folder: Path, *, is_over: Callable[[], bool]) -> None:
        """Obey the control folder in ``folder``.

        Args:
            folder: the tier's ``path``.
            is_over: the tier is being closed: nothing is waited for any more.
        """
        self._control = folder / CONTROL_NAME
        self._control.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._is_over = is_over

    def error(self, call: Call) -> OSError | None:
        """Return what the system refuses this call with, None if it does not."""
        if call is Call.PUT and (self._control / "fill").exists():
            self._strike("fill")
            return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        text = self._take(f"fail-{call}.")
        if text is None:
            return None
        self._strike("fail")
        return OSError(int(text), os.strerror(int(text)))

    def delay(self, call: Call) -> None:
        """Wait as long as this call is told to take longer."""
        name = f"slow-{call}"
        text = _read(self._control, name)
        if not text:
            return
        self._strike("slow")
        until_s = time.monotonic() + float(text)
        while time.monotonic() < until_s and _read(self._control, name) == text:
            if self._is_over():
                return
            time.sleep(_TURN_S)

    def holds(self, call: Call) -> bool:
        """Say whether this call is to be held."""
        return (self._control / f"hold-{call}").exists()

    def hold(self, call: Call) -> None:
        """Say that the call is held, and wait until it no longer is."""
        name = f"hold-{call}"
        serial = _read(self._control, name)
        if not serial:
            return
        self._strike("hold")
        with contextlib.suppress(FileNotFoundError):
            _write(self._control, f"held-{call}", f"{serial} {os.getpid()}")
        while _read(self._control, name) == serial and not self._is_over():
            time.sleep(_TURN_S)

    def takes(self, kind: str) -> bool:
        """Say whether ``short_write`` or ``flip`` strikes now; the caller does it."""
        if self._take(f"{kind}.") is None:
            return False
        self._strike(kind)
        return True

    def obey(self, queue: WorkerQueue) -> None:
        """Do what is told to the process and not to one of its calls."""
        if not any(name.startswith(_TO_THE_PROCESS) for name in self._names("")):
            return  # as nearly always, a hundred times a second
        code = self._take("exit")
        if code is not None:
            self._strike("exit")
            os._exit(int(code))
        width = self._take("narrow")
        if width is not None:
            queue.narrow(int(width))
            self._strike("narrow")
        for name in self._names("say."):
            if not queue.say(bytes.fromhex(_read(self._control, name))):
                break  # no room: again at the next turn
            if self._take(name) is not None:
                self._strike("say")
        if self._take("hang_up") is not None:
            queue.hang_up()
            self._strike("hang_up")

    def _take(self, prefix: str) -> str | None:
        """Take one file whose name begins so; only one taker gets it."""
        for name in self._names(prefix):
            text = _read(self._control, name)
            with contextlib.suppress(FileNotFoundError):
                (self._control / name).unlink()
                return text
        return None

    def _names(self, prefix: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            found = os.listdir(self._control)
            return sorted(name for name in found if name.startswith(prefix))
        return []

    def _strike(self, kind: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            fd = os.open(self._control / f"struck-{kind}", flags, 0o600)
            try:
                os.write(fd, b".")
            finally:
                os.close(fd)


def _serial() -> str:
    """Return a text that no other call returns; they sort by time."""
    return f"{time.monotonic_ns():020d}-{os.getpid()}-{next(_count)}"


def _write(folder: Path, name: str, text: str) -> None:
    """Show a file whole or not at all."""
    temp = folder / f".{name}.{_serial()}"
    temp.write_text(text)
    temp.replace(folder / name)


def _read(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text()
    except FileNotFoundError:
        return ""


def _is_alive(pid: str) -> bool:
    try:
        stat = Path(f"/proc/{int(pid)}/stat").read_text()
    except (OSError, ValueError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
