"""Who is at the other end of a control socket, and proof of its death.

Covers: the peer's user and a pidfd of its process.
Does not cover: deciding whom to serve (``loop``).
Who calls it: supervisor (engines that connect) and engine (the daemon); never waits.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import Final, NamedTuple

SO_PEERPIDFD: Final = 77
"""Linux 6.5; Python 3.11 has no name for it."""
_UCRED: Final = struct.Struct("3i")


class Peer(NamedTuple):
    """Credentials of a peer at the time it connected or made the pair."""

    pid: int
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """Return the peer's credentials, as the kernel vouches for them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    return Peer(pid, uid)


def peer_pidfd(sock: socket.socket) -> int | None:
    """Return a pidfd of the peer, None if the peer is dead or cannot be seen.

    The caller closes it. Before Linux 6.5 the pid is opened, which another process
    may have got meanwhile; then the channel's end of file is what shows the death.
    """
    try:
        fd = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno not in {errno.ENOPROTOOPT, errno.EOPNOTSUPP}:
            return None
        try:
            fd = os.pidfd_open(peer_of(sock).pid)
        except (OSError, ValueError):  # dead; or pid 0: another pid namespace
            return None
    os.set_inheritable(fd, False)
    return fd
