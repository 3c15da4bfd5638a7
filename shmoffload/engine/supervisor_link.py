"""The engine's end of the control channel, over all supervisors' lives.

Covers: reaching a supervisor (the daemon's socket, else one of our own), attach,
hand-overs of workers, noticing its death and reaching the next one.
Does not cover: what a dead worker means for jobs (``tier_link``, ``core``).
Who calls it: ``Engine``, in the scheduler's thread. Only ``start`` waits; a new
supervisor is started by a short-lived thread, so that no step waits for an exec.

::

    start --- Attach -----> ATTACHING -- Attached --> ATTACHED --- end of file --+
                                 ^                                               |
                                 +--- back-off, every old worker proven dead <---+
"""

from __future__ import annotations

import enum
import logging
import os
import stat
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from shmoffload.errors import ShmoffloadError, StartError
from shmoffload.supervisor.spawn import connect_daemon, spawn_embedded
from shmoffload.wire.channel import (
    Channel,
    ChannelClosedError,
    DescriptorsLostError,
)
from shmoffload.wire.config import encode
from shmoffload.wire.messages import (
    MAX_EPOCH,
    MAX_TEXT_CHARS,
    PROTOCOL_VERSION,
    Attach,
    Attached,
    Detach,
    Detached,
    FromSupervisor,
    HandoverAck,
    KillWorker,
    Refused,
    ToSupervisor,
    WorkerGone,
    WorkerStarted,
    decode_from_supervisor,
    encode_control,
)

if TYPE_CHECKING:
    from shmoffload.wire.config import Config

log = logging.getLogger(__name__)

_HANDOVER_FDS: Final = 2
_MAX_UNSENT: Final = 64
_MAX_DATAGRAMS: Final = 256
_KILL_AGAIN_S: Final = 5.0
_JOIN_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Handover:
    """A worker's queue and pidfd have arrived; the receiver owns both."""

    tier_idx: int
    worker_epoch: int
    channel: Channel
    pidfd: int
    pid: int


@dataclass(frozen=True, slots=True)
class SupervisorLost:
    """The supervisor is gone, and with it, soon, every worker of its making."""


ControlEvent: TypeAlias = Handover | WorkerGone | SupervisorLost


class LinkState(enum.Enum):
    """Where the link stands; see the module's diagram."""

    ATTACHING = enum.auto()
    ATTACHED = enum.auto()
    LOST = enum.auto()
    CLOSED = enum.auto()


