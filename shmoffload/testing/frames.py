"""Datagrams that nobody honest would send, for every queue and the control socket.

Covers: random bytes, headers that promise too much, nests, honest frames with bytes
changed, and well-formed messages whose fields are out of bounds.
Does not cover: sending them, and what must not happen (the tests say).
Who calls it: tests, in any process and thread; one generator per thread. All is
drawn from one seed, so that a run can be repeated.
"""

from __future__ import annotations

import array
import os
import random
from typing import TYPE_CHECKING, Final

from shmoffload.core.types import OffloadPolicy
from shmoffload.wire.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Announce,
    Attach,
    Attached,
    Detached,
    Finished,
    FromSupervisor,
    FromWorker,
    HandoverAck,
    Hello,
    Incomplete,
    JobDone,
    JobPart,
    KillWorker,
    Resident,
    ToSupervisor,
    ToWorker,
    WorkerGone,
    WorkerStarted,
    encode_control,
    encode_frame,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_EDGES: Final = (
    *(0, -1, 1, 2, 3, 7, 255, 1000, 2**31 - 1, -(2**31), 2**31, 2**32),
    *(2**62, 2**63 - 1, -(2**63), 2**64 - 1),
)
_TIMES: Final = (0.0, -1.0, 1e300, -1e300, float("nan"), float("inf"), float("-inf"))
_TEXTS: Final = ("", "r", "x" * 5000, "漢" * 300, "\0", "../../etc", "%s%n\n")
_NESTS: Final = (b"\x91", b"\x81\xa1k", b"\x92\xa1F")
_INT32: Final = range(-(2**31), 2**31)


