"""F24 to F27 with real tiers: failed copies, crowds, slow and stuck tiers."""

import errno
import os
import signal

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
    keys,
    load_right,
    look,
    look_step,
    look_until,
    make_config,
    not_waiting,
    num_refused,
    put_in_tiers,
    step_until,
    word,
)

from shmoffload.engine import Engine
from shmoffload.testing.faults.control import Call
from shmoffload.testing.faults.deaths import wait_gone
from shmoffload.wire.session import Fault, TierWord

pytestmark = pytest.mark.timeout(300)

MEMORY = {"type": "memory", "max_bytes": "8MiB", "nice": 0}


def test_f24_failed_copies_are_counted_and_poison_nothing(session_name, control):
    """A store that fails is not in that tier, one that succeeds is in the other;
    a load that fails is a miss; a GPU copy that fails leaves nothing."""
    tiers = [faulty(control), MEMORY]
    with Engine(make_config(session_name, tiers, slots=8)) as engine:
        tap = Tap(engine)
        a = kit.request(engine, "a")
        control.fail(Call.PUT, errno.ENOSPC)
        kit.store(engine, a, keys(1, 2))
        assert engine.wait_idle(WAIT_S)
        assert [tier.num_resident for tier in engine.tiers] == [0, 2]
        assert num_refused(engine) == {Fault.NO_SPACE: 2}
        assert os.strerror(errno.ENOSPC) in engine.tiers[0].last_error
        kit.step(engine)
        assert word(engine, TierWord.JOBS_FAILED) == 1
        assert word(engine, TierWord.JOBS_FAILED, 1) == 0
        assert kit.load(engine, a, keys(1, 2)) == 2  # the primary's copy

        kit.drop_primary(engine)
        assert kit.load(engine, a, keys(1, 2)) == 2  # the other tier's
        put_in_tiers(engine, 3)
        tap.log.clear()
        control.fail(Call.GET, errno.EIO)
        assert look_until(engine, a, 3) == [MISS]
        assert tap.said("load") == [["a", 3]]
        assert num_refused(engine) == {Fault.NO_SPACE: 2, Fault.IO: 1}
        assert engine.manager.counters.promotions_failed == 1
        assert kit.store(engine, a, keys(3)) == keys(3)  # computed again
        assert engine.wait_idle(WAIT_S)
        kit.drop_primary(engine)
        b = kit.request(engine, "b")
        assert kit.load(engine, b, keys(3)) == 1

        engine.step_begin()
        output = engine.prepare_store(keys(4, 5), b)
        engine.slot_view(output.slots[0])[:] = b"?" * kit.BLOCK_BYTES
        engine.complete_store(keys(4, 5), b, success=False)
        assert look(engine, b, 4, 5) == [MISS, MISS]
        engine.on_schedule_end(kit.END)
        assert not [job for job in tap.said("store") if {4, 5} & set(job[1:])]
        assert engine.manager.counters.stores_failed == 2
        finish(engine, a, b)
        check_quiet(engine)
        assert control.num_struck("fail") == 2


