"""The messages between engine, supervisor and workers.

Covers: one msgspec struct per message, frames, size limits, encode and decode.
Does not cover: the sockets that carry them (``wire.channel``) nor what they cause.
Who calls it: engine, supervisor and workers; any thread (encoders are created per
call site that shares them; msgspec encoders are not thread-safe, ``encode_frame``
takes none from outside).

Two channels exist. *Jobs*: engine <-> worker, one SOCK_SEQPACKET pair per tier;
a datagram is a **frame**: one msgpack array of messages, in order. *Control*:
engine <-> supervisor, one datagram per message, descriptors beside it.
Slots travel as packed little-endian int32, keys as a list of byte strings
(measured: 1000 keys 14 us to encode, 27 us to decode; a blob that Python splits
costs 141 us). No block ever travels through a queue.
"""

from __future__ import annotations

from typing import Final, TypeAlias, TypeVar

import msgspec

from shmoffload.core.types import OffloadPolicy

PROTOCOL_VERSION: Final = 1
MAX_KEYS_PER_FRAME: Final = 1000
"""A frame of 1000 keys is 40 KiB, so a default socket buffer holds several."""
MAX_FRAME_BYTES: Final = 128 * 1024
MAX_KEYS_PER_JOB: Final = 1 << 20
MAX_EPOCH: Final = 1 << 62
"""Epochs count from 1. A larger one is garbage, and would be the last for ever."""
MAX_TEXT_CHARS: Final = 400
"""Of a reason or an error; what is longer is cut by whoever passes it on."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base: positional fields, tagged by class name, no cycles."""


# Jobs channel, engine -> worker ------------------------------------------------


class Announce(_Message, tag="A", frozen=True):
    """First word about a request."""

    req_id: str
    policy: OffloadPolicy


class Finished(_Message, tag="F", frozen=True):
    """Last word about a request."""

    req_id: str


class Incomplete(_Message, tag="I", frozen=True):
    """Keys that a tier which asked for the whole request will not get.

    Before ``Finished``; several where the keys exceed a frame.
    """

    req_id: str
    keys: list[bytes]


class JobPart(_Message, tag="J", frozen=True):
    """A part of one cascade (store) or promotion (load).

    Parts of a job arrive in order with nothing of another job between them; the
    worker acts when the last part is here and answers the job once.

    Attributes:
        job_id: unique in the engine epoch.
        is_promotion: True: tier -> primary.
        req_id: on whose behalf.
        deadline_s: CLOCK_MONOTONIC, seconds; past it nobody waits any more.
        keys: keys of this part.
        slots: int32 little-endian, co-indexed with ``keys``.
        num_left: keys of this job still to come in later parts; 0 = last.
        start: position of this part's first key in the job; a part that is not
            the next one is refused, or lost keys would count as done.
    """

    engine_epoch: int
    worker_epoch: int
    job_id: int
    is_promotion: bool
    req_id: str
    deadline_s: float
    keys: list[bytes]
    slots: bytes
    num_left: int
    start: int = 0


# Jobs channel, worker -> engine ------------------------------------------------


class Hello(_Message, tag="h", frozen=True):
    """First word of a worker: its tier is open, or why it is not.

    Attributes:
        worker_epoch: the incarnation that speaks.
        error: "" when the tier is open, else one sentence.
        is_config_error: trying again without a change of configuration is useless.
        limits: the tier's effective limits, in words ("18887 blocks, 1.2 GiB").
        capacity_bytes: bound of the tier; 0 = unbounded.
        num_resident: keys that ``Resident`` frames will tell.
        policy: what the tier's own code wants of requests.
    """

    worker_epoch: int
    error: str = ""
    is_config_error: bool = False
    limits: str = ""
    capacity_bytes: int = 0
    num_resident: int = 0
    policy: OffloadPolicy = OffloadPolicy.BLOCK_LEVEL


class Resident(_Message, tag="r", frozen=True):
    """Keys that the tier has come to hold or no longer holds.

    ``is_last`` closes the report that follows ``Hello``: the tier is up.
    """

    worker_epoch: int
    added: list[bytes]
    removed: list[bytes] = []
    is_last: bool = False


