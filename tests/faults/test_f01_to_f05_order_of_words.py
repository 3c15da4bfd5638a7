"""F01 to F05 over real queues: who hears what and when, and what lookup says.

What the core decides is in ``tests/unit/faults``; here its words cross a queue to a
worker that moves bytes, late where that is the point.
"""

import random

import engine_kit as kit
import pytest
from faults_kit import (
    HIT,
    MISS,
    PENDING,
    RETRY,
    WAIT_S,
    Tap,
    check_quiet,
    faulty,
    fill,
    finish,
    key,
    keys,
    load_right,
    look,
    look_step,
    look_until,
    make_config,
    numbers,
    put_in_tiers,
    step_until,
    wait_word,
    word,
)

from shmoffload.engine import Engine
from shmoffload.testing.faults.control import Call
from shmoffload.testing.faults.deaths import Death, strike, wait_gone
from shmoffload.testing.poll import wait_until
from shmoffload.wire.session import TierWord

pytestmark = pytest.mark.timeout(300)


def test_f01_block_in_the_making_reaches_the_tier_for_the_other_request(
    session_name, control
):
    """Written by another's store or by a promotion, it is sent once for each.

    And "finished" of the one that waits follows its store, in the queue.
    """
    tier = faulty(control, policy="request_level")
    with Engine(make_config(session_name, [tier], slots=4)) as engine:
        tap = Tap(engine)
        a, b = kit.request(engine, "a"), kit.request(engine, "b")
        engine.step_begin()
        output = engine.prepare_store(keys(1), a)
        assert numbers(engine.prepare_store(keys(1), b).keys_to_store) == []
        engine.on_request_finished(b)
        engine.on_schedule_end(kit.END)
        assert engine.has_pending_work()
        assert tap.log == []
        fill(engine, output)
        engine.complete_store(keys(1), a)
        kit.step(engine)
        assert tap.of("a") == [("new",), ("store", 1)]
        assert tap.of("b") == [("new",), ("store", 1), ("finished",)]
        finish(engine, a)
        check_quiet(engine)
        assert word(engine, TierWord.BLOCKS_WRITTEN) == 1
        wait_word(engine, TierWord.BLOCKS_SKIPPED, 1)

        kit.drop_primary(engine)  # again, with a promotion as the writer
        control.hold(Call.GET)
        c, d = kit.request(engine, "c"), kit.request(engine, "d")
        assert look_step(engine, c, 1) == [PENDING]
        engine.step_begin()
        assert numbers(engine.prepare_store(keys(1), d).keys_to_store) == []
        engine.on_request_finished(d)
        engine.on_schedule_end(kit.END)
        control.wait_held(Call.GET, meanwhile=lambda: kit.step(engine))
        assert engine.has_pending_work()
        assert tap.of("d") == []
        control.release()
        step_until(engine, lambda: tap.said("finished", "d"), "the end of d")
        assert tap.of("c") == [("new",), ("load", 1)]
        assert tap.of("d") == [("new",), ("store", 1), ("finished",)]
        assert look(engine, c, 1) == [HIT]
        load_right(engine, c, 1)
        finish(engine, c)
        check_quiet(engine)


def test_f02_finished_follows_the_stores_and_does_not_wait_for_their_end(
    session_name, make_control
):
    """One ordered queue: announce, store, finished; once, on each tier.

    "Finished" says that nothing more is submitted; the transfer may still run.
    """
    controls = [make_control("one"), make_control("two", inner="fs")]
    tiers = [faulty(c, name=f"t{i}") for i, c in enumerate(controls)]
    with Engine(make_config(session_name, tiers, slots=4)) as engine:
        taps = [Tap(engine, i) for i in range(2)]
        for control in controls:
            control.hold(Call.PUT)
        a = kit.request(engine, "a")
        engine.step_begin()
        output = engine.prepare_store(keys(1, 2), a)
        engine.on_request_finished(a)
        engine.on_schedule_end(kit.END)
        assert [tap.log for tap in taps] == [[], []]
        fill(engine, output)
        engine.complete_store(keys(1, 2), a)
        kit.step(engine)
        for control, tap in zip(controls, taps, strict=True):
            control.wait_held(Call.PUT)
            kit.step(engine)
            assert tap.log == [("new", "a"), ("store", "a", 1, 2), ("finished", "a")]
            assert tap.done == []
            control.release()
        check_quiet(engine)
        assert [len(tap.done) for tap in taps] == [1, 1]
        kit.drop_primary(engine)
        assert kit.load(engine, kit.request(engine, "b"), keys(1, 2)) == 2


