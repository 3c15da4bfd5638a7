"""``shmoffload status``: one read-only screen of a live session.

Covers: reading the session page, judging health, the screen, ``--json``.
Does not cover: what writes the words (``wire.session`` names each writer).
Who calls it: ``cli.main``, ``tools/status.py``; blocks on nothing, asks nobody.

Live is a page that some process holds. An idle engine does not step, so its life
is its owner lock, not a heartbeat; the supervisor's is a heartbeat of under 5 s.
Plain text and few imports: the whole call costs under 0.3 s of CPU.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final

from shmoffload.cli.options import Parser
from shmoffload.errors import BadInputError, NoSessionError
from shmoffload.wire.names import is_held, live_sessions, owner_name, page_name
from shmoffload.wire.session import (
    PAGE_VERSION,
    Fault,
    SessionPage,
    TierState,
    TierWord,
    Word,
)
from shmoffload.wire.sizes import format_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

SUPERVISOR_SILENT_S: Final = 5.0
_COLUMNS: Final = (
    "tier,type,state,pid,queue,used,capacity,blocks,hits,errors,restarts,age,last error"
)
_REFUSALS: Final = {
    Fault.NO_SPACE: ("no space", "free some, or lower its max_bytes or min_free"),
    Fault.IO: ("I/O error", "check the disk"),
    Fault.NO_FILES: ("too many open files", "raise the limit (ulimit -n)"),
    Fault.NO_ACCESS: ("no permission", "let this user write its path"),
    Fault.READ_ONLY: (
        "read-only file system",
        "mount it to be written, check the disk",
    ),
    Fault.OTHER: ("other reasons", "its worker's log has the words"),
}
"""What the system said, and what to do; a tier gets over it by itself."""


def status_command(argv: Sequence[str]) -> int:
    """Print the status of a session.

    Returns:
        0 healthy, 1 degraded.

    Raises:
        NoSessionError: none is live (exit code 3).
        BadInputError: wrong options, or several sessions and none named.
    """
    options = _parse(argv)
    session = options.session or _the_only_session()
    if not is_held(page_name(session)):
        raise NoSessionError(_no_session(session))
    page = SessionPage.look(session)
    try:
        if page.get(Word.VERSION) != PAGE_VERSION:
            raise NoSessionError(
                f'session "{session}" runs another version of shmoffload: use that '
                f"version's status"
            )
        status = read_status(page, now_ns=time.monotonic_ns())
    finally:
        page.close()
    print(json.dumps(status, indent=2) if options.json else render(status))
    return 1 if status["problems"] else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "status",
        "One read-only screen of a live session.",
        "0 healthy, 1 degraded, 2 bad input, 3 no session",
    )
    parser.add_argument("--session", metavar="NAME", help="which one, if several live")
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser.read(argv)


def _the_only_session() -> str:
    live = list(live_sessions())
    if not live:
        raise NoSessionError(_no_session(None))
    if len(live) > 1:
        raise BadInputError(
            f"{len(live)} sessions are live ({', '.join(live)}): name one with "
            f"--session NAME"
        )
    return live[0]


def _no_session(session: str | None) -> str:
    which = f'session "{session}"' if session else "session"
    return (
        f"no {which} is live here: start an engine, or a daemon with "
        f"`shmoffload serve -c FILE`"
    )


def read_status(page: SessionPage, *, now_ns: int) -> dict[str, Any]:
    """Read a page into plain data, the shape of ``--json``.

    Args:
        page: mapped, read-only is enough.
        now_ns: CLOCK_MONOTONIC, the clock of the heartbeats.
    """
    engine_is_alive = is_held(owner_name(page.session), exclusively=True)
    beat_ns = page.get(Word.SUPERVISOR_HEARTBEAT_NS)
    silent_s = max(0, now_ns - beat_ns) / 1e9 if beat_ns else None
    stride = page.get(Word.STRIDE_BYTES)
    status: dict[str, Any] = {
        "session": page.session,
        "status": "",
        "problems": [],
        "age_s": round(max(0, time.time_ns() - page.get(Word.CREATED_NS)) / 1e9, 1),
        "engine": {
            "alive": engine_is_alive,
            "closed": bool(page.get(Word.ENGINE_CLOSED)),
            "pid": page.get(Word.ENGINE_PID),
            "epoch": page.get(Word.ENGINE_EPOCH),
        },
        "supervisor": {
            "alive": silent_s is not None and silent_s < SUPERVISOR_SILENT_S,
            "pid": page.get(Word.SUPERVISOR_PID),
            "heartbeat_age_s": None if silent_s is None else round(silent_s, 1),
        },
        "primary": {
            "slots": page.get(Word.NUM_SLOTS),
            "block_bytes": page.get(Word.BLOCK_BYTES),
            "bytes": page.get(Word.NUM_SLOTS) * stride,
            "ready": page.get(Word.SLOTS_READY),
            "pending": page.get(Word.SLOTS_PENDING),
            "quarantined": page.get(Word.SLOTS_QUARANTINED),
        },
        "counters": {
            word.name.lower(): page.get(word)
            for word in Word
            if Word.STEPS <= word <= Word.ALLOCATION_FAILURES
        },
        "tiers": [_read_tier(page, i, now_ns) for i in range(page.num_tiers)],
    }
    # However the last engine ended: once its workers are stopped nothing is amiss.
    is_waiting = not engine_is_alive and all(
        tier["state"] == TierState.STOPPED.name for tier in status["tiers"]
    )
    status["problems"] = _problems(status, is_waiting=is_waiting)
    if not status["supervisor"]["alive"]:
        for tier in status["tiers"]:  # nobody is there to say so
            tier["state"], tier["pid"] = "UNKNOWN", 0
    status["status"] = (
        "degraded"
        if status["problems"]
        else "waiting for an engine"
        if is_waiting
        else "healthy"
    )
    return status


def _read_tier(page: SessionPage, tier_idx: int, now_ns: int) -> dict[str, Any]:
    base = page.tier_base(tier_idx)
    words = {word: page.words[base + word] for word in TierWord}
    name, kind = page.tier_name(tier_idx)
    state = words[TierWord.STATE]
    is_running = state in (TierState.STARTING, TierState.UP)
    started_ns = words[TierWord.STARTED_NS]
    backing_off = words[TierWord.BACKING_OFF]
    return {
        "name": name,
        "type": kind,
        "state": TierState(state).name if state in set(TierState) else str(state),
        "pid": words[TierWord.WORKER_PID],
        "age_s": round(max(0, now_ns - started_ns) / 1e9, 1) if is_running else None,
        "errors": words[TierWord.JOBS_FAILED]
        + words[TierWord.BLOCKS_BAD]
        + words[TierWord.BLOCKS_FAILED],
        "last_error": page.tier_error(tier_idx),
        **{
            word.name.lower(): words[word]
            for word in TierWord
            if word >= TierWord.CAPACITY_BYTES or word is TierWord.RESTARTS
        },
        "backing_off": Fault(backing_off).name if backing_off in set(Fault) else None,
    }


def _problems(status: dict[str, Any], *, is_waiting: bool) -> list[str]:
    """Return a sentence for each thing that is not as it should be."""
    problems = []
    if not status["supervisor"]["alive"]:
        problems.append("the supervisor is silent")
    if is_waiting:
        return problems  # tiers start with the engine
    if not status["engine"]["alive"]:
        problems.append("the engine is gone")
    if not status["supervisor"]["alive"]:
        return problems  # what the page says of tiers is old
    problems.extend(
        f"tier {tier['name']} is {tier['state']}"
        + (f": {tier['last_error']}" if tier["last_error"] else "")
        for tier in status["tiers"]
        if tier["state"] != TierState.UP.name
    )
    for tier in status["tiers"]:
        if tier["state"] == TierState.UP.name and tier["backing_off"]:
            what, todo = _REFUSALS[Fault[tier["backing_off"]]]
            problems.append(f"tier {tier['name']} takes no stores now ({what}): {todo}")
    return problems


def render(status: dict[str, Any]) -> str:
    """Lay a status out for a terminal."""
    engine, supervisor = status["engine"], status["supervisor"]
    primary, counters = status["primary"], status["counters"]
    silent = supervisor["heartbeat_age_s"]
    life = "alive" if engine["alive"] else "closed" if engine["closed"] else "not here"
    lines = [
        f"session     {status['session']}: {status['status']}, "
        f"up {_age(status['age_s'])}",
        f"engine      {life}, pid {engine['pid'] or '-'}, {counters['steps']} steps, "
        f"{counters['requests']} requests",
        f"supervisor  {'alive' if supervisor['alive'] else 'silent'}, "
        f"pid {supervisor['pid'] or '-'}, heartbeat "
        + ("never" if silent is None else f"{silent:g} s ago"),
        f"primary     {primary['ready']} of {primary['slots']} blocks ready, "
        f"{primary['pending']} pending, {primary['quarantined']} quarantined, "
        f"{format_size(primary['bytes'])}; {counters['hits_primary']} hits, "
        f"{counters['misses']} misses",
        "",
        *_table(status["tiers"]),
        *filter(None, map(_refusals, status["tiers"])),
        *[f"! {problem}" for problem in status["problems"]],
    ]
    return "\n".join(lines)


def _table(tiers: list[dict[str, Any]]) -> list[str]:
    rows = [_COLUMNS.split(",")]
    rows += [
        [
            tier["name"],
            tier["type"],
            tier["state"],
            str(tier["pid"] or "-"),
            str(tier["jobs_queued"]),
            format_size(tier["used_bytes"]),
            format_size(tier["capacity_bytes"]) if tier["capacity_bytes"] else "-",
            str(tier["resident_blocks"]),
            str(tier["hits"]),
            str(tier["errors"]),
            str(tier["restarts"]),
            _age(tier["age_s"]),
            tier["last_error"] or "-",
        ]
        for tier in tiers
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows if len(rows) > 1
    ]


def _refusals(tier: dict[str, Any]) -> str:
    """Return what the disk has done to a tier's blocks; "" if nothing."""
    parts = [
        f"{num} {what}"
        for fault, (what, _) in _REFUSALS.items()
        if (num := tier[fault.word.name.lower()])
    ]
    if tier["blocks_bad"]:
        parts.append(f"{tier['blocks_bad']} corrupt, removed")
    return f"blocks refused by {tier['name']}: {', '.join(parts)}" if parts else ""


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"