class FrameFuzzer:
    """Draws datagrams; ``seed`` says which."""

    def __init__(self, seed: int | str) -> None:
        """Begin the series of ``seed``."""
        self.rng = random.Random(f"frames{seed}")

    # Any channel -------------------------------------------------------------------

    def garbage(self) -> bytes:
        """Return bytes that mean nothing, or promise what does not follow."""
        rng = self.rng
        kind = rng.randrange(5)
        if kind == 0:
            return rng.randbytes(rng.choice((0, 1, 2, 7, 60, 1000, 40_000)))
        if kind == 1:  # an array, a text, bytes of up to 4 GiB that are not there
            head = rng.choice((b"\xdd", b"\xdb", b"\xc6", b"\xdf", b"\xc9"))
            return b"\x91" + head + rng.randbytes(4) + rng.randbytes(20)
        if kind == 2:  # nests, also where a surplus field is skipped
            nest = rng.choice(_NESTS) * rng.choice((10, 500, 2000, 30_000))
            head = rng.choice(
                (b"", b"\x91\x93\xa1F\xa1r", b"\x92\xa2de", b"\x93\xa2dd")
            )
            return (head + nest)[:MAX_FRAME_BYTES]
        if kind == 3:  # more than a datagram of ours ever has
            return rng.randbytes(64) * (MAX_FRAME_BYTES // 64 + 1)
        return b"\x91\x92\xa1" + rng.randbytes(1) + rng.randbytes(rng.randrange(30))

    def mutated(self, frame: bytes) -> bytes:
        """Return an honest datagram with some of its bytes changed, lost or doubled."""
        rng, data = self.rng, bytearray(frame)
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(data) + 1)
            kind = rng.randrange(4)
            if kind == 0 and at < len(data):
                data[at] = rng.randrange(256)
            elif kind == 1:
                del data[at : at + rng.choice((1, 4, 40))]
            elif kind == 2:
                data[at:at] = rng.randbytes(rng.choice((1, 4, 40)))
            else:
                data[at:at] = data[: rng.randrange(len(data) + 1)]
        return bytes(data[:MAX_FRAME_BYTES])

    def any_of(self, honest: Callable[[], bytes], bent: Callable[[], bytes]) -> bytes:
        """Return garbage, a mutated honest datagram, or a well-formed bent one."""
        kind = self.rng.randrange(3)
        if kind == 0:
            return self.garbage()
        return self.mutated(honest()) if kind == 1 else bent()

    # Fields ------------------------------------------------------------------------

    def key(self, *, right: bool = False) -> bytes:
        """Return a key; some that are not ``right`` are too short or too long."""
        size = 36 if right else self.rng.choice((0, 1, 4, 5, 36, 40, 41, 200))
        return self.rng.randbytes(size)

    def keys(self, num: int) -> list[bytes]:
        """Return keys of which some may be alike, or none."""
        right = self.rng.random() < 0.7
        keys = [self.key(right=right) for _ in range(num)]
        if keys and self.rng.random() < 0.2:
            keys.append(keys[0])
        return keys

    def slots(self, num: int, num_slots: int) -> bytes:
        """Return packed slots: out of range, doubled, too many, too few, cut."""
        rng = self.rng
        inside = [rng.randrange(num_slots) for _ in range(num)]
        edges = [edge for edge in (*_EDGES, num_slots) if edge in _INT32]
        slots = [rng.choice(edges) if rng.random() < 0.2 else s for s in inside]
        packed = array.array("i", slots).tobytes()
        kind = rng.randrange(8)
        return {0: packed[:-4], 1: packed + b"\0\0\0\0", 2: packed[:-1]}.get(
            kind, packed
        )

    def number(self, usual: int) -> int:
        """Return the usual number, or one from the edge of some type."""
        return usual if self.rng.random() < 0.7 else self.rng.choice(_EDGES)

    def text(self) -> str:
        """Return a text that somebody may print, cut, or take for a path."""
        return self.rng.choice(_TEXTS)

    # Queues ------------------------------------------------------------------------

    def to_worker(self, epochs: tuple[int, int], num_slots: int, now_s: float) -> bytes:
        """Return a frame for a worker: bent jobs, doubled parts, notices."""
        rng = self.rng
        messages: list[ToWorker] = [
            Announce(self.text(), rng.choice(list(OffloadPolicy))),
            Incomplete(self.text(), self.keys(3)),
            Finished(self.text()),
        ]
        for _ in range(rng.randrange(3)):
            num = rng.choice((0, 1, 2, 8))
            part = JobPart(
                engine_epoch=self.number(epochs[0]),
                worker_epoch=self.number(epochs[1]),
                job_id=self.number(rng.randrange(50)),
                is_promotion=rng.random() < 0.5,
                req_id=self.text(),
                deadline_s=now_s + 5 if rng.random() < 0.7 else rng.choice(_TIMES),
                keys=self.keys(num),
                slots=self.slots(num, num_slots),
                num_left=self.number(0),
                start=self.number(0),
            )
            messages += [part] * rng.choice((1, 1, 2))
        rng.shuffle(messages)
        return encode_frame(messages)[:MAX_FRAME_BYTES]

    def from_worker(self, epochs: tuple[int, int], job_ids: Sequence[int]) -> bytes:
        """Return a frame for an engine, in the name of its worker.

        Of ``job_ids`` failures only: a lie that a job went well is no garbage, and
        nobody could tell.
        """
        rng = self.rng
        job_id = rng.choice(job_ids) if job_ids else 1
        bent = [(-1,), (10**6,), (-(2**31), 2**31 - 1), tuple(range(2000))]
        failed = array.array("i", rng.choice(bent)).tobytes()
        messages: list[FromWorker] = [
            Hello(
                self.number(epochs[1]),
                error=self.text(),
                limits=self.text(),
                capacity_bytes=self.number(0),
                num_resident=self.number(0),
            ),
            Resident(
                self.number(epochs[1]),
                added=self.keys(3),
                removed=self.keys(3),
                is_last=rng.random() < 0.5,
            ),
            JobDone(
                engine_epoch=self.number(epochs[0]),
                worker_epoch=self.number(epochs[1]),
                job_id=self.number(job_id),
                failed_idx=failed[: len(failed) - rng.choice((0, 1, 3))],
                removed=self.keys(3),
                error=self.text(),
            ),
        ]
        rng.shuffle(messages)
        return encode_frame(messages[: rng.randrange(4)])

    # Control -----------------------------------------------------------------------

    def to_supervisor(self, session: str, config: bytes) -> bytes:
        """Return a bent control message of an engine."""
        rng = self.rng
        packed = rng.choice((config, self.mutated(config), b"[" * 60_000, b"{}", b""))
        name = session if rng.random() < 0.7 else self.text()
        version = PROTOCOL_VERSION if rng.random() < 0.7 else rng.choice(_EDGES)
        message: ToSupervisor = rng.choice(
            (
                Attach(version, name, self.number(1), packed),
                HandoverAck(self.number(0), self.number(1)),
                KillWorker(self.number(0), rng.choice(_EDGES), self.text() * 3),
            )
        )
        return encode_control(message)

    def from_supervisor(self) -> bytes:
        """Return a bent control message of a supervisor; none that ends the engine."""
        message: FromSupervisor = self.rng.choice(
            (
                Attached(self.number(1)),
                WorkerStarted(self.rng.choice(_EDGES), self.rng.choice(_EDGES), 1),
                WorkerGone(self.number(0), self.number(1), self.text() * 3),
                Detached(),
            )
        )
        return encode_control(message)


def budget_s(usual_s: float) -> float:
    """Return how long to go on; ``SHMOFFLOAD_FUZZ_SCALE`` multiplies it."""
    return usual_s * float(os.environ.get("SHMOFFLOAD_FUZZ_SCALE", "1"))


def seed() -> int:
    """Return the seed of this run: ``SHMOFFLOAD_FUZZ_SEED``, or always the same."""
    return int(os.environ.get("SHMOFFLOAD_FUZZ_SEED", "1"))