@pytest.mark.parametrize("num_open", [0, 1])
def test_f03_offer_after_the_finish_is_refused_whatever_still_runs(
    session_name, control, num_open
):
    """None and a counter, no exception; the worker never hears of the block."""
    with Engine(make_config(session_name, [faulty(control)], slots=4)) as engine:
        tap = Tap(engine)
        control.hold(Call.PUT)
        a = kit.request(engine, "a")
        if num_open:
            kit.store(engine, a, keys(1, 2))
            control.wait_held(Call.PUT)
        kit.step(engine)
        finish(engine, a)
        engine.step_begin()
        assert engine.prepare_store(keys(3), a) is None
        engine.complete_store(keys(3), a)
        engine.on_schedule_end(kit.END)
        assert engine.manager.counters.late_offers == 1
        sent = [("new", "a"), ("store", "a", 1, 2), ("finished", "a")]
        assert tap.log == (sent if num_open else [])
        control.release()
        check_quiet(engine)
        assert word(engine, TierWord.RESIDENT_BLOCKS) == 2 * num_open


def test_f04_no_load_after_finished_in_the_queue(session_name, control):
    """Ours, row "nothing after finished": a promotion that waits is dropped.

    One that runs was sent before; its answer finds nobody and harms nobody.
    """
    with Engine(make_config(session_name, [faulty(control)], slots=4)) as engine:
        put_in_tiers(engine, 1, 2)
        tap = Tap(engine)
        a = kit.request(engine, "a")
        engine.step_begin()
        assert look(engine, a, 1) == [PENDING]
        engine.on_request_finished(a)
        engine.on_schedule_end(kit.END)
        assert tap.log == []
        assert engine.manager.table.num_free == 4
        check_quiet(engine)

        first, heir = kit.request(engine, "first"), kit.request(engine, "heir")
        engine.step_begin()
        assert look(engine, first, 1) == look(engine, heir, 1) == [PENDING]
        engine.on_request_finished(first)  # who asked as well inherits what waits
        engine.on_schedule_end(kit.END)
        assert tap.log == [("new", "heir"), ("load", "heir", 1)]
        assert kit.load(engine, heir, keys(1)) == 1
        finish(engine, heir)
        check_quiet(engine)
        kit.drop_primary(engine)
        tap.log.clear()

        control.hold(Call.GET)
        b = kit.request(engine, "b")
        assert look_step(engine, b, 1, 2) == [PENDING, PENDING]
        control.wait_held(Call.GET)
        finish(engine, b)
        order = [("new", "b"), ("load", "b", 1, 2), ("finished", "b")]
        assert tap.log == order
        control.release()
        check_quiet(engine)
        assert tap.log == order
        assert word(engine, TierWord.BLOCKS_READ) == 1 + 2
        c = kit.request(engine, "c")
        assert look_step(engine, c, 1, 2) == [HIT, HIT]
        engine.step_begin()
        look(engine, c, 1, 2)
        load_right(engine, c, 1, 2)
        finish(engine, c)
        assert tap.said("load") == [["b", 1, 2]]


def test_f05_each_not_now_has_its_own_answer(session_name, control):
    """The truth table, with a real tier behind it.

    A busy worker is no reason to wait for a verdict: what it holds is known here.
    """
    with Engine(make_config(session_name, [faulty(control)], slots=4)) as engine:
        put_in_tiers(engine, 1, 2, 3)
        x, a = kit.request(engine, "x"), kit.request(engine, "a")
        engine.step_begin()
        output = engine.prepare_store(keys(11, 12), x)
        assert look(engine, a, 11, 99) == [PENDING, MISS]  # being written; unknown
        fill(engine, output)
        engine.complete_store(keys(11, 12), x)
        assert look(engine, a, 11) == [HIT]
        assert look(engine, a, 1) == [PENDING]  # queued just now
        engine.on_schedule_end(kit.END)
        assert look_until(engine, a, 1) == [HIT]

        control.hold(Call.PUT)
        kit.store(engine, x, keys(13))
        control.wait_held(Call.PUT)
        assert look_step(engine, a, 2) == [PENDING]  # no RETRY for a busy tier
        control.release()
        assert engine.wait_idle(WAIT_S)

        kit.drop_primary(engine)
        engine.step_begin()
        assert engine.prepare_store(keys(21, 22, 23, 24), x) is not None
        before = engine.manager.counters.allocation_failures
        assert look(engine, a, 3) == [MISS]  # every slot is being written
        assert engine.manager.counters.allocation_failures == before + 1
        engine.complete_store(keys(21, 22, 23, 24), x, success=False)
        engine.on_schedule_end(kit.END)

        held = kit.request(engine, "held")
        engine.step_begin()
        assert engine.prepare_store(keys(31), x) is not None
        engine.on_schedule_end(kit.END)
        engine.reset_cache()  # ours, row "quarantine": it closes the writer's slot only
        assert look_step(engine, held, 3) == [PENDING]
        engine.complete_store(keys(31), x)
        assert look_until(engine, held, 3) == [HIT]
        finish(engine, a, x, held)
        check_quiet(engine)