def test_f25_waiting_requests_do_not_stop_the_running_one(session_name, control):
    """Fifty requests wait for four blocks each, a tier's; one stores a block a step.

    It is refused in at most 5 % of the steps; all fifty get their bytes.
    """
    tier = faulty(control, max_bytes="16MiB")
    with Engine(make_config(session_name, [tier], slots=8)) as engine:
        prefixes = {i: range(4 * i, 4 * i + 4) for i in range(50)}
        for start in range(0, 200, 8):
            put_in_tiers(engine, *range(start, start + 8))
        run = kit.request(engine, "run")
        waiting = {i: kit.request(engine, f"w{i}") for i in prefixes}
        num_steps = num_refused_steps = 0
        while waiting:
            num_steps += 1
            assert num_steps < 500
            engine.step_begin()
            loading = {}
            for i, ctx in list(waiting.items()):
                answers = look(engine, ctx, *prefixes[i])
                if not {PENDING, RETRY} & set(answers):
                    assert answers == [HIT] * 4
                    slots = engine.prepare_load(keys(*prefixes[i]), ctx).tolist()
                    loading[i] = waiting.pop(i), slots
            output = engine.prepare_store(keys(1000 + num_steps), run)
            if output is None:
                num_refused_steps += 1
            else:
                fill(engine, output)
                engine.complete_store(output.keys_to_store, run)
            engine.on_schedule_end(kit.END)
            assert engine.wait_idle(WAIT_S)
            for i, (ctx, slots) in loading.items():  # the copies end after the step
                for k, slot in zip(keys(*prefixes[i]), slots, strict=True):
                    assert bytes(engine.slot_view(slot)) == kit.bytes_of(k)
                engine.complete_load(keys(*prefixes[i]), ctx)
                engine.on_request_finished(ctx)
        assert num_refused_steps <= 0.05 * num_steps
        finish(engine, run)
        check_quiet(engine)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_f25_two_that_do_not_fit_together_both_end(session_name, control, order):
    """Six and six blocks for eight slots, asked for turn by turn."""
    prefixes = {"a": range(6), "b": range(10, 16)}
    with Engine(make_config(session_name, [faulty(control)], slots=8)) as engine:
        for prefix in prefixes.values():
            put_in_tiers(engine, *prefix)
        contexts = {name: kit.request(engine, name) for name in "ab"}
        engine.step_begin()  # each gets half of the slots first
        for i in range(6):
            for name in order:
                look(engine, contexts[name], prefixes[name][i])
        engine.on_schedule_end(kit.END)
        served = []

        def serve():
            for name in order:
                if name in served:
                    continue
                answers = look_step(engine, contexts[name], *prefixes[name])
                if answers == [HIT] * 6:
                    engine.step_begin()
                    look(engine, contexts[name], *prefixes[name])
                    load_right(engine, contexts[name], *prefixes[name])
                    served.append(name)
                    engine.on_request_finished(contexts[name])
                    engine.on_schedule_end(kit.END)
                else:
                    assert MISS not in answers
            return len(served) == 2

        step_until(engine, serve, "both requests")
        assert served == ["a", "b"]  # the older first
        check_quiet(engine)


def test_f26_slow_tier_delays_no_verdict(session_name, control):
    """20 ms for each look into the tier, a store under way: 100 misses and a hit are
    told in the step in which they are asked, and the thread waits for nothing."""
    with Engine(make_config(session_name, [faulty(control)], slots=8)) as engine:
        put_in_tiers(engine, 1)
        control.slow(Call.EXISTS, 0.02)
        control.hold(Call.PUT)
        kit.store(engine, kit.request(engine, "s"), keys(2))
        control.wait_held(Call.PUT, meanwhile=lambda: kit.step(engine))
        contexts = [kit.request(engine, f"r{n}") for n in range(101)]
        ns = [*range(1000, 1100), 1]
        control.hold(Call.GET)
        for _ in range(5):
            with not_waiting():
                engine.step_begin()
                answers = [
                    look(engine, c, n)[0] for c, n in zip(contexts, ns, strict=True)
                ]
                engine.on_schedule_end(kit.END)
            assert answers == [MISS] * 100 + [PENDING]
        control.release()
        assert look_until(engine, contexts[-1], 1) == [HIT]
        assert control.num_struck("slow") >= 1
        finish(engine, *contexts, kit.ReqContext("s"))
        check_quiet(engine)


def test_f26_quick_answer_does_not_wait_for_a_slow_one(session_name, make_control):
    """One request's blocks lie in a tier that is stuck, the other's do not.

    The late truth is of use: once it comes, the first has its block as well.
    """
    stuck, quick = make_control("stuck"), make_control("quick", inner="memory")
    tiers = [faulty(stuck, name="stuck"), faulty(quick, name="quick")]
    with Engine(make_config(session_name, tiers, slots=8)) as engine:
        quick.fail(Call.PUT, errno.EIO)
        put_in_tiers(engine, 1)
        stuck.fail(Call.PUT, errno.EIO)
        put_in_tiers(engine, 2)
        assert [tier.num_resident for tier in engine.tiers] == [1, 1]
        stuck.hold(Call.GET)
        a, b = kit.request(engine, "a"), kit.request(engine, "b")
        assert look_step(engine, a, 1) == [PENDING]
        assert look_step(engine, b, 2) == [PENDING]
        stuck.wait_held(Call.GET)
        assert look_until(engine, b, 2) == [HIT]
        assert look_step(engine, a, 1) == [PENDING]
        assert stuck.is_held(Call.GET)
        stuck.release()
        assert kit.load(engine, a, keys(1)) == 1
        assert kit.load(engine, b, keys(2)) == 1
        finish(engine, a, b)
        check_quiet(engine)