class JobDone(_Message, tag="d", frozen=True):
    """The only answer to a job.

    Attributes:
        failed_idx: int32 little-endian, positions in the job's keys that failed; a
            position outside the job (-1) says all, where they exceed a frame.
        removed: keys evicted from the tier to make room.
        error: the system's words for the first failure, or "".
    """

    engine_epoch: int
    worker_epoch: int
    job_id: int
    failed_idx: bytes = b""
    removed: list[bytes] = []
    error: str = ""


# Control channel ----------------------------------------------------------------


class Attach(_Message, tag="at", frozen=True):
    """Engine -> supervisor, first; carries the region's and page's descriptors.

    ``config`` is the engine's configuration as ``wire.config.encode`` wrote it.
    """

    version: int
    session: str
    engine_epoch: int
    config: bytes


class Attached(_Message, tag="ad", frozen=True):
    """Supervisor -> engine: accepted; hand-overs follow."""

    supervisor_pid: int


class Refused(_Message, tag="re", frozen=True):
    """Supervisor -> engine: not accepted, in one sentence; end of file follows."""

    reason: str


class WorkerStarted(_Message, tag="ws", frozen=True):
    """Supervisor -> engine: carries the jobs socket and the worker's pidfd."""

    tier_idx: int
    worker_epoch: int
    pid: int


class HandoverAck(_Message, tag="ha", frozen=True):
    """Engine -> supervisor: the descriptors of ``WorkerStarted`` have arrived."""

    tier_idx: int
    worker_epoch: int


class WorkerGone(_Message, tag="wg", frozen=True):
    """Supervisor -> engine: the worker is dead and reaped, and why."""

    tier_idx: int
    worker_epoch: int
    reason: str


class KillWorker(_Message, tag="kw", frozen=True):
    """Engine -> supervisor: this incarnation missed a deadline; end it."""

    tier_idx: int
    worker_epoch: int
    reason: str


class Detach(_Message, tag="de", frozen=True):
    """Engine -> supervisor: orderly end; answered when no worker lives."""


class Detached(_Message, tag="dd", frozen=True):
    """Supervisor -> engine: all workers are reaped."""


ToWorker: TypeAlias = Announce | Finished | Incomplete | JobPart
FromWorker: TypeAlias = Hello | Resident | JobDone
ToSupervisor: TypeAlias = Attach | HandoverAck | KillWorker | Detach
FromSupervisor: TypeAlias = Attached | Refused | WorkerStarted | WorkerGone | Detached

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(list[ToWorker])
_from_worker = msgspec.msgpack.Decoder(list[FromWorker])
_to_supervisor = msgspec.msgpack.Decoder(ToSupervisor)
_from_supervisor = msgspec.msgpack.Decoder(FromSupervisor)
_T = TypeVar("_T")


def encode_frame(messages: list[ToWorker] | list[FromWorker]) -> bytes:
    """Encode one frame of the jobs channel."""
    return _encoder.encode(messages)


def encode_control(message: ToSupervisor | FromSupervisor) -> bytes:
    """Encode one datagram of the control channel."""
    return _encoder.encode(message)


def decode_to_worker(frame: bytes) -> list[ToWorker]:
    """Decode a frame that an engine sent.

    Raises:
        msgspec.DecodeError: garbage; the caller drops and counts it.
    """
    return _decode(_to_worker, frame)


def decode_from_worker(frame: bytes) -> list[FromWorker]:
    """Decode a frame that a worker sent; see ``decode_to_worker``."""
    return _decode(_from_worker, frame)


def decode_to_supervisor(datagram: bytes) -> ToSupervisor:
    """Decode a control message from an engine; see ``decode_to_worker``."""
    return _decode(_to_supervisor, datagram)


def decode_from_supervisor(datagram: bytes) -> FromSupervisor:
    """Decode a control message from a supervisor; see ``decode_to_worker``."""
    return _decode(_from_supervisor, datagram)


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    """Decode; whatever garbage raises becomes one kind of error."""
    try:
        return decoder.decode(data)
    except (RecursionError, UnicodeDecodeError) as error:
        # msgspec skips surplus fields by recursion: 2 KiB of nested arrays there
        # once ended a worker and a supervisor.
        raise msgspec.DecodeError(str(error)) from error
