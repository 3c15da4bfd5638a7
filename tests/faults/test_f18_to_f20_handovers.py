"""F18 to F20 with real workers: hand-overs that fail, slots that are in use."""

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
    fill,
    finish,
    key,
    keys,
    look,
    look_step,
    look_until,
    make_config,
    not_waiting,
    put_in_tiers,
    step_until,
    wait_word,
    word,
)

from shmoffload.core.types import OffloadKey
from shmoffload.engine import Engine
from shmoffload.testing.faults.control import Call
from shmoffload.testing.faults.deaths import (
    Death,
    resume,
    strike,
    supervisor_pid,
    wait_gone,
    worker_pid,
)
from shmoffload.wire.session import TierWord

pytestmark = pytest.mark.timeout(300)


def is_back(engine, pid):
    return word(engine, TierWord.WORKER_PID) not in (0, pid) and engine.tiers[0].is_up


def test_f18_worker_that_is_gone_when_a_job_is_handed_over(session_name, control):
    """The first, second or third job meets a dead worker: its pins come back,
    it counts as failed, and the next worker gets the next one."""
    with Engine(make_config(session_name, [faulty(control)], slots=4)) as engine:
        for num_good in range(3):
            n = 10 * num_good
            ctx = kit.request(engine, f"r{n}")
            for i in range(num_good):
                kit.store(engine, ctx, keys(n + i))
            assert engine.wait_idle(WAIT_S)
            pid = word(engine, TierWord.WORKER_PID)
            strike(pid, Death.SIGKILL)
            wait_gone(pid)
            output = engine.prepare_store(keys(n + 5, n + 6), ctx)
            fill(engine, output)
            engine.complete_store(keys(n + 5, n + 6), ctx)
            engine.on_request_finished(ctx)
            engine.flush()  # into the dead worker's queue
            assert engine.tiers[0].num_open_jobs == 1
            step_until(engine, lambda p=pid: is_back(engine, p), "the next worker")
            check_quiet(engine)
            assert engine.tiers[0].jobs_lost == num_good + 1
            assert engine.manager.counters.cascade_jobs_failed == [num_good + 1]
            ctx = kit.request(engine, "next")
            assert kit.load(engine, ctx, keys(n + 5, n + 6)) == 2  # from the primary
            kit.store(engine, ctx, keys(n + 7, n + 8))
            finish(engine, ctx)
            check_quiet(engine)
            kit.drop_primary(engine)
            ctx = kit.request(engine, "after")
            assert look_until(engine, ctx, n + 5, n + 6) == [MISS, MISS]
            assert kit.load(engine, ctx, keys(n + 7, n + 8)) == 2
            finish(engine, ctx)


def test_f18_queue_that_is_full_refuses_and_loses_nothing(session_name, control):
    """A worker that does not listen: jobs pile up to the bound, the rest is told
    as not sent; nobody waits, and all is in order when it listens again."""
    tier = faulty(control, policy="request_level")
    config = make_config(session_name, [tier], slots=4, outbox_messages=600)
    with Engine(config) as engine:
        first = kit.request(engine, "first")
        kit.store(engine, first, keys(1))
        assert engine.wait_idle(WAIT_S)
        tap, dropped = Tap(engine), engine.manager.counters.cascade_jobs_dropped
        tap.shrink(64 << 10)
        pid = word(engine, TierWord.WORKER_PID)
        strike(pid, Death.HANG)
        names = []
        while dropped[0] < 20:
            assert len(names) < 2000
            ctx = kit.request(engine, f"r{len(names)}")
            names.append(ctx.req_id)
            with not_waiting():
                engine.step_begin()
                assert engine.prepare_store(keys(1), ctx).keys_to_store == []
                engine.on_request_finished(ctx)
                engine.on_schedule_end(kit.END)
        assert engine._links[0].num_unsent > 0
        assert engine.manager.table.num_pinned == 1
        resume(pid)
        finish(engine, first)
        check_quiet(engine)
        told = {name: tap.of(name) for name in names}
        got = [name for name in names if told[name]]
        assert len(got) == len(names) - 20
        order = [("new",), ("store", 1), ("finished",)]
        assert all(told[name] == order for name in got)
        assert word(engine, TierWord.GARBAGE_FRAMES) == 0
        assert len(tap.done) == len(got)
        wait_word(engine, TierWord.BLOCKS_SKIPPED, len(got))
        ctx = kit.request(engine, "next")
        assert kit.store(engine, ctx, keys(2)) == keys(2)
        finish(engine, ctx)
        check_quiet(engine)
        assert word(engine, TierWord.RESIDENT_BLOCKS) == 2