def test_f27_stuck_tier_is_bounded_and_holds_up_nobody(session_name, control):
    """Ten times the primary is stored, four blocks a step: no call waits, the stuck
    tier pins four and is told how much it has lost, the other gets every block."""
    cap, num_slots, num_steps = 4, 16, 40
    stride = make_config(session_name, [MEMORY]).stride
    tiers = [faulty(control, name="slow"), {**MEMORY, "name": "fast"}]
    config = make_config(
        session_name, tiers, slots=num_slots, credit_bytes=cap * stride
    )
    with Engine(config) as engine:
        slow, fast = engine.tiers
        counters, table = engine.manager.counters, engine.manager.table
        control.hold(Call.PUT)
        tap = Tap(engine)
        for i in range(num_steps):
            ns = range(4 * i, 4 * i + 4)
            ctx = kit.request(engine, f"r{i}")
            with not_waiting():
                engine.step_begin()
                output = engine.prepare_store(keys(*ns), ctx)
            fill(engine, output)
            with not_waiting():
                engine.complete_store(keys(*ns), ctx)
                engine.on_request_finished(ctx)
                engine.on_schedule_end(kit.END)
            assert slow.open_store_bytes <= cap * stride
            assert not engine.has_pending_work()
            step_until(engine, lambda: not fast.num_open_jobs, "the fast tier")
            assert table.num_pinned <= cap
        assert control.is_held(Call.PUT)
        assert tap.said("store") == [["r0", 0, 1, 2, 3]]
        assert counters.cascade_blocks_dropped == [4 * num_steps - cap, 0]
        assert word(engine, TierWord.BLOCKS_DROPPED) == 4 * num_steps - cap
        assert fast.num_resident == word(engine, TierWord.RESIDENT_BLOCKS, 1) == 160
        control.release()
        check_quiet(engine)
        assert slow.num_resident == 4
        ctx = kit.request(engine, "next")
        kit.store(engine, ctx, keys(1000))
        finish(engine, ctx)
        check_quiet(engine)
        assert [tier.num_resident for tier in engine.tiers] == [5, 161]
        ctx = kit.request(engine, "all")
        for start in range(0, 160, 16):
            kit.drop_primary(engine)
            assert kit.load(engine, ctx, keys(*range(start, start + 16))) == 16


def test_f27_jobs_that_wait_in_a_worker_that_leaves_are_reported(session_name, control):
    """Told to leave in the middle of a store, it ends that one and fails the rest."""
    with Engine(make_config(session_name, [faulty(control)], slots=8)) as engine:
        tap = Tap(engine)
        control.hold(Call.PUT)
        ctx = kit.request(engine, "a")
        for pair in ((1, 2), (3, 4), (5, 6)):
            kit.store(engine, ctx, keys(*pair))
        control.wait_held(Call.PUT)
        step_until(engine, lambda: word(engine, TierWord.JOBS_QUEUED) == 3, "3 jobs")
        pid = word(engine, TierWord.WORKER_PID)
        os.kill(pid, signal.SIGTERM)
        control.release()
        wait_gone(pid)
        step_until(engine, lambda: not engine.tiers[0].num_open_jobs, "all answers")
        failed = {done.job_id: len(done.failed_idx) // 4 for done in tap.done}
        assert list(failed) == tap.job_ids
        assert sum(failed.values()) in (2, 4)  # the running one may just have ended
        errors = {done.error for done in tap.done if done.failed_idx}
        assert errors == {"the worker is stopping"}
        assert engine.tiers[0].jobs_lost == 0
        step_until(engine, lambda: engine.tiers[0].is_up, "the next worker")
        finish(engine, ctx)
        check_quiet(engine)
        kit.drop_primary(engine)
        ctx = kit.request(engine, "b")
        answers = look_until(engine, ctx, *range(1, 7))
        assert answers[:2] == [HIT, HIT]
        assert answers[4:] == [MISS, MISS]
        finish(engine, ctx)
