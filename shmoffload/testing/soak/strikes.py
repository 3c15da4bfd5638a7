"""How each fault is brought about, and what has to follow.

Covers: faults of the live engine's tiers: deaths, calls, files, answers.
Does not cover: the second session's (``second``), waiting limits (``lane``).
Who calls it: ``lane``, in the thread that steps the engine.

A fault is a generator: it yields False while it waits, True in the instant in which
it has struck a target with an open job, and ends when all is well again. Nothing
here waits, so that the engine goes on; a fault that is closed midway takes its
orders back.

Faults of calls strike within a call, which is made for an open job. For the others
the job's call is held in its middle, or the job is seen to be open, in the same step.
"""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING, Final, TypeAlias

from shmoffload.testing.faults.control import Call
from shmoffload.testing.faults.damage import Damage, damage
from shmoffload.testing.faults.deaths import Death, resume, strike
from shmoffload.testing.frames import FrameFuzzer
from shmoffload.testing.soak.plan import Stage
from shmoffload.testing.soak.target import TryLaterError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from shmoffload.testing.soak.plan import Fault
    from shmoffload.testing.soak.target import TierTarget

Strike: TypeAlias = "Generator[bool, None, None]"

EXIT_CODE: Final = 7
SLOW_S: Final = 0.2
LATE_S: Final = 0.3
SUPERVISOR_HANGS_S: Final = 0.7
FULL_FOR_STORES: Final = 3
"""Failures after which a worker backs off."""
MORE_DAMAGED_BLOCKS: Final = 9
HUNG_UP_S: Final = 0.5
"""Below the deadline of jobs: the worker lives for so long."""
DATAGRAMS_OF_GARBAGE: Final = 5
_CALLS: Final = {Stage.LOAD: Call.GET, Stage.STORE: Call.PUT, Stage.STARTING: Call.OPEN}


def strike_of(target: TierTarget, fault: Fault) -> Strike:
    """Return the fault, ready to begin."""
    return _maker_of(fault)(target, fault)


def _maker_of(fault: Fault) -> Callable[[TierTarget, Fault], Strike]:
    if fault.kind in _BY_KIND:
        return _BY_KIND[fault.kind]
    if fault.who == "call":
        return _error_starting if fault.stage is Stage.STARTING else _error
    return _BY_WHO[fault.who]


def _held(target: TierTarget, stage: Stage) -> Strike:
    """Hold a call of the stage in its middle; its job is open until ``release``."""
    if stage is Stage.STARTING:
        yield from _held_open(target)
        return
    call = _CALLS[stage]
    target.control.hold(call)
    while not (
        target.worker_pid and target.control.is_held(call) and target.has_open(stage)
    ):
        yield False


def _held_open(target: TierTarget) -> Strike:
    """End the worker, which is no fault to be counted, and hold the next one's start.

    That the next one is there shows in its pid: the old one held no ``open``.
    """
    target.control.hold(Call.OPEN)
    while not (pid := target.worker_pid):
        yield False
    strike(pid, Death.SIGKILL)
    while not (target.worker_pid and target.control.is_held(Call.OPEN)):
        yield False


# Deaths -------------------------------------------------------------------------------


def _worker(target: TierTarget, fault: Fault) -> Strike:
    try:
        yield from _held(target, fault.stage)
        epoch = target.epoch
        yield from _die(target, Death(fault.how))
    finally:
        target.clear()
    while not target.is_back(epoch):
        yield False


def _garbage(target: TierTarget, fault: Fault) -> Strike:
    """Let the worker say what means nothing, and go on."""
    fuzzer = FrameFuzzer(target.rng.randrange(1 << 32))
    before = target.control.num_struck("say")
    try:
        yield from _held(target, fault.stage)
        target.control.say(*(fuzzer.garbage() for _ in range(DATAGRAMS_OF_GARBAGE)))
        while target.control.num_struck("say") == before:
            yield False
        yield True
    finally:
        target.clear()


def _hang_up(target: TierTarget, fault: Fault) -> Strike:
    """Close the worker's queue behind its back: it lives, but cannot answer.

    It goes on writing into its slots some time later: nobody may have them by then.
    """
    before = target.control.num_struck("hang_up")
    try:
        yield from _held(target, fault.stage)
        epoch = target.epoch
        target.control.hang_up()
        while target.control.num_struck("hang_up") == before:
            yield False
        yield True
        yield from _for(HUNG_UP_S)
    finally:
        target.clear()
    while not target.is_back(epoch):
        yield False


def _die(target: TierTarget, death: Death) -> Strike:
    """Strike the worker; return when it is gone, or stopped."""
    pid = target.worker_pid
    if not pid:
        raise TryLaterError
    if death is Death.EXIT:
        target.control.exit(EXIT_CODE)
    elif not strike(pid, death):
        raise TryLaterError
    yield True
    while death is not Death.HANG and target.worker_pid == pid:
        yield False  # held: it must not answer before it dies


