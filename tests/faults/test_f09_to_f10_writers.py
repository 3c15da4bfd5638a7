"""F09 and F10 with real tiers: writers that meet, and slots after a reset."""

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
from shmoffload.errors import TierConfigError
from shmoffload.testing import leaks
from shmoffload.testing.faults.control import Call
from shmoffload.testing.faults.deaths import Death, strike, wait_gone
from shmoffload.testing.faults.link import FaultyLink
from shmoffload.wire.session import TierWord

pytestmark = pytest.mark.timeout(300)


def test_f09_each_block_is_written_once_per_tier(session_name, make_control):
    """Asked for again by a rewind, it is not sent; sent for another, not written."""
    tiers = [
        faulty(make_control("b"), name="b"),
        faulty(make_control("t"), name="t", policy="request_level"),
    ]
    with Engine(make_config(session_name, tiers, slots=4)) as engine:
        taps = [Tap(engine, i) for i in range(2)]
        a, b = kit.request(engine, "a"), kit.request(engine, "b")
        kit.store(engine, a, keys(1))
        for _ in range(3):
            for ctx in (b, a):
                assert kit.store(engine, ctx, keys(1)) == []
        assert engine.wait_idle(WAIT_S)
        finish(engine, a, b)
        check_quiet(engine)
        assert taps[0].said("store") == [["a", 1]]
        assert taps[1].said("store") == [["a", 1], ["b", 1]]
        for i in range(2):
            wait_word(engine, TierWord.JOBS_DONE, i + 1, i)
            assert word(engine, TierWord.BLOCKS_WRITTEN, i) == 1
        assert word(engine, TierWord.BLOCKS_SKIPPED, 1) == 1
        assert [tier.jobs_failed for tier in engine.tiers] == [0, 0]


def test_f09_two_processes_never_write_into_one_directory(session_name, tmp_path):
    """The second is refused in words; later it finds each block whole, once."""
    tier = {"type": "fs", "path": str(tmp_path), "max_bytes": "4MiB", "min_free": 0}
    mine = make_config(session_name, [tier], slots=4)
    theirs = make_config(leaks.new_session_name(), [tier], slots=4)
    with Engine(mine) as engine:
        kit.store(engine, kit.request(engine, "a"), keys(1, 2))
        assert engine.wait_idle(WAIT_S)
        with pytest.raises(TierConfigError, match="in use"):
            Engine(theirs)
        kit.store(engine, kit.request(engine, "b"), keys(3))
        assert engine.wait_idle(WAIT_S)
    with Engine(theirs) as engine:
        ctx = kit.request(engine, "a")
        assert kit.load(engine, ctx, keys(1, 2, 3)) == 3
        kit.drop_primary(engine)
        assert kit.store(engine, ctx, keys(1, 2, 3)) == keys(1, 2, 3)
        assert engine.wait_idle(WAIT_S)
        assert word(engine, TierWord.BLOCKS_WRITTEN) == 0
    assert len([f for f in tmp_path.rglob("*") if f.stat().st_size > 4096]) == 3


def test_f09_whatever_has_the_name_one_whole_file_is_left(session_name, make_control):
    """Another writer's file is replaced; where a rename cannot, the block is not
    there, its neighbours are, and no temporary file stays."""
    control = make_control(inner="fs")
    with Engine(make_config(session_name, [faulty(control)], slots=8)) as engine:
        put_in_tiers(engine, 1)
        (here,) = files_of(control).values()
        for n, name in ((2, key(2).hex()), (3, key(3).hex())):
            place = here.parents[1] / name[:2] / name
            if n == 2:
                place.write_bytes(b"half of another writer's file")
            else:  # as on a file system where a rename may not replace
                place.mkdir()
                (place / "something").touch()
        kit.store(engine, kit.request(engine, "a"), keys(2, 3, 4))
        assert engine.wait_idle(WAIT_S)
        assert word(engine, TierWord.BLOCKS_FAILED) == 1
        assert word(engine, TierWord.RESIDENT_BLOCKS) == 3
        stride = engine.config.stride
        sizes = {
            numbers([k])[0]: f.stat().st_size for k, f in files_of(control).items()
        }
        assert sizes == {1: stride, 2: stride, 4: stride}
        assert not list(here.parents[1].rglob("*.tmp"))
        kit.drop_primary(engine)
        b = kit.request(engine, "b")
        assert look_until(engine, b, 1, 2, 3, 4) == [HIT, HIT, MISS, HIT]
        engine.step_begin()
        look(engine, b, 1, 2, 4)
        load_right(engine, b, 1, 2, 4)
        engine.on_schedule_end(kit.END)


