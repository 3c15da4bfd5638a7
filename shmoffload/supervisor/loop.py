"""The supervisor's loop: one thread, one poll, a regular turn.

Covers: engines that connect, wait, are refused, go; polling; leaving.
Does not cover: the engine that is served (``service``), one tier (``keeper``), one
channel (``connection``), where the listening socket comes from (``daemon``).
Who calls it: ``__main__`` (embedded) and ``daemon``, in the main thread. It waits in
``poll`` and nowhere else, never longer than a turn.
"""

from __future__ import annotations

import logging
import os
import select
import time
from typing import TYPE_CHECKING, Final

import msgspec

from shmoffload.supervisor.attach import check_attach
from shmoffload.supervisor.connection import Connection, Pending
from shmoffload.supervisor.peer import peer_of
from shmoffload.supervisor.process import default_worker_command
from shmoffload.supervisor.service import GRACE_DEATH_S, GRACE_DETACH_S, Service
from shmoffload.wire.channel import ChannelClosedError, DescriptorsLostError
from shmoffload.wire.messages import (
    MAX_TEXT_CHARS,
    Attach,
    Refused,
    ToSupervisor,
    decode_to_supervisor,
)
from shmoffload.wire.session import TierState

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from shmoffload.supervisor.signals import StopSignals
    from shmoffload.wire.config import Config
    from shmoffload.wire.session import SessionPage

_log = logging.getLogger("shmoffload.supervisor")

TURN_S: Final = 1.0
_STARTING_TURN_S: Final = 0.05
"""Turns are closer while a worker opens its tier: "up" is a word in memory."""
_EOF_IS_DEATH_S: Final = 2.0
_MAX_CONNECTIONS: Final = 16
_MAX_DATAGRAMS_A_TURN: Final = 64
_ATTACH_FDS: Final = 2