@pytest.mark.parametrize("bad", [b"abc", b"k" * 41])
def test_f18_message_that_no_worker_takes(session_name, control, bad):
    """What is no key, in requests whose names no text can hold: the job fails."""
    bad = OffloadKey(bad)
    with Engine(make_config(session_name, [faulty(control)], slots=2)) as engine:
        for i, name in enumerate(("\ud800", "漢" * 5000, "r\0")):
            ctx = kit.request(engine, name)
            kit.step(engine)
            engine.step_begin()
            granted = engine.prepare_store([bad, key(i)], ctx)
            assert len(granted.keys_to_store) == 2
            engine.complete_store([bad, key(i)], ctx)
            engine.on_schedule_end(kit.END)
            assert engine.wait_idle(WAIT_S)
            assert engine.tiers[0].jobs_failed == i + 1
            assert engine.manager.table.num_pinned == 0
            kit.drop_primary(engine)
            assert look_step(engine, ctx, i) == [MISS]
            kit.store(engine, ctx, keys(i))
            finish(engine, ctx)
            check_quiet(engine)
        kit.drop_primary(engine)
        ctx = kit.request(engine, "all")
        assert kit.load(engine, ctx, keys(0, 1)) == 2
        assert word(engine, TierWord.GARBAGE_FRAMES) == 3


@pytest.mark.parametrize("stage", ["queued", "running", "answered", "applied"])
def test_f19_slot_is_freed_once(session_name, control, stage):
    """Aborted, reset, then answered: every slot is free once, and given out once."""
    with Engine(make_config(session_name, [faulty(control)], slots=4)) as engine:
        put_in_tiers(engine, 1, 2)
        control.hold(Call.GET)
        before = word(engine, TierWord.COMPLETIONS)
        a = kit.request(engine, "a")
        engine.step_begin()
        assert look(engine, a, 1, 2) == [PENDING, PENDING]
        if stage != "queued":
            engine.on_schedule_end(kit.END)
            control.wait_held(Call.GET)
        if stage in ("answered", "applied"):
            control.release()
            wait_word(engine, TierWord.COMPLETIONS, before + 1)
        if stage == "applied":
            kit.step(engine)
        engine.on_request_finished(a)
        engine.reset_cache()
        engine.reset_cache()
        kit.step(engine)
        control.release()
        check_quiet(engine)
        table = engine.manager.table
        free = [*range(table._next_unused, table.num_slots), *table._returned]
        assert sorted(free) == [0, 1, 2, 3]
        b = kit.request(engine, "b")
        engine.step_begin()
        output = engine.prepare_store(keys(*range(10, 14)), b)
        assert sorted(output.slots.tolist()) == [0, 1, 2, 3]
        fill(engine, output)
        engine.complete_store(output.keys_to_store, b)
        engine.on_schedule_end(kit.END)
        finish(engine, b)
        check_quiet(engine)
        kit.drop_primary(engine)
        c = kit.request(engine, "c")
        assert kit.load(engine, c, keys(*range(10, 14))) == 4