def test_f10_a_late_copy_after_a_reset_is_ignored(session_name, control):
    """The request of before goes on: it can store, and what it stores is right."""
    with Engine(make_config(session_name, [faulty(control)], slots=3)) as engine:
        a = kit.request(engine, "a")
        engine.step_begin()
        (old,) = engine.prepare_store(keys(1), a).slots.tolist()
        engine.on_schedule_end(kit.END)
        engine.reset_cache()
        engine.step_begin()
        again = engine.prepare_store(keys(1), a)
        assert again.slots.tolist() != [old]
        engine.slot_view(old)[:] = b"x" * kit.BLOCK_BYTES  # the late copy
        engine.complete_store(keys(1), a)
        assert look(engine, a, 1) == [PENDING]
        fill(engine, again)
        engine.complete_store(keys(1), a)
        engine.on_schedule_end(kit.END)
        assert engine.wait_idle(WAIT_S)
        finish(engine, a)
        check_quiet(engine)
        kit.drop_primary(engine)
        assert kit.load(engine, kit.request(engine, "b"), keys(1)) == 1


@pytest.mark.parametrize("end", ["answer", Death.SIGKILL])
def test_f10_slot_of_a_running_load_is_closed_after_a_reset(session_name, control, end):
    """Until the worker has answered or is proven dead; all other bytes are right."""
    with Engine(make_config(session_name, [faulty(control)], slots=6)) as engine:
        put_in_tiers(engine, 1, 2, 3, 4)
        control.hold(Call.GET)
        a = kit.request(engine, "a")
        assert look_step(engine, a, 1, 2) == [PENDING, PENDING]
        control.wait_held(Call.GET)
        table = engine.manager.table
        closed = {table.blocks[k].slot for k in keys(1, 2)}
        engine.reset_cache()
        used = use_all_slots(engine, 20)
        assert used == set(range(6)) - closed
        assert look_step(engine, a, 3) == [PENDING]  # in another slot
        assert table.num_quarantined == 2
        assert not {table.blocks[k].slot for k in table.blocks} & closed
        if end == "answer":
            control.release()
        else:
            pid = word(engine, TierWord.WORKER_PID)
            strike(pid, end)
            wait_gone(pid)
            control.release()
        step_until(engine, lambda: not table.num_quarantined, "the slots' return")
        step_until(engine, lambda: engine.tiers[0].is_up, "the tier")
        check_resident_bytes(engine)
        assert use_all_slots(engine, 40) == set(range(6))
        finish(engine, a)
        b = kit.request(engine, "b")
        assert kit.load(engine, b, keys(1, 2, 3, 4)) == 4
        finish(engine, b)
        check_quiet(engine)


def use_all_slots(engine, first):
    """Store new blocks one by one; return the slots that they were given."""
    used = set()
    ctx = kit.request(engine, f"user-{first}")
    for n in range(first, first + 12):
        engine.step_begin()
        output = engine.prepare_store(keys(n), ctx)
        if output is not None:
            used.update(output.slots.tolist())
            fill(engine, output)
            engine.complete_store(keys(n), ctx)
        engine.on_schedule_end(kit.END)
        step_until(engine, lambda: not engine.tiers[0].open_store_bytes, "the cascade")
    finish(engine, ctx)
    return used


def check_resident_bytes(engine):
    """Compare every readable block of the primary."""
    for k, block in engine.manager.table.blocks.items():
        if block.owner is None:
            assert bytes(engine.slot_view(block.slot)) == kit.bytes_of(k)


def test_f10_late_and_doubled_answers_count_once(session_name, control):
    """Of a life before a reset, of a worker that is dead: a counter, and no more."""
    with Engine(make_config(session_name, [faulty(control)], slots=4)) as engine:
        link, tier, table = FaultyLink.of(engine), engine.tiers[0], engine.manager.table
        a = kit.request(engine, "a")
        link.duplicate(times=2)
        kit.store(engine, a, keys(1, 2))
        assert engine.wait_idle(WAIT_S)
        kit.drop_primary(engine)
        assert kit.load(engine, a, keys(1, 2)) == 2
        assert tier.late_replies == link.num_struck("duplicate") == 2
        table.check_integrity()

        kit.drop_primary(engine)
        link.hold()
        assert look_step(engine, a, 1, 2) == [PENDING, PENDING]
        step_until(engine, lambda: link.num_kept, "an answer to keep")
        engine.reset_cache()
        assert table.num_quarantined == 2
        assert look_step(engine, a, 1, 2) == [PENDING, PENDING]  # in other slots
        step_until(engine, lambda: link.num_kept == 2, "the next answer")
        pid = word(engine, TierWord.WORKER_PID)
        strike(pid, Death.SIGKILL)
        step_until(engine, lambda: not tier.num_open_jobs, "the proven death")
        step_until(engine, lambda: tier.is_up, "the next worker")
        assert tier.jobs_lost == 2
        b = kit.request(engine, "b")
        assert look_step(engine, b, 1, 2) == [PENDING, PENDING]
        link.release()
        assert kit.load(engine, b, keys(1, 2)) == 2
        assert tier.late_replies == 2 + 2
        finish(engine, a, b)
        check_quiet(engine)
