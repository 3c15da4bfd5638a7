"""Ordered, bounded, death-reporting queues: AF_UNIX SOCK_SEQPACKET pairs.

Covers: making a pair, sending and receiving one datagram without waiting,
descriptors beside it.
Does not cover: what messages mean (``wire.messages``), retries, outboxes.
Who calls it: engine, supervisor, workers; one thread at a time per direction.

Chosen among nine channels because it alone reports SIGKILL of the peer at once,
keeps message boundaries and leaves no name behind (measured beside rings, POSIX
message queues and pipes: equal latency). End of file is a hint; death is proven by
a pidfd. After SIGKILL of the peer: EPIPE on send; on receive ECONNRESET once if
datagrams were unread there, then what it had sent, then end of file. So ``receive``
reads on until end of file.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
from typing import TYPE_CHECKING, Final

from shmoffload.errors import ShmoffloadError
from shmoffload.wire.messages import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

SEND_BUFFER_BYTES: Final = 1 << 20
"""Holds ~480 jobs of 64 keys; the kernel may grant less (wmem_max)."""
_MAX_FDS: Final = 4
_FD_BYTES: Final = array.array("i").itemsize


class ChannelClosedError(ShmoffloadError):
    """The peer closed its end or died; everything it sent has been read."""


class DescriptorsLostError(ShmoffloadError):
    """Descriptors were cut off (MSG_CTRUNC): this process has too many open."""


class Channel:
    """One end of a SOCK_SEQPACKET pair, non-blocking."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over ``sock``; it becomes non-blocking."""
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._sock = sock

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        """Take over an inherited or received descriptor."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """Descriptor, for ``select`` and for inheritance."""
        return self._sock.fileno()

    def send(self, data: bytes, fds: Sequence[int] = ()) -> bool:
        """Send one datagram; False when the queue is full. Never waits.

        Raises:
            ChannelClosedError: the peer is gone.
        """
        ancillary = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            if fds
            else []
        )
        try:
            self._sock.sendmsg([data], ancillary)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise ChannelClosedError(f"the peer is gone: {error.strerror}") from error
        return True

    def send_wait(self, data: bytes, *, timeout_s: float) -> bool:
        """Like ``send``, but wait for room up to ``timeout_s``; not for engines."""
        while not self.send(data):
            poller = select.poll()
            poller.register(self._sock, select.POLLOUT)
            if not poller.poll(timeout_s * 1000):
                return False
        return True

    def receive(self) -> bytes | None:
        """Return one datagram, or None when there is none now. Never waits.

        Raises:
            ChannelClosedError: end of file; nothing more will come.
        """
        data, fds = self.receive_with_fds()
        for fd in fds:  # nobody asked for them: do not let them pile up
            os.close(fd)
        return data

    def receive_with_fds(self) -> tuple[bytes | None, list[int]]:
        """Like ``receive``, with the descriptors beside it (close-on-exec).

        Raises:
            ChannelClosedError: end of file.
            DescriptorsLostError: descriptors were cut off; those that came are
                closed.
        """
        for _ in range(2):  # ECONNRESET comes at most once, data may follow it
            try:
                # Not recv_fds: it ignores its flags in 3.11 and would lose CLOEXEC.
                data, ancillary, flags, _ = self._sock.recvmsg(
                    MAX_FRAME_BYTES,
                    socket.CMSG_SPACE(_MAX_FDS * _FD_BYTES),
                    socket.MSG_CMSG_CLOEXEC,
                )
                break
            except (BlockingIOError, InterruptedError):
                return None, []
            except ConnectionResetError:
                continue
            except OSError as error:
                raise ChannelClosedError(
                    f"the channel broke: {error.strerror}"
                ) from error
        else:
            raise ChannelClosedError("the peer is gone: connection reset")
        fds = _descriptors(ancillary)
        if flags & socket.MSG_CTRUNC:
            for fd in fds:
                os.close(fd)
            raise DescriptorsLostError(
                "descriptors were lost: raise the limit of open files (ulimit -n)"
            )
        if not data and self._is_hung_up():
            for fd in fds:
                os.close(fd)
            raise ChannelClosedError("the peer closed its end")
        return data, fds

    def _is_hung_up(self) -> bool:
        """Tell end of file from an empty datagram: both are received as ``b""``.

        Asked after those only. The end is there for good before it is received, so
        that without it the datagram was a live peer's garbage.
        """
        poller = select.poll()
        poller.register(self._sock, select.POLLRDHUP)
        return bool(poller.poll(0))

    def wait(self, *, timeout_s: float) -> bool:
        """Wait until something can be received or the peer is gone."""
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    def close(self) -> None:
        """Close this end. Twice is fine."""
        self._sock.close()


def channel_pair() -> tuple[Channel, Channel]:
    """Return two connected channels; both ends are close-on-exec."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(left), Channel(right)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
    return list(fds)