class Supervisor:
    """Serves one session until told to leave, or, embedded, until its engine ends."""

    def __init__(
        self,
        session: str,
        *,
        worker_command: Sequence[str] | None = None,
        own: tuple[Config, SessionPage] | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """Prepare; ``run`` does everything.

        Args:
            session: the only one that is served.
            worker_command: what to run instead of ``shmoffload.worker``.
            own: a daemon's configuration and page; else the engine's are taken.
            listener: a daemon's socket; None makes the supervisor embedded.
        """
        assert (own is None) == (listener is None)
        self._session = session
        self._config = None if own is None else own[0]
        self._listener = listener
        self._service = Service(
            session, worker_command or default_worker_command(), own
        )
        self._connections: list[Connection] = []
        self._is_leaving = False
        self._has_refused = False
        self._turned_s = time.monotonic()
        self._accept_at_s = 0.0

    def add_engine(self, sock: socket.socket) -> None:
        """Watch a connected control socket; what it wants comes through it."""
        self._connections.append(Connection(sock, now_s=time.monotonic()))

    def run(self, signals: StopSignals) -> int:
        """Serve until the end or a signal; return the exit code.

        Must be the main thread: signals, and PDEATHSIG of the workers. Blocks until
        the end.
        """
        try:
            while not self._is_done():
                events = self._wait(signals)
                now_s = time.monotonic()
                if signals.seen() and not self._is_leaving:
                    self._leave(now_s)
                for connection in list(self._connections):
                    self._attend(connection, events, now_s)
                if self._listener and events.get(self._listener.fileno()):
                    self._accept(self._listener, now_s)
                self._turn(events, now_s)
        finally:
            for connection in list(self._connections):
                self._drop(connection)
            self._service.close()
        is_bad_embedded = self._listener is None and self._has_refused
        return 1 if self._service.has_failed or is_bad_embedded else 0

    # Waiting ----------------------------------------------------------------------

    def _is_done(self) -> bool:
        if self._service.connection is not None:
            return False
        return self._is_leaving or not (self._listener or self._connections)

    def _leave(self, now_s: float) -> None:
        _log.info("leaving: a signal asked for it")
        self._is_leaving = True
        self._service.end(
            GRACE_DEATH_S if self._listener is None else GRACE_DETACH_S, now_s=now_s
        )

    def _wait(self, signals: StopSignals) -> dict[int, int]:
        """Poll everything; a new set each turn, for a handful of descriptors."""
        poller = select.poll()
        poller.register(signals, select.POLLIN)
        if self._listener and time.monotonic() >= self._accept_at_s:
            poller.register(self._listener, select.POLLIN)
        for connection in self._connections:
            if connection.closed_s is None:
                wanted = select.POLLIN
                wanted |= select.POLLOUT if connection.has_outbox else 0
                poller.register(connection.channel, wanted)
            if connection.pidfd >= 0:
                poller.register(connection.pidfd, select.POLLIN)
        for keeper in self._service.keepers:
            if keeper.pidfd >= 0:
                poller.register(keeper.pidfd, select.POLLIN)
        return dict(poller.poll(self._timeout_s() * 1000))

    def _timeout_s(self) -> float:
        now_s = time.monotonic()
        timeout_s = self._turned_s + TURN_S - now_s
        for keeper in self._service.keepers:
            due_s = keeper.due_s()
            if due_s is not None:
                timeout_s = min(timeout_s, due_s - now_s)
            if keeper.pidfd >= 0 and keeper.life.state is TierState.STARTING:
                timeout_s = min(timeout_s, _STARTING_TURN_S)
        return max(timeout_s, 0.0)

    def _turn(self, events: dict[int, int], now_s: float) -> None:
        late_s = now_s - self._turned_s
        if late_s >= TURN_S:
            self._turned_s = now_s
            self._service.beat(now_s=now_s)
        if late_s > 2 * TURN_S:  # stopped or starved: so may the workers have been
            for keeper in self._service.keepers:
                keeper.life.excuse(now_s=now_s)
        ended = self._service.turn(events, now_s=now_s)
        if ended is None:
            return
        self._drop(ended)
        if self._is_leaving:
            return
        for connection in list(self._connections):
            if connection.pending is not None:
                self._serve_or_refuse(connection, now_s)

    # Engines that come and go -----------------------------------------------------

    def _accept(self, listener: socket.socket, now_s: float) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # No descriptor is left: the socket stays readable, so look away a while.
            _log.warning("no connection can be accepted: %s", error.strerror)
            self._accept_at_s = now_s + TURN_S
            return
        if reason := self._stranger(peer_of(sock).uid):
            _log.warning("a connection was refused: %s", reason)
            sock.close()
            return
        self._connections.append(Connection(sock, now_s=now_s))

    def _stranger(self, uid: int) -> str:
        """Say why a peer is not listened to, "" if it is."""
        if uid != os.geteuid():
            return f"it is of user {uid}, the daemon of {os.geteuid()}"
        if len(self._connections) >= _MAX_CONNECTIONS:
            return f"{_MAX_CONNECTIONS} are open already"
        return ""

    def _attend(
        self, connection: Connection, events: dict[int, int], now_s: float
    ) -> None:
        """Everything about one connection: words, death, end of file, patience."""
        is_served = connection is self._service.connection
        if connection.closed_s is None and events.get(connection.channel.fileno()):
            self._receive(connection, now_s)
            is_served = connection is self._service.connection
        if connection.pidfd >= 0 and events.get(connection.pidfd):
            connection.mark_dead(now_s=now_s)
            if is_served:
                self._service.engine_died(now_s=now_s)
        if connection.closed_s is not None:
            if not is_served:
                self._drop(connection)
            elif now_s >= connection.closed_s + _EOF_IS_DEATH_S:
                self._service.end(GRACE_DEATH_S, now_s=now_s)
        elif is_served:
            connection.flush()
        elif connection.pending is None and now_s >= connection.attach_by_s:
            self._refuse(connection, "no Attach came in time: try again")

    def _receive(self, connection: Connection, now_s: float) -> None:
        try:
            for _ in range(_MAX_DATAGRAMS_A_TURN):
                data, fds = connection.channel.receive_with_fds()
                if data is None:
                    return
                self._on_datagram(connection, data, fds, now_s)
                if connection.closed_s is not None:
                    return
        except ChannelClosedError:
            connection.closed_s = now_s
        except DescriptorsLostError as error:
            self._refuse(connection, str(error))

    def _on_datagram(
        self, connection: Connection, data: bytes, fds: list[int], now_s: float
    ) -> None:
        is_served = connection is self._service.connection
        message: ToSupervisor | None = None
        try:
            message = decode_to_supervisor(data)
        except msgspec.DecodeError:
            _log.warning("process %d sent garbage: disconnected", connection.pid)
        if isinstance(message, Attach) and len(fds) == _ATTACH_FDS and not is_served:
            connection.drop_pending()
            connection.pending = Pending(message, fds[0], fds[1])
            self._serve_or_refuse(connection, now_s)
            return
        for fd in fds:
            os.close(fd)
        if message is None:
            self._has_refused = True
            connection.closed_s = now_s
            if is_served:
                self._service.end(GRACE_DEATH_S, now_s=now_s)
        elif isinstance(message, Attach):
            self._refuse(connection, "Attach comes once and brings two descriptors")
        elif is_served:
            self._service.request(message, now_s=now_s)

    def _serve_or_refuse(self, connection: Connection, now_s: float) -> None:
        """Decide about ``connection.pending``; it stays while we clean up."""
        assert connection.pending is not None
        served = self._service.connection
        reason = check_attach(
            connection.pending.message, session=self._session, config=self._config
        )
        if not reason and served is not None:
            if served.closed_s is not None or self._service.is_ending:
                return  # decided again when the one before is cleaned up
            reason = (
                f'session "{self._session}" is in use by process {served.pid}: end '
                f"it, or choose another session.name"
            )
        if not reason:
            attach, connection.pending = connection.pending, None
            reason = self._service.begin(connection, attach, now_s=now_s)
        if reason:
            self._refuse(connection, reason)

    def _refuse(self, connection: Connection, reason: str) -> None:
        """Say why and hang up; a served engine's mistakes are only logged."""
        reason = reason[:MAX_TEXT_CHARS]  # it may quote what the peer sent
        _log.warning("process %d is refused: %s", connection.pid, reason)
        if connection is not self._service.connection:
            self._has_refused = True
            connection.post(Refused(reason))
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        connection.closed_s = connection.closed_s or time.monotonic()
        connection.close()
        if connection in self._connections:
            self._connections.remove(connection)