def test_f19_a_job_has_its_own_numbers(session_name, control):
    """Whoever scribbles on an array that we returned moves no byte of a tier."""
    with Engine(make_config(session_name, [faulty(control)], slots=4)) as engine:
        a = kit.request(engine, "a")
        control.hold(Call.PUT)
        engine.step_begin()
        output = engine.prepare_store(keys(1, 2), a)
        fill(engine, output)
        output.slots[:] = output.slots[::-1].copy()
        engine.complete_store(keys(1, 2), a)
        output.slots[:] = -1
        engine.on_schedule_end(kit.END)
        control.wait_held(Call.PUT)
        output.slots[:] = 3
        control.release()
        assert engine.wait_idle(WAIT_S)
        kit.drop_primary(engine)
        assert look_until(engine, a, 1, 2) == [HIT, HIT]
        engine.step_begin()
        look(engine, a, 1, 2)
        slots = engine.prepare_load(keys(1, 2), a)
        slots[:] = -1
        engine.complete_load(keys(1, 2), a)
        engine.on_schedule_end(kit.END)
        assert kit.load(engine, a, keys(1, 2)) == 2
        finish(engine, a)
        check_quiet(engine)


@pytest.mark.parametrize("end", ["answer", "death"])
def test_f20_a_missed_deadline_proves_no_end(session_name, control, end):
    """The slots of a read that is overdue stay closed, for as long as it takes.

    The supervisor sleeps, so that nobody ends the worker; then the worker answers,
    late, or the supervisor wakes up and kills it.
    """
    config = make_config(session_name, [faulty(control)], slots=6, job_deadline_s=1.0)
    with Engine(config) as engine:
        put_in_tiers(engine, 1, 2, 3)
        table, tier = engine.manager.table, engine.tiers[0]
        pid, supervisor = worker_pid(session_name), supervisor_pid(session_name)
        control.hold(Call.GET)
        a = kit.request(engine, "a")
        assert look_step(engine, a, 1, 2) == [PENDING, PENDING]
        closed = {table.blocks[k].slot for k in keys(1, 2)}
        control.wait_held(Call.GET)
        strike(supervisor, Death.HANG)
        try:
            step_until(engine, lambda: table.num_quarantined == 2, "the deadline")
            assert look_step(engine, a, 1, 2) == [MISS, MISS]
            assert not engine.has_pending_work()
            used = fill_pool(engine, 10)
            assert used == set(range(6)) - closed
            if end == "answer":
                control.release()
                step_until(engine, lambda: not table.num_quarantined, "the answer")
                check_bytes_of_the_pool(engine, 10)
        finally:
            resume(supervisor)
        step_until(engine, lambda: is_back(engine, pid), "the next worker")
        control.release()
        assert tier.jobs_lost == (end == "death")
        assert table.num_quarantined == 0
        check_bytes_of_the_pool(engine, 10)
        assert fill_pool(engine, 20) >= closed
        assert engine.wait_idle(WAIT_S)
        finish(engine, a)
        b = kit.request(engine, "b")
        assert kit.load(engine, b, keys(1, 2, 3)) == 3
        finish(engine, b)
        check_quiet(engine)


def fill_pool(engine, first):
    """Take what slots there are, one block at a time; return them."""
    used = set()
    ctx = kit.request(engine, f"fill-{first}")
    engine.step_begin()
    for n in range(first, first + 10):
        output = engine.prepare_store(keys(n), ctx)
        if output is not None:
            used.update(output.slots.tolist())
            fill(engine, output)
            engine.complete_store(keys(n), ctx)
    engine.on_schedule_end(kit.END)
    finish(engine, ctx)
    return used


def check_bytes_of_the_pool(engine, first):
    """Every block that is readable has its own bytes."""
    table = engine.manager.table
    readable = [b for b in table.blocks.values() if b.owner is None]
    assert len(readable) >= 4
    for block in readable:
        assert bytes(engine.slot_view(block.slot)) == kit.bytes_of(block.key)