def _supervisor(target: TierTarget, fault: Fault) -> Strike:
    while not target.gate.ask_alone(target.tier_idx):
        yield False
    pid = 0
    try:
        yield from _held(target, fault.stage)
        pid = target.supervisor_pid
        death = Death(fault.how)
        if not (pid and strike(pid, death)):
            raise TryLaterError
        yield True
        if death is Death.HANG:
            target.control.release()  # its workers go on without it
            yield from _for(SUPERVISOR_HANGS_S)
            resume(pid)
        else:
            while target.supervisor_pid in (0, pid):
                yield False
    finally:
        if pid:
            resume(pid)
        target.clear()
    while not target.are_all_up():
        yield False


# Calls --------------------------------------------------------------------------------


def _overdue(target: TierTarget, fault: Fault) -> Strike:
    """Hold a call until its job's deadline has passed and the worker is ended."""
    try:
        yield from _held(target, fault.stage)
        epoch = target.epoch
        yield True
        while target.epoch == epoch:
            yield False
    finally:
        target.clear()
    while not target.is_back(epoch):
        yield False


def _error(target: TierTarget, fault: Fault) -> Strike:
    number = getattr(errno, fault.how)
    yield from _ordered(
        target,
        "fail",
        lambda: target.control.fail(_CALLS[fault.stage], number),
    )


def _error_starting(target: TierTarget, fault: Fault) -> Strike:
    """The next worker's ``open`` fails; the one after it comes up."""
    number = getattr(errno, fault.how)
    epoch = target.epoch
    before = target.control.num_struck("fail")
    try:
        target.control.fail(Call.OPEN, number)
        while not (pid := target.worker_pid):
            yield False
        strike(pid, Death.SIGKILL)
        while target.control.num_struck("fail") == before:
            yield False
        yield True
        while target.epoch < epoch + 2:
            yield False
    finally:
        target.clear()
    while not target.is_up():
        yield False


def _slow(target: TierTarget, fault: Fault) -> Strike:
    call = _CALLS[fault.stage]
    yield from _ordered(target, "slow", lambda: target.control.slow(call, SLOW_S))


def _full(target: TierTarget, _: Fault) -> Strike:
    """Fill the disk until the worker backs off, then make room."""
    yield from _ordered(target, "fill", target.control.fill, times=FULL_FOR_STORES)


def _short_write(target: TierTarget, _: Fault) -> Strike:
    yield from _ordered(target, "short_write", target.control.short_write)


def _flipped_bit(target: TierTarget, _: Fault) -> Strike:
    yield from _ordered(target, "flip", target.control.flip)


def _ordered(
    target: TierTarget, kind: str, order: Callable[[], None], *, times: int = 1
) -> Strike:
    """Order a fault of calls and wait until so many calls were struck.

    It counts once, with the first.
    """
    before = target.control.num_struck(kind)
    try:
        order()
        while target.control.num_struck(kind) == before:
            yield False
        yield True
        while target.control.num_struck(kind) < before + times:
            yield False
    finally:
        target.clear()


# Files --------------------------------------------------------------------------------


def _damage(target: TierTarget, fault: Fault) -> Strike:
    """Damage some blocks, one in each step; most are never asked for again."""
    kind = Damage(fault.how)
    while not target.has_open(fault.stage):
        yield False
    if not damage(target.store, kind, target.rng):
        raise TryLaterError
    yield True
    for _ in range(MORE_DAMAGED_BLOCKS):
        damage(target.store, kind, target.rng)
        yield False


# Answers ------------------------------------------------------------------------------


def _answer(target: TierTarget, fault: Fault) -> Strike:
    """Double an answer, or let it come late: before, or after its job was given up."""
    while not target.has_open(fault.stage):
        yield False
    kind = "duplicate" if fault.how == "doubled" else "hold"
    before = target.link.num_struck(kind)
    epoch = target.epoch
    is_too_late = fault.how == "too late"
    try:
        if kind == "duplicate":
            target.link.duplicate()
        else:
            target.link.hold()
        while target.link.num_struck(kind) == before:
            yield False
        yield True
        if fault.how == "late":
            yield from _for(LATE_S)
        while is_too_late and target.epoch == epoch:
            yield False
    finally:
        target.clear()
    while is_too_late and not target.is_back(epoch):
        yield False


def _lost_answer(target: TierTarget, fault: Fault) -> Strike:
    """Lose an answer: its job's deadline passes, and the worker is ended."""
    while not target.has_open(fault.stage):
        yield False
    before = target.link.num_struck("lose")
    epoch = target.epoch
    try:
        target.link.lose()
        while target.link.num_struck("lose") == before:
            yield False
        yield True
        while target.epoch == epoch:
            yield False
    finally:
        target.clear()
    while not target.is_back(epoch):
        yield False


def _for(seconds: float) -> Strike:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        yield False


_BY_WHO: Final[dict[str, Callable[[TierTarget, Fault], Strike]]] = {
    "worker": _worker,
    "supervisor": _supervisor,
    "disk": _damage,
    "answer": _answer,
}
_BY_KIND: Final[dict[str, Callable[[TierTarget, Fault], Strike]]] = {
    "worker garbage": _garbage,
    "worker hang-up": _hang_up,
    "answer lost": _lost_answer,
    "call overdue": _overdue,
    "call slow": _slow,
    "disk full": _full,
    "call short write": _short_write,
    "call flipped bit": _flipped_bit,
}
