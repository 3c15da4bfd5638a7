"""Recorded coding-agent sessions of kv-cache-tester.

Covers: a directory of session files, their times on one clock.
Does not cover: JSONL traces (``jsonl``), writing (``compact``).
Who calls it: ``convert.read_source``; reads files; a wrong file is a ``TraceError``.

Fields, from callanjfox/kv-cache-tester, docs/trace_replay_tester.md and its traces
folder: a file is one session with ``id``, ``block_size`` (64 tokens),
``hash_id_scope`` (``local``: ids mean something inside the session only; ``global``)
and ``requests``. A request has ``t`` (seconds since the session began), ``in``,
``out`` and ``hash_ids`` of its full blocks. An entry of type ``subagent`` has
``requests`` of its own in the same name space; they are placed at its ``t``.

Sessions have no common clock, so one is made up, and said so in the file: some users
each play sessions in a shuffled order, one after the other with a pause; recorded
gaps are kept up to a limit.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from shmoffload.errors import TraceError
from shmoffload.replay.convert.compact import SourceTrace, TraceRow
from shmoffload.replay.convert.jsonl import data_of, lines_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence
    from pathlib import Path

START_WITHIN_S: Final = 600.0
MAX_GAP_S: Final = 3600.0
PAUSE_S: Final = (1.0, 60.0)


class SessionRequest(msgspec.Struct, rename={"num_input": "in", "num_output": "out"}):
    """A request, or a ``subagent`` entry with requests of its own."""

    t: float = 0.0
    type: str = ""
    num_input: int = 0
    num_output: int = 0
    hash_ids: list[int] = []
    requests: list[SessionRequest] = []


class Session(msgspec.Struct):
    """One session file; see the module."""

    requests: list[SessionRequest]
    block_size: int
    id: str = ""
    hash_id_scope: str = "local"


@dataclass(frozen=True, slots=True)
class Playback:
    """How sessions are put on one clock.

    Attributes:
        num_users: that play at the same time.
        seed: of order, starts and pauses.
    """

    num_users: int = 32
    seed: int = 7


def read_sessions(path: Path, playback: Playback) -> SourceTrace:
    """Read a directory of session files, or a file with one session a line.

    Raises:
        TraceError: a wrong file, no session, or blocks of several sizes.
    """
    sessions = _load(path)
    sizes = sorted({session.block_size for session in sessions})
    if len(sizes) != 1 or sizes[0] < 1:
        raise TraceError(
            f"{path} has sessions with blocks of {sizes} tokens, one size is needed: "
            f"give a directory of kv-cache-tester traces"
        )
    return SourceTrace(
        list(_played(sessions, playback)),
        sizes[0],
        has_partial_tail=False,
        meta={
            "source": path.name,
            "format": "kv-cache-tester",
            "arrivals": f"composed: {playback.num_users} users, seed {playback.seed}, "
            f"starts within {START_WITHIN_S:g} s, gaps up to {MAX_GAP_S:g} s",
        },
    )


def _load(path: Path) -> list[Session]:
    """Read every session; exact copies count once."""
    if not path.is_dir():
        return list(lines_of(path, Session))
    decoder = msgspec.json.Decoder(Session)
    sessions = []
    seen: set[bytes] = set()
    for file in sorted(path.glob("*.json")):
        data = data_of(file)
        try:
            session = decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(
                f"{file} is no session ({error}): give a directory of kv-cache-tester "
                f"traces"
            ) from error
        content = msgspec.json.encode(session.requests)
        if content not in seen:
            seen.add(content)
            sessions.append(session)
    return sessions


def _played(sessions: Sequence[Session], playback: Playback) -> Iterator[TraceRow]:
    rng = random.Random(playback.seed)
    order = list(range(len(sessions)))
    rng.shuffle(order)
    num_users = max(1, min(playback.num_users, len(order)))
    for user in range(num_users):
        now_s = rng.uniform(0, START_WITHIN_S)
        for number in order[user::num_users]:
            session = sessions[number]
            scope = -1 if session.hash_id_scope == "global" else number
            previous_s = 0.0
            for t_s, request in _flat(session.requests):
                now_s += min(max(0.0, t_s - previous_s), MAX_GAP_S)
                previous_s = max(previous_s, t_s)
                names: list[Hashable] = [(scope, i) for i in request.hash_ids]
                yield TraceRow(
                    round(now_s * 1000),
                    request.num_input,
                    request.num_output,
                    names,
                    session=number,
                )
            now_s += rng.uniform(*PAUSE_S)


def _flat(
    requests: Sequence[SessionRequest], at_s: float | None = None
) -> Iterator[tuple[float, SessionRequest]]:
    """Yield requests with their time; those of a sub-agent at its own."""
    for request in requests:
        t_s = request.t if at_s is None else at_s
        if request.type == "subagent":
            yield from _flat(request.requests, t_s)
        else:
            yield t_s, request
