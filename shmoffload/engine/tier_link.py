"""The engine's end of one worker's queue.

Covers: encoding what a mailbox tier puts out, the bounded backlog of a full
queue, decoding replies into what the mailbox takes in, proving a worker's death.
Does not cover: deciding (``core.mailbox``), starting workers (``supervisor``).
Who calls it: ``Engine``, in the scheduler's thread. Nothing here waits.
"""

from __future__ import annotations

import collections
import logging
import os
import select
from typing import TYPE_CHECKING, Final, cast

import msgspec
import numpy as np

from shmoffload.core.types import (
    GROUP_BYTES,
    MAX_KEY_BYTES,
    AnnounceRequest,
    FinishRequest,
    JobMetadata,
    JobReply,
    RequestIncomplete,
    Residency,
    TierDown,
    TierUp,
)
from shmoffload.wire.channel import Channel, ChannelClosedError
from shmoffload.wire.messages import (
    MAX_KEYS_PER_FRAME,
    MAX_TEXT_CHARS,
    Announce,
    Finished,
    FromWorker,
    Hello,
    Incomplete,
    JobDone,
    JobPart,
    Resident,
    ToWorker,
    decode_from_worker,
    encode_frame,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shmoffload.core.types import OffloadKey, TierInput, TierOutput

log = logging.getLogger(__name__)

_MAX_FRAMES: Final = 1024
_MAX_REQUESTS_PER_FRAME: Final = 256
_MAX_REQ_ID_BYTES: Final = 128
"""A frame stays under ``MAX_FRAME_BYTES`` whatever the server calls its requests."""


class TierLink:
    """Jobs out, replies in, for one tier over all its workers' lives.

    Attributes:
        hello: what the current worker said of itself, None before it spoke.
        garbage_frames: frames and messages of the worker that were refused.
    """

    def __init__(self, name: str = "", *, engine_epoch: int) -> None:
        """Start without a worker; ``name`` is the tier's, for the log."""
        self.hello: Hello | None = None
        self.garbage_frames = 0
        self.worker_epoch = 0
        self._name = name
        self._was_up = False
        self._engine_epoch = engine_epoch
        self._channel: Channel | None = None
        self._pidfd = -1
        self._backlog: collections.deque[bytes] = collections.deque()

    def connect(self, channel: Channel, pidfd: int, worker_epoch: int) -> None:
        """Take over the queue and the pidfd of a new worker."""
        assert self._channel is None, "connect follows the proven death of the last"
        assert self._pidfd < 0, "connect follows the proven death of the last"
        self._channel = channel
        self._pidfd = pidfd
        self.worker_epoch = worker_epoch
        self.hello = None

    @property
    def is_vacant(self) -> bool:
        """No worker of this tier can be alive, as far as this engine was told."""
        return self._channel is None and self._pidfd < 0

    @property
    def num_unsent(self) -> int:
        """Frames that a full queue has not taken yet."""
        return len(self._backlog)

    def fileno(self) -> int:
        """Descriptor to wait on for replies, -1 when there is none."""
        return -1 if self._channel is None else self._channel.fileno()

    def receive(self) -> list[TierInput]:
        """Return everything the worker has said since the last call."""
        inputs: list[TierInput] = []
        is_dead = self._pidfd >= 0 and _is_readable(self._pidfd)
        channel = self._channel
        num_frames = 0
        # A step ends, whoever talks without end; the dead are read to their end.
        while channel is not None and (is_dead or num_frames < _MAX_FRAMES):
            num_frames += 1
            try:
                frame = channel.receive()
            except ChannelClosedError:
                self._drop_channel()
                inputs.append(TierDown(self.worker_epoch, dead=False))
                break
            if frame is None:
                break
            inputs += self._decode(frame)
        if is_dead:
            self._drop_channel()
            os.close(self._pidfd)
            self._pidfd = -1
            inputs.append(TierDown(self.worker_epoch, dead=True))
        return inputs

    def abandon(self) -> list[TierInput]:
        """Stop talking to a worker whose supervisor is gone; its death follows."""
        if self._channel is None:
            return []
        self._drop_channel()
        return [TierDown(self.worker_epoch, dead=False)]

    def send(self, outputs: Iterable[TierOutput]) -> None:
        """Queue what the mailbox put out and send what fits. Never waits.

        Outputs for a worker that is gone are dropped: its mailbox has failed
        their jobs already or will, once death is proven.
        """
        if self._channel is None:
            return
        self._backlog.extend(self._frames(outputs))
        try:
            while self._backlog and self._channel.send(self._backlog[0]):
                self._backlog.popleft()
        except ChannelClosedError:
            # Not the end yet: replies already sent are still to be received.
            self._backlog.clear()

    def close(self) -> None:
        """Close the queue and forget the pidfd."""
        self._drop_channel()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _drop_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._backlog.clear()

    def _frames(self, outputs: Iterable[TierOutput]) -> list[bytes]:
        """Pack messages into as few frames as the limits allow, in order."""
        frames: list[bytes] = []
        batch: list[ToWorker] = []
        num_keys = 0
        for output in outputs:
            for message in self._messages(output):
                keys = 0
                if isinstance(message, JobPart | Incomplete):
                    keys = len(message.keys)
                if batch and (
                    num_keys + keys > MAX_KEYS_PER_FRAME
                    or len(batch) >= _MAX_REQUESTS_PER_FRAME
                ):
                    frames.append(encode_frame(batch))
                    batch, num_keys = [], 0
                batch.append(message)
                num_keys += keys
        if batch:
            frames.append(encode_frame(batch))
        return frames

    def _messages(self, output: TierOutput) -> list[ToWorker]:
        if isinstance(output, AnnounceRequest):
            return [Announce(_short(output.req_id), output.policy)]
        if isinstance(output, FinishRequest):
            return [Finished(_short(output.req_id))]
        if isinstance(output, RequestIncomplete):
            return [
                Incomplete(
                    _short(output.req_id),
                    list(output.keys[start : start + MAX_KEYS_PER_FRAME]),
                )
                for start in range(0, len(output.keys), MAX_KEYS_PER_FRAME)
            ]
        return self._job_parts(output)

    def _job_parts(self, job: JobMetadata) -> list[ToWorker]:
        slots = np.ascontiguousarray(job.slots, dtype="<i4")
        parts: list[ToWorker] = []
        for start in range(0, len(job.keys), MAX_KEYS_PER_FRAME):
            end = start + MAX_KEYS_PER_FRAME
            parts.append(
                JobPart(
                    engine_epoch=self._engine_epoch,
                    worker_epoch=self.worker_epoch,
                    job_id=job.job_id,
                    is_promotion=job.is_promotion,
                    req_id=_short(job.req_context.req_id),
                    deadline_s=job.deadline_s,
                    keys=list(job.keys[start:end]),
                    slots=slots[start:end].tobytes(),
                    num_left=max(0, len(job.keys) - end),
                    start=start,
                )
            )
        return parts

    def _decode(self, frame: bytes) -> list[TierInput]:
        try:
            messages = decode_from_worker(frame)
        except msgspec.DecodeError:
            self.garbage_frames += 1
            return []
        inputs: list[TierInput] = []
        for message in messages:
            if self._is_sound(message):
                inputs += self._input(message)
            else:
                self.garbage_frames += 1
        return inputs

    def _is_sound(self, message: FromWorker) -> bool:
        """Say whether a message may reach the core.

        Its words of another incarnation would make the core believe that the live
        worker is gone; answers to another's jobs the core counts itself.
        """
        if isinstance(message, JobDone):
            return _are_keys(message.removed)
        if message.worker_epoch != self.worker_epoch:
            return False
        if isinstance(message, Hello):
            return message.capacity_bytes >= 0
        return _are_keys(message.added) and _are_keys(message.removed)

    def _input(self, message: FromWorker) -> list[TierInput]:
        if isinstance(message, Hello):
            self.hello = message
            # A refusal at the start is raised, see ``waiting``; later it is said here.
            if message.error and (self._was_up or not message.is_config_error):
                log.error("tier %s: %s", self._name, message.error[:MAX_TEXT_CHARS])
            return []
        if isinstance(message, JobDone):
            return [_job_reply(message)]
        return self._residency(message)

    def _residency(self, message: Resident) -> list[TierInput]:
        inputs: list[TierInput] = [
            Residency(
                message.worker_epoch,
                added=_keys(message.added),
                removed=_keys(message.removed),
            )
        ]
        if message.is_last and self.hello is not None:
            # Up last: no lookup may see a half-told tier as whole.
            self._was_up = True
            inputs.append(
                TierUp(
                    message.worker_epoch,
                    capacity_bytes=self.hello.capacity_bytes,
                    policy=self.hello.policy,
                )
            )
        return inputs


def _short(req_id: str) -> str:
    return req_id.encode(errors="replace")[:_MAX_REQ_ID_BYTES].decode(errors="ignore")


def _keys(raw: list[bytes]) -> list[OffloadKey]:
    return cast("list[OffloadKey]", raw)


def _are_keys(raw: list[bytes]) -> bool:
    return all(GROUP_BYTES < len(key) <= MAX_KEY_BYTES for key in raw)


def _job_reply(message: JobDone) -> JobReply:
    failed = [-1]  # a list that is cut says nothing: all its keys count as failed
    if len(message.failed_idx) % 4 == 0:
        failed = np.frombuffer(message.failed_idx, dtype="<i4").tolist()
    return JobReply(
        engine_epoch=message.engine_epoch,
        worker_epoch=message.worker_epoch,
        job_id=message.job_id,
        failed_idx=failed,
        removed=_keys(message.removed),
        error=message.error[:MAX_TEXT_CHARS],
    )


def _is_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))
