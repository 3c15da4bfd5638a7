"""A worker's own end of its queue, for words that no worker says.

Covers: sending any datagram to the engine, making the queue narrow, closing it.
Does not cover: which ones (``control`` brings them).
Who calls it: ``FaultyTier``, one thread of its worker; never waits.

The descriptor is the one that the supervisor named on the command line. A tier in a
process without one (a test) has no queue: what it is told to say is lost.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import Final

_FLAG: Final = "--jobs-fd="


class WorkerQueue:
    """The jobs socket of this worker process, beside the worker's own use of it."""

    def __init__(self) -> None:
        """Find it."""
        numbers = [arg for arg in sys.argv if arg.startswith(_FLAG)]
        self._fd = int(numbers[0].removeprefix(_FLAG)) if numbers else -1

    def say(self, datagram: bytes) -> bool:
        """Send one datagram whole; False if there is no room. Lost without listener."""
        if self._fd < 0:
            return True
        try:
            with socket.socket(fileno=os.dup(self._fd)) as queue:
                queue.send(datagram, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def narrow(self, num_bytes: int) -> None:
        """Let the queue hold so little that is not read yet."""
        if self._fd < 0:
            return
        with socket.socket(fileno=os.dup(self._fd)) as queue:
            queue.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes)

    def hang_up(self) -> None:
        """Send an end of file: nothing more can be said."""
        if self._fd < 0:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(self._fd)) as queue,
        ):
            queue.shutdown(socket.SHUT_WR)
