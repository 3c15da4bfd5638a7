"""The requests of a soak: one trace, again and again.

Covers: a piece of the trace, of which some conversations are known and some are new.
Does not cover: making the trace up (``replay.generate``).
Who calls it: ``driver`` and ``child``; pure, seeded.

Every piece has the same arrivals and lengths, so that pieces can be compared. Known
conversations are the same blocks in each piece: their prefixes are loaded. New ones
have blocks that no piece had before: they are computed and stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import xxhash

from shmoffload.replay.generate import MultiTurn, generate
from shmoffload.replay.requests import ReplayRequest, Workload


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace that all pieces are made from."""

    whole: Workload
    known: frozenset[bytes]
    """Blocks that are the same in every piece."""


def make_trace(shape: MultiTurn) -> Trace:
    """Make the trace up; every other conversation is a known one."""
    whole = generate(shape)
    firsts: dict[bytes, int] = {}
    known: set[bytes] = set()
    for request in whole.requests:
        # A conversation is known by its first block behind the common ones.
        first = request.hashes[shape.system_blocks]
        number = firsts.setdefault(first, len(firsts))
        known.update(request.hashes[: shape.system_blocks])
        if number % 2 == 0:
            known.update(request.hashes)
    return Trace(whole, frozenset(known))


def make_piece(trace: Trace, number: int) -> Workload:
    """Return piece ``number`` of a trace."""
    salt = b"piece %d" % number
    renamed: dict[bytes, bytes] = {}

    def name_of(block: bytes) -> bytes:
        if block in trace.known:
            return block
        if block not in renamed:
            renamed[block] = xxhash.xxh3_128_digest(salt + block)
        return renamed[block]

    requests: list[ReplayRequest] = [
        replace(
            request,
            req_id=f"p{number}-{request.req_id}",
            hashes=[name_of(block) for block in request.hashes],
        )
        for request in trace.whole.requests
    ]
    return Workload(
        f"{trace.whole.name}, piece {number}", trace.whole.block_tokens, requests
    )
