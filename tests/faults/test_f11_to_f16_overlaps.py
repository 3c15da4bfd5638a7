"""F11 to F16 with real tiers: aborts, a quiet engine, preemption."""

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
    keys,
    load_right,
    look,
    look_step,
    look_until,
    make_config,
    not_waiting,
    numbers,
    put_in_tiers,
    step_until,
    wait_word,
    word,
)

from shmoffload.engine import Engine
from shmoffload.testing.faults.control import Call
from shmoffload.testing.faults.deaths import Death, strike
from shmoffload.wire.session import TierWord

pytestmark = pytest.mark.timeout(300)


STAGES = [
    "before the first look",
    "promotion queued",
    "promotion running",
    "promotion answered",
    "promotion landed",
    "blocks on their way to the GPU",
    "blocks on their way from the GPU",
    "store running",
]


def abort(engine, control, stage, n):
    """Abort a request at a stage; it has looked up n and n + 1."""
    ctx = kit.request(engine, f"aborted-{n}")
    engine.step_begin()
    if stage != "before the first look":
        assert look(engine, ctx, n, n + 1) == [PENDING, PENDING]
    if stage == "promotion queued":
        engine.on_request_finished(ctx)
    if stage in ("promotion running", "promotion answered"):
        control.hold(Call.GET)
    before = word(engine, TierWord.COMPLETIONS)
    engine.on_schedule_end(kit.END)
    if stage in ("promotion running", "promotion answered"):
        control.wait_held(Call.GET)
    if stage == "promotion answered":
        control.release()
        wait_word(engine, TierWord.COMPLETIONS, before + 1)
    if stage in STAGES[4:]:
        assert look_until(engine, ctx, n, n + 1) == [HIT, HIT]
    engine.step_begin()
    if stage == "blocks on their way to the GPU":
        look(engine, ctx, n, n + 1)
        engine.prepare_load(keys(n, n + 1), ctx)
    if stage in STAGES[6:]:
        output = engine.prepare_store(keys(n + 2), ctx)
        fill(engine, output)
    if stage == "store running":
        control.hold(Call.PUT)
        engine.complete_store(keys(n + 2), ctx)
    engine.on_schedule_end(kit.END)
    if stage == "store running":
        control.wait_held(Call.PUT)
    engine.on_request_finished(ctx)
    return ctx


def test_f11_abort_at_any_stage_leaves_nothing_and_misleads_nobody(
    session_name, control
):
    """The next request for the same blocks gets them, read once for both.

    There is no probe under way to abort: lookups are answered in the process.
    """
    with Engine(make_config(session_name, [faulty(control)], slots=8)) as engine:
        for i, stage in enumerate(STAGES):
            n = 10 * (i + 1)
            put_in_tiers(engine, n, n + 1)
            tap = Tap(engine)
            aborted = abort(engine, control, stage, n)
            b = kit.request(engine, f"b-{n}")
            answers = look_step(engine, b, n, n + 1)
            assert set(answers) <= {PENDING, HIT}, stage
            if stage == "blocks on their way to the GPU":
                engine.complete_load(keys(n, n + 1), aborted)
            if stage == "blocks on their way from the GPU":
                engine.complete_store(keys(n + 2), aborted)
            control.release()
            assert kit.load(engine, b, keys(n, n + 1)) == 2, stage
            loads = tap.said("load")
            assert [load[1:] for load in loads] == [[n, n + 1]], stage
            finish(engine, b)
            check_quiet(engine)
            told = tap.of(f"aborted-{n}")
            assert told[-1:] in ([], [("finished",)]), stage
            assert told.count(("finished",)) <= 1, stage
            if stage in STAGES[6:]:
                kit.drop_primary(engine)
                c = kit.request(engine, f"c-{n}")
                assert kit.load(engine, c, keys(n + 2)) == 1, stage
                finish(engine, c)


def test_f11_abort_of_a_load_that_fails_later(session_name, control):
    """Who shares the aborted request's load hears that it failed, and does not wait;
    the one after gets the block from the next worker."""
    with Engine(make_config(session_name, [faulty(control)], slots=8)) as engine:
        put_in_tiers(engine, 1, 2)
        control.hold(Call.GET)
        a, b = kit.request(engine, "a"), kit.request(engine, "b")
        assert look_step(engine, a, 1, 2) == [PENDING, PENDING]
        control.wait_held(Call.GET)
        finish(engine, a)
        assert look_step(engine, b, 1, 2) == [PENDING, PENDING]
        pid = word(engine, TierWord.WORKER_PID)
        strike(pid, Death.SIGKILL)
        step_until(engine, lambda: not engine.tiers[0].num_open_jobs, "the death")
        control.release()
        assert kit.load(engine, b, keys(1, 2)) in (0, 2)  # 2: the next one was quick
        step_until(engine, lambda: engine.tiers[0].is_up, "the next worker")
        assert kit.load(engine, kit.request(engine, "c"), keys(1, 2)) == 2
        finish(engine, b, kit.ReqContext("c"))
        check_quiet(engine)