class SupervisorLink:
    """One engine's way to its supervisor.

    Attributes:
        state: see ``LinkState``.
        is_daemon: the supervisor was there before the engine and outlives it.
        num_lost: supervisors that died under this engine.
    """

    def __init__(
        self, config: Config, *, engine_epoch: int, region_fd: int, page_fd: int
    ) -> None:
        """Reach a supervisor and ask to be attached; the answer comes by ``pump``.

        Raises:
            StartError: none can be started.
        """
        self._config = config
        self._attach = Attach(
            version=PROTOCOL_VERSION,
            session=config.session.name,
            engine_epoch=engine_epoch,
            config=encode(config),
        )
        self._fds = (region_fd, page_fd)
        self.num_lost = 0
        self._reached: Channel | None = None
        self._reaching: threading.Thread | None = None
        self._unsent: list[bytes] = []
        self._asked_to_kill: dict[tuple[int, int], float] = {}
        self._retry_at_s = 0.0
        self._backoff_s = config.limits.restart_backoff_s
        self.state = LinkState.LOST
        self.is_daemon = False
        self._was_attached = False
        self._begin_attach(self._reach())

    def fileno(self) -> int:
        """Descriptor to wait on, -1 when there is no supervisor."""
        lost = self.state in (LinkState.LOST, LinkState.CLOSED)
        return -1 if lost else self._channel.fileno()

    def pump(self, *, now_s: float, workers_gone: bool) -> list[ControlEvent]:
        """Receive what there is; reach a new supervisor when the old one died.

        Args:
            now_s: CLOCK_MONOTONIC.
            workers_gone: every worker of the old supervisor is proven dead; no
                new one may open the same storage before.

        Raises:
            StartError: the first supervisor refuses this engine.
        """
        events: list[ControlEvent] = []
        if self.state is LinkState.LOST:
            if workers_gone:
                self._reach_again(now_s)
            return events
        for _ in range(_MAX_DATAGRAMS):  # a step ends, whoever talks without end
            if self.state not in (LinkState.ATTACHING, LinkState.ATTACHED):
                break
            try:
                datagram, fds = self._channel.receive_with_fds()
            except DescriptorsLostError as error:
                log.error("a hand-over failed, its tier stays down: %s", error)  # noqa: TRY400
                continue
            except ChannelClosedError:
                self._lose(now_s)
                events.append(SupervisorLost())
                break
            if datagram is None:
                break
            events += self._on_datagram(datagram, fds, now_s)
        self._flush()
        return events

    def kill_worker(
        self, tier_idx: int, worker_epoch: int, *, reason: str, now_s: float
    ) -> None:
        """Ask for the end of a worker that missed a deadline; repeats are rare."""
        key = (tier_idx, worker_epoch)
        if now_s - self._asked_to_kill.get(key, -_KILL_AGAIN_S) < _KILL_AGAIN_S:
            return
        self._asked_to_kill[key] = now_s
        self._send(KillWorker(tier_idx, worker_epoch, reason))

    def detach(self, *, timeout_s: float) -> bool:
        """End the attachment and wait until no worker lives; False on time-out."""
        if self.state is not LinkState.ATTACHED:
            self.close()
            return False
        self._send(Detach())
        deadline = time.monotonic() + timeout_s
        try:
            while (left_s := deadline - time.monotonic()) > 0:
                if not self._channel.wait(timeout_s=left_s):
                    return False
                datagram, fds = self._channel.receive_with_fds()
                for fd in fds:
                    os.close(fd)
                if datagram and isinstance(_decode(datagram), Detached):
                    return True
        except (ChannelClosedError, DescriptorsLostError):
            return False
        finally:
            self.close()
        return False

    def close(self) -> None:
        """Close the channel: an embedded supervisor ends by itself. Twice is fine."""
        if self._reaching is not None:
            # What it still reaches then is closed with its last reference.
            self._reaching.join(timeout=_JOIN_TIMEOUT_S)
            self._reaching = None
        if self._reached is not None:
            self._reached.close()
            self._reached = None
        if self.state is not LinkState.LOST:
            self._channel.close()
        self.state = LinkState.CLOSED

    def _on_datagram(
        self, datagram: bytes, fds: list[int], now_s: float
    ) -> list[ControlEvent]:
        message = _decode(datagram)
        if isinstance(message, WorkerStarted) and self._is_handover(message, fds):
            self._send(HandoverAck(message.tier_idx, message.worker_epoch))
            channel = Channel.from_fd(fds[0])
            return [
                Handover(
                    message.tier_idx,
                    message.worker_epoch,
                    channel,
                    pidfd=fds[1],
                    pid=message.pid,
                )
            ]
        for fd in fds:
            os.close(fd)
        if isinstance(message, Refused):
            if not self._was_attached:
                raise StartError(message.reason[:MAX_TEXT_CHARS])
            log.error("the new supervisor refuses: %s", message.reason)
            self._lose(now_s)
        if isinstance(message, Attached):
            self.state = LinkState.ATTACHED
            self._was_attached = True
            self._backoff_s = self._config.limits.restart_backoff_s
        if isinstance(message, WorkerGone):
            self._asked_to_kill.pop((message.tier_idx, message.worker_epoch), None)
            return [message]
        return []

    def _is_handover(self, message: WorkerStarted, fds: list[int]) -> bool:
        """Say whether a worker of a tier of ours came, with a queue beside it."""
        return (
            len(fds) == _HANDOVER_FDS
            and 0 <= message.tier_idx < len(self._config.tier)
            and 0 < message.worker_epoch <= MAX_EPOCH + 1
            and stat.S_ISSOCK(os.fstat(fds[0]).st_mode)
        )

    def _begin_attach(self, channel: Channel) -> None:
        self._channel = channel
        self._reached = None
        self.state = LinkState.ATTACHING
        try:
            sent = channel.send(encode_control(self._attach), self._fds)
        except ChannelClosedError:
            sent = False
        if not sent:
            log.error("the supervisor did not take the attach request")

    def _reach(self) -> Channel:
        """Connect to the daemon, else start a supervisor; may take milliseconds.

        An engine that began under a daemon waits for the daemon: a supervisor of
        its own would compete with it for the same storage.
        """
        try:
            channel = connect_daemon(self._config.session.name)
            if channel is None and not self.is_daemon:
                return spawn_embedded(self._config)
        except OSError as error:
            raise StartError(
                f"no supervisor could be started ({error.strerror}): see "
                f"docs/operations.md, section Start"
            ) from error
        if channel is None:
            raise StartError("the daemon is not back yet: start `shmoffload serve`")
        self.is_daemon = True
        return channel

    def _reach_in_thread(self) -> None:
        try:
            self._reached = self._reach()
        except ShmoffloadError as error:
            log.warning("%s", error)  # tried again after a back-off

    def _reach_again(self, now_s: float) -> None:
        if self._reached is not None:
            self._begin_attach(self._reached)
            return
        thread_runs = self._reaching is not None and self._reaching.is_alive()
        if thread_runs or now_s < self._retry_at_s:
            return
        self._retry_at_s = now_s + self._backoff_s
        limit_s = self._config.limits.restart_backoff_max_s
        self._backoff_s = min(self._backoff_s * 2, limit_s)
        self._reaching = threading.Thread(
            target=self._reach_in_thread, name="shmoffload-reach", daemon=True
        )
        self._reaching.start()

    def _lose(self, now_s: float) -> None:
        log.error("the supervisor is gone; every tier answers MISS until the next")
        self._channel.close()
        self._unsent.clear()
        self._asked_to_kill.clear()
        self.num_lost += 1
        self._retry_at_s = now_s + self._backoff_s
        self.state = LinkState.LOST

    def _send(self, message: ToSupervisor) -> None:
        if len(self._unsent) < _MAX_UNSENT:
            self._unsent.append(encode_control(message))
        self._flush()

    def _flush(self) -> None:
        if self.state not in (LinkState.ATTACHING, LinkState.ATTACHED):
            return
        try:
            while self._unsent and self._channel.send(self._unsent[0]):
                self._unsent.pop(0)
        except ChannelClosedError:
            self._unsent.clear()  # end of file is read next, and acted upon


def _decode(datagram: bytes) -> FromSupervisor | None:
    try:
        return decode_from_supervisor(datagram)
    except msgspec.DecodeError:
        log.error("the supervisor sent garbage, ignored")  # noqa: TRY400
        return None