def test_f05_a_dead_worker_is_a_miss_at_once(session_name, make_control):
    """Never "ask again": nobody will answer. Another tier that has it is asked."""
    tiers = [faulty(make_control(name), name=name) for name in ("one", "two")]
    limits = {"restart_backoff_s": 60.0, "restart_backoff_max_s": 60.0}
    with Engine(make_config(session_name, tiers, slots=4, **limits)) as engine:
        put_in_tiers(engine, 1, 2)
        a = kit.request(engine, "a")
        for tier_idx, expected in ((0, PENDING), (1, MISS)):
            kit.drop_primary(engine)
            kill_worker(engine, tier_idx)
            assert look_step(engine, a, 2, 98) == [expected, MISS]
            if expected is PENDING:
                assert kit.load(engine, a, keys(1, 2)) == 2
        assert look_step(engine, a, 1, 2) == [MISS, MISS]
        finish(engine, a)
        check_quiet(engine)


def kill_worker(engine, tier_idx):
    """Kill a worker and let the engine notice; the next one is long in coming."""
    pid = word(engine, TierWord.WORKER_PID, tier_idx)
    strike(pid, Death.SIGKILL)
    wait_gone(pid)
    step_until(engine, lambda: not engine.tiers[tier_idx].is_up, "the death")


def test_f05_nobody_is_told_to_ask_again_for_long(session_name, control):
    """Random prefixes that do not fit beside each other, workers idle.

    RETRY means "an older scan is served first", and that one ends.
    """
    longest = 12
    rng = random.Random(5)
    config = make_config(session_name, [faulty(control)], slots=6)
    with Engine(config) as engine:
        for start in range(0, 24, 6):
            put_in_tiers(engine, *range(start, start + 6))
        waiting, in_a_row, worst = {}, {}, 0
        for step in range(150):
            if len(waiting) < 3:
                name, start = f"r{step}", rng.randrange(24)
                prefix = range(start, min(24, start + rng.randint(1, 5)))
                waiting[name] = (kit.request(engine, name), prefix)
            engine.step_begin()
            for name, (ctx, prefix) in list(waiting.items()):
                answers = look(engine, ctx, *prefix)
                is_retry = RETRY in answers
                in_a_row[name] = in_a_row.get(name, 0) + 1 if is_retry else 0
                worst = max(worst, in_a_row[name])
                if not {RETRY, PENDING} & set(answers):
                    num = answers.index(MISS) if MISS in answers else len(answers)
                    load_right(engine, ctx, *prefix[:num])
                    engine.on_request_finished(ctx)
                    del waiting[name]
            engine.on_schedule_end(kit.END)
            assert engine.wait_idle(WAIT_S)
        assert 0 < worst <= longest
        finish(engine, *[ctx for ctx, _ in waiting.values()])
        check_quiet(engine)


@pytest.mark.parametrize("how", [Death.HANG, "held"])
def test_f05_a_silent_worker_is_a_miss_after_the_deadline(session_name, control, how):
    """Stopped, or stuck in the middle of its read: PENDING for so long, then MISS."""
    config = make_config(session_name, [faulty(control)], slots=4, job_deadline_s=1.0)
    with Engine(config) as engine:
        put_in_tiers(engine, 1, 2, 3)
        pid = word(engine, TierWord.WORKER_PID)
        control.hold(Call.GET)
        if how is Death.HANG:
            strike(pid, how)
        a = kit.request(engine, "a")
        assert look_step(engine, a, 1, 2) == [PENDING, PENDING]
        seen = []

        def is_definite():
            seen.append(look_step(engine, a, 1, 2))
            return seen[-1] == [MISS, MISS]

        wait_until(is_definite, timeout_s=WAIT_S, what="the deadline")
        assert all(answers == [PENDING, PENDING] for answers in seen[:-1])
        control.release()
        step_until(
            engine,
            lambda: (
                word(engine, TierWord.WORKER_PID) not in (0, pid)
                and engine.tiers[0].is_up
            ),
            "the next worker",
        )
        assert look_step(engine, a, 1, 2) == [MISS, MISS]  # one try per request
        b = kit.request(engine, "b")
        assert kit.load(engine, b, keys(1, 2, 3)) == 3
        finish(engine, a, b)
        check_quiet(engine)
        assert key(1) in engine.manager.table.blocks