def test_f13_a_quiet_engine_commits_and_wakes_at_its_next_call(session_name, control):
    """A cascade keeps nobody stepping; its end needs no step, its pins no wait."""
    with Engine(make_config(session_name, [faulty(control)], slots=2)) as engine:
        control.hold(Call.PUT)
        a = kit.request(engine, "a")
        kit.store(engine, a, keys(1, 2))
        finish(engine, a)
        control.wait_held(Call.PUT)
        assert not engine.has_pending_work()
        b = kit.request(engine, "b")
        engine.step_begin()
        with not_waiting():
            assert engine.prepare_store(keys(3, 4), b) is None  # both are pinned
        engine.on_schedule_end(kit.END)
        before = word(engine, TierWord.COMPLETIONS)
        engine.step_begin()
        control.release()
        wait_word(engine, TierWord.COMPLETIONS, before + 1)  # nobody steps
        assert word(engine, TierWord.RESIDENT_BLOCKS) == 2
        assert engine.manager.table.num_pinned == 2
        with not_waiting():
            output = engine.prepare_store(keys(3, 4), b)
        assert numbers(output.keys_to_store) == [3, 4]
        fill(engine, output)
        engine.complete_store(keys(3, 4), b)
        engine.on_schedule_end(kit.END)
        assert engine.wait_idle(WAIT_S)
        c = kit.request(engine, "c")
        with not_waiting():
            assert look_step(engine, c, 1, 2) == [PENDING, PENDING]  # in one step
        assert engine.has_pending_work()
        assert kit.load(engine, c, keys(1, 2)) == 2
        finish(engine, b, c)
        check_quiet(engine)


def test_f14_a_hit_holds_until_the_step_ends(session_name, control):
    """Ours, row "a HIT holds": the store that would take its slot is refused.

    So the bytes that are loaded are never another block's.
    """
    with Engine(make_config(session_name, [faulty(control)], slots=2)) as engine:
        put_in_tiers(engine, 1, 2)
        a, b = kit.request(engine, "a"), kit.request(engine, "b")
        assert look_until(engine, a, 1, 2) == [HIT, HIT]
        engine.step_begin()
        assert look(engine, a, 1, 2) == [HIT, HIT]
        assert engine.prepare_store(keys(3, 4), b) is None
        slots = load_right(engine, a, 1, 2)
        assert engine.prepare_store(keys(3, 4), b) is None
        engine.on_schedule_end(kit.END)
        engine.step_begin()
        output = engine.prepare_store(keys(3, 4), b)
        assert sorted(output.slots.tolist()) == sorted(slots)
        fill(engine, output)
        engine.complete_store(keys(3, 4), b)
        engine.on_schedule_end(kit.END)
        assert engine.wait_idle(WAIT_S)
        finish(engine, a, b)
        check_quiet(engine)
        for pair in ((1, 2), (3, 4)):
            kit.drop_primary(engine)
            c = kit.request(engine, "c")
            assert kit.load(engine, c, keys(*pair)) == 2
            finish(engine, c)


@pytest.mark.parametrize("is_good", [True, False])
def test_f16_preempted_request_meets_its_own_store(session_name, control, is_good):
    """Not readable before its copy is complete; readable beside its cascade.

    A copy that failed is a miss, and no byte of it reaches the tier.
    """
    with Engine(make_config(session_name, [faulty(control)], slots=4)) as engine:
        tap = Tap(engine)
        control.hold(Call.PUT)
        a = kit.request(engine, "a")
        engine.step_begin()
        output = engine.prepare_store(keys(1, 2), a)
        engine.on_schedule_end(kit.END)
        assert look_step(engine, a, 1, 2) == [PENDING, PENDING]
        engine.step_begin()
        assert numbers(engine.prepare_store(keys(1, 2), a).keys_to_store) == []
        engine.on_schedule_end(kit.END)
        if is_good:
            fill(engine, output)
        engine.complete_store(keys(1, 2), a, is_good)
        if not is_good:
            assert look_step(engine, a, 1, 2) == [MISS, MISS]
            assert tap.log == []
            kit.store(engine, a, keys(1, 2))
        kit.step(engine)
        control.wait_held(Call.PUT)
        engine.step_begin()
        assert look(engine, a, 1, 2) == [HIT, HIT]
        load_right(engine, a, 1, 2)  # load and cascade of one block at once
        engine.on_schedule_end(kit.END)
        control.release()
        assert engine.wait_idle(WAIT_S)
        finish(engine, a)
        check_quiet(engine)
        assert tap.said("store") == [["a", 1, 2]]
        kit.drop_primary(engine)
        assert kit.load(engine, kit.request(engine, "b"), keys(1, 2)) == 2
