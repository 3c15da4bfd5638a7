"""F21 and F22 with real workers: blocks that have gone bad below a tier."""

import errno
import os

import engine_kit as kit
import pytest
from faults_kit import (
    HIT,
    MISS,
    PENDING,
    WAIT_S,
    Tap,
    check_quiet,
    faulty,
    files_of,
    finish,
    key,
    keys,
    load_right,
    look,
    look_step,
    look_until,
    make_config,
    num_refused,
    put_in_tiers,
    step_until,
    word,
)

from shmoffload.engine import Engine
from shmoffload.testing.faults.control import Call
from shmoffload.testing.faults.deaths import (
    Death,
    strike,
)
from shmoffload.wire.session import Fault, TierWord

pytestmark = pytest.mark.timeout(300)


TAKEN_OUT = {"truncated": TierWord.BLOCKS_BAD, "deleted": TierWord.BLOCKS_MISSED}
REFUSED = {
    errno.EIO: Fault.IO,
    errno.EMFILE: Fault.NO_FILES,
    errno.EACCES: Fault.NO_ACCESS,
}


@pytest.mark.parametrize("what", [*TAKEN_OUT, *REFUSED])
def test_f21_bad_block_is_read_once_and_only_a_short_one_is_removed(
    session_name, make_control, what
):
    """Gone bad after the lookup: one attempt, then MISS, however often one asks.

    A refusal of the system proves nothing against the file: it stays, and the next
    life of the tier has the block.
    """
    control = make_control(inner="fs")
    config = make_config(session_name, [faulty(control)], slots=4)
    with Engine(config) as engine:
        put_in_tiers(engine, 1, 2)
        file = files_of(control)[key(1)]
        tap = Tap(engine)
        a = kit.request(engine, "a")
        engine.step_begin()
        assert look(engine, a, 1) == [PENDING]
        if what == "truncated":
            os.truncate(file, file.stat().st_size - 1)
        elif what == "deleted":
            file.unlink()
        else:
            control.fail(Call.GET, what)
        engine.on_schedule_end(kit.END)
        assert look_until(engine, a, 1) == [MISS]
        for _ in range(50):
            assert look_step(engine, a, 1) == [MISS]
        b = kit.request(engine, "b")  # what could not be read is not held any more
        assert look_step(engine, b, 1) == [MISS]
        assert tap.said("load") == [["a", 1]]
        if what in TAKEN_OUT:
            assert word(engine, TAKEN_OUT[what]) == 1
            assert num_refused(engine) == {}
            assert not file.exists()
        else:
            assert num_refused(engine) == {REFUSED[what]: 1}
            assert file.stat().st_size == engine.config.stride
        assert kit.load(engine, b, keys(2)) == 1
        restart(engine)  # the next one looks at its files again
        is_gone = what in TAKEN_OUT
        assert look_step(engine, a, 1) == [MISS]  # one try per request, all the same
        c = kit.request(engine, "c")
        assert kit.load(engine, c, keys(2, 1)) == 2 - is_gone
        finish(engine, a, b, c)
        check_quiet(engine)


def restart(engine, tier_idx=0):
    """Kill a tier's worker; wait for the next one."""
    pid = word(engine, TierWord.WORKER_PID, tier_idx)
    strike(pid, Death.SIGKILL)
    step_until(
        engine,
        lambda: (
            engine.tiers[tier_idx].is_up
            and word(engine, TierWord.WORKER_PID, tier_idx) not in (0, pid)
        ),
        "the next worker",
    )


def empty_listener(engine):
    """Let the second tier, a memory, forget what it has; return its queue's tap."""
    restart(engine, 1)
    assert engine.tiers[1].num_resident == 0
    return Tap(engine, 1)


@pytest.mark.parametrize(("inner", "bad"), [("fs", 2), ("slab", 7)])
def test_f22_one_bad_block_of_eight_costs_one(session_name, make_control, inner, bad):
    """The other seven are HIT; who waits for them never gets the eighth."""
    control = make_control(inner=inner)
    tiers = [
        faulty(control),
        {"type": "memory", "max_bytes": "4MiB", "policy": "request_level", "nice": 0},
    ]
    with Engine(make_config(session_name, tiers, slots=16)) as engine:
        put_in_tiers(engine, *range(8))
        tap = empty_listener(engine)
        if inner == "fs":
            file = files_of(control)[key(bad)]
            os.truncate(file, file.stat().st_size // 2)
        else:
            control.flip()  # in the last that is read
        a, b = kit.request(engine, "a"), kit.request(engine, "b")
        engine.step_begin()
        assert look(engine, a, *range(8)) == [PENDING] * 8
        assert engine.prepare_store(keys(*range(8)), b).keys_to_store == []
        engine.on_schedule_end(kit.END)
        good = [n for n in range(8) if n != bad]
        answers = look_until(engine, a, *range(8))
        assert answers == [HIT if n in good else MISS for n in range(8)]
        engine.step_begin()
        look(engine, a, *good)
        load_right(engine, a, *good)
        engine.on_schedule_end(kit.END)
        assert engine.wait_idle(WAIT_S)
        assert tap.said("store") == [["b", *good]]
        assert engine.tiers[1].num_resident == 7
        counters = engine.manager.counters
        assert (counters.promotions_landed, counters.promotions_failed) == (7, 1)
        assert word(engine, TierWord.BLOCKS_BAD) == engine.tiers[0].jobs_failed == 1
        finish(engine, a, b)
        assert tap.said("missing", "b") == [["b", bad]]  # told, before the end
        check_quiet(engine)
        kit.drop_primary(engine)
        strike(word(engine, TierWord.WORKER_PID), Death.SIGKILL)
        step_until(engine, lambda: not engine.tiers[0].is_up, "the death")
        c = kit.request(engine, "c")  # from the listener: what it got is right
        assert kit.load(engine, c, keys(*good)) == 7
        finish(engine, c)
