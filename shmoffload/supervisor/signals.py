"""Being told to leave: SIGTERM, SIGINT and SIGHUP as something to poll.

Covers: the handlers and the descriptor that wakes the poll.
Does not cover: what leaving means (``loop``).
Who calls it: ``__main__`` and ``daemon``, around everything that makes a name, in
the main thread; never waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import TracebackType

_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """While entered, stop signals only make ``fileno()`` readable."""

    def __enter__(self) -> Self:
        """Install the handlers; what was there before is put back at exit."""
        self._was_seen = False
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._old_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._old = [signal.signal(number, self._on_signal) for number in _STOP]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the old handlers back."""
        for number, handler in zip(_STOP, self._old, strict=True):
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def fileno(self) -> int:
        """Descriptor that is readable after a signal."""
        return self._read_fd

    def seen(self) -> bool:
        """Say whether one has come, ever."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 64)
        return self._was_seen

    def _on_signal(self, _number: int, _frame: Any) -> None:  # noqa: ANN401
        self._was_seen = True
