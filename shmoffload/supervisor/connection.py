"""One engine's control channel as the supervisor sees it.

Covers: what is still to be sent, what the engine brought, how the channel ended.
Does not cover: what messages cause (``loop``).
Who calls it: ``loop.Supervisor``; one thread; never waits.
"""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from shmoffload.supervisor.peer import peer_of, peer_pidfd
from shmoffload.wire.channel import Channel, ChannelClosedError
from shmoffload.wire.messages import encode_control

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from shmoffload.wire.messages import Attach, FromSupervisor

# Per tier one WorkerStarted and one WorkerGone can wait, since the next start waits
# for the acknowledgement; beside them the answers to Attach and Detach.
MAX_OUTBOX: Final = 32
ATTACH_WITHIN_S: Final = 10.0


class Pending(NamedTuple):
    """An ``Attach`` with its descriptors: region, page."""

    message: Attach
    region_fd: int
    page_fd: int


class Connection:
    """A control channel, from accept to close.

    Attributes:
        pid: of the engine, for people.
        pidfd: proof of its death; -1 when that cannot be watched.
        attach_by_s: without an ``Attach`` until then it is closed.
        closed_s: when its end of file was seen, None before.
        pending: an ``Attach`` that waits for the engine before to be cleaned up.
    """

    def __init__(self, sock: socket.socket, *, now_s: float) -> None:
        """Take over a connected socket."""
        self.pid = peer_of(sock).pid
        pidfd = peer_pidfd(sock)
        self.pidfd = -1 if pidfd is None else pidfd
        self.channel = Channel(sock)
        self.attach_by_s = now_s + ATTACH_WITHIN_S
        self.closed_s: float | None = None
        self.pending: Pending | None = None
        self._outbox: deque[tuple[bytes, Sequence[int]]] = deque()

    @property
    def has_outbox(self) -> bool:
        """Something waits for room in the socket."""
        return bool(self._outbox)

    def post(self, message: FromSupervisor, fds: Sequence[int] = ()) -> None:
        """Send now or as soon as there is room; ``fds`` are closed here after."""
        assert len(self._outbox) < MAX_OUTBOX
        self._outbox.append((encode_control(message), fds))
        self.flush()

    def flush(self) -> None:
        """Send what fits. A peer that is gone empties the outbox."""
        try:
            while self._outbox:
                data, fds = self._outbox[0]
                if not self.channel.send(data, fds):
                    return
                self._drop_first()
        except ChannelClosedError:
            while self._outbox:
                self._drop_first()

    def _drop_first(self) -> None:
        for fd in self._outbox.popleft()[1]:
            os.close(fd)

    def mark_dead(self, *, now_s: float) -> None:
        """Its pidfd has fired: nothing is expected any more."""
        os.close(self.pidfd)
        self.pidfd = -1
        self.closed_s = now_s

    def drop_pending(self) -> None:
        """Close the descriptors of an ``Attach`` that is not served."""
        if self.pending is not None:
            os.close(self.pending.region_fd)
            os.close(self.pending.page_fd)
            self.pending = None

    def close(self) -> None:
        """Close everything. Twice is fine."""
        while self._outbox:
            self._drop_first()
        self.drop_pending()
        self.channel.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
