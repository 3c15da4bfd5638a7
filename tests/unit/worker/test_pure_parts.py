"""Extents, recency, breaker, intake, registry: the parts that only decide."""

import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmoffload.errors import ConfigError, TierConfigError
from shmoffload.testing.tier_tests import key_of
from shmoffload.wire import config as wire_config
from shmoffload.wire.messages import JobPart
from shmoffload.worker.breaker import Breaker
from shmoffload.worker.intake import BadPartError, Intake
from shmoffload.worker.registry import check_tier_types, load_tier, tier_types
from shmoffload.worker.tiers.extents import FreeExtents
from shmoffload.worker.tiers.lru import PinnedLru
from shmoffload.worker.tiers.memory import MemoryTier
from shmoffload.worker.tiers.slab_table import SlabTable

# Extents ----------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60), st.data())
def test_extents_hand_out_free_slots_once(steps, data):
    extents = FreeExtents.from_used((), 128)
    free = set(range(128))
    taken: list[int] = []
    for is_take, num in steps:
        if is_take and free:
            num = min(num, len(free))
            runs = extents.take(num)
            slots = [s for start, length in runs for s in range(start, start + length)]
            assert len(slots) == num
            assert set(slots) <= free
            free -= set(slots)
            taken += slots
        elif taken:
            slot = taken.pop(data.draw(st.integers(0, len(taken) - 1)))
            extents.add(slot)
            free.add(slot)
        assert extents.num_free == len(free)
        # Neighbours are merged: as many runs as the set has.
        assert extents.num_runs == len([s for s in free if s - 1 not in free])


def test_extents_take_one_run_where_one_fits():
    extents = FreeExtents.from_used((), 100)
    assert extents.take(100) == [(0, 100)]
    for start, length in ((0, 3), (10, 9), (30, 12), (50, 4)):
        extents.add(start, length)
    assert extents.take(9) == [(10, 9)]
    assert extents.take(4) == [(50, 4)]
    assert extents.take(14) == [(30, 12), (0, 2)]


# Recency and slab slots -------------------------------------------------------------

STEPS = ["put", "fail", "pin", "unpin", "remove", "flush"]


def test_a_removed_and_renewed_key_is_another_entry():
    lru = PinnedLru()
    lru.insert(b"k", 1)
    old = lru.pin(b"k")
    lru.remove(b"k")
    lru.insert(b"k", 2)
    assert lru.unpin(old)
    assert lru.evict() == (b"k", 2)
    assert lru.evict() is None


@given(st.data())
def test_slab_slots_are_never_two_things_at_once(data):
    num_slots = 8
    table = SlabTable(num_slots, [])
    pinned = []
    reserved: set[int] = set()
    for turn in range(data.draw(st.integers(0, 40))):
        step = data.draw(st.sampled_from(STEPS))
        resident = list(table.lru)
        if step in ("put", "fail"):
            num = data.draw(st.integers(1, 5))
            table.make_room(num)
            table.release_stale(table.stale())
            runs = table.reserve(num)
            reserved = {s for at, n in runs for s in range(at, at + n)}
            held = {e.value for e in pinned}
            assert not reserved & (held | {v for _, v in table.lru.items()})
            if step == "fail":
                table.give_up(reserved)
            else:
                for slot in reserved:
                    table.insert(b"%d-%d" % (turn, slot), slot)
        elif step == "pin" and resident:
            pinned.append(table.lru.pin(data.draw(st.sampled_from(resident))))
        elif step == "unpin" and pinned:
            table.unpin(pinned.pop())
        elif step == "remove" and resident:
            table.remove(data.draw(st.sampled_from(resident)))
        else:
            table.release_stale(table.stale())
        slots = [v for _, v in table.lru.items()]
        gone = {e.value for e in pinned if e.gone}
        stale = set(table.stale())
        assert len(slots) == len(set(slots))
        assert not set(slots) & (stale | gone)
        assert not stale & gone
        free = table._free.num_free
        assert free + len(slots) + len(stale) + len(gone) == num_slots
    for entry in pinned:
        table.unpin(entry)
    table.release_stale(table.stale())
    assert table._free.num_free + len(table.lru) == num_slots


def test_rows_that_name_one_key_twice_keep_the_later():
    table = SlabTable(4, [(b"a", 0), (b"b", 1), (b"a", 2)])
    assert dict(table.lru.items()) == {b"a": 2, b"b": 1}
    assert table.stale() == [0]
    table = SlabTable(4, [(b"a", 3), (b"b", 1), (b"c", 3)])
    assert list(table.lru.items()) == [(b"b", 1), (b"c", 3)]
    assert table.stale() == []


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 7))))
def test_whatever_rows_come_each_slot_is_one_thing(letters):
    rows = [(letter.encode(), slot) for letter, slot in letters]
    table = SlabTable(8, rows)
    there = dict(table.lru.items())
    assert there.items() <= set(rows)
    assert len(set(there.values())) == len(there)
    assert not set(there.values()) & set(table.stale())
    assert set(there.values()) | set(table.stale()) == {slot for _, slot in rows}
    if rows:
        assert list(table.lru)[-1] == rows[-1][0]
    assert table._free.num_free == 8 - len(there) - len(table.stale())


# Breaker ----------------------------------------------------------------------------


def test_breaker_opens_after_three_failures_and_probes_with_back_off():
    breaker = Breaker()
    assert [breaker.on_result(ok=False, now_s=10.0) for _ in range(3)] == [
        False,
        False,
        True,
    ]
    assert not breaker.allows(now_s=10.4)
    waits = []
    now_s = 10.0
    for _ in range(8):
        waits.append(breaker.retry_at_s - now_s)
        now_s = breaker.retry_at_s
        assert breaker.allows(now_s=now_s)
        breaker.on_result(ok=False, now_s=now_s)
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30]
    breaker.on_result(ok=True, now_s=now_s)
    assert breaker.allows(now_s=now_s)
    breaker.on_result(ok=False, now_s=now_s)
    assert breaker.allows(now_s=now_s)


# Intake -----------------------------------------------------------------------------


def part(
    job_id=1, keys=(), slots=None, num_left=0, *, epochs=(5, 6), load=False, start=0
):
    keys = list(keys)
    slots = range(len(keys)) if slots is None else slots
    packed = array.array("i", slots).tobytes()
    return JobPart(*epochs, job_id, load, "r", 1.0, keys, packed, num_left, start)


def intake():
    return Intake(num_slots=10, engine_epoch=5, worker_epoch=6)


def test_parts_become_one_job():
    box = intake()
    assert box.add(part(keys=[key_of(0), key_of(1)], num_left=1)) is None
    job = box.add(part(keys=[key_of(2)], slots=[9]))
    assert (job.keys, job.slots) == ([key_of(i) for i in range(3)], [0, 1, 9])
    assert job.error == ""


@pytest.mark.parametrize(
    ("keys", "slots", "words"),
    [
        ([key_of(0)], [10], "outside"),
        ([key_of(0)], [-1], "outside"),
        ([key_of(0)], [2**31 - 1], "outside"),
        ([b"\0" * 4], [0], "bytes"),
        ([b"k" * 41], [0], "bytes"),
        ([key_of(0)], [0, 1], "differ"),
        ([key_of(0), key_of(0)], [0, 1], "twice"),
        ([key_of(0), key_of(1)], [3, 3], "twice"),
    ],
)
def test_a_bad_job_is_named_and_must_not_run(keys, slots, words):
    job = intake().add(part(keys=keys, slots=slots))
    assert words in job.error
    assert job.num_keys == len(keys)


def test_a_bad_part_spoils_the_whole_job():
    box = intake()
    assert box.add(part(keys=[key_of(0)], slots=[99], num_left=1)) is None
    job = box.add(part(keys=[key_of(1)], slots=[1]))
    assert "outside" in job.error
    assert job.num_keys == 2


def test_a_missing_part_and_a_doubled_slot_across_parts_are_seen():
    box = intake()
    box.add(part(keys=[key_of(0)], num_left=5))
    assert "missing" in box.add(part(keys=[key_of(1)], slots=[1])).error
    box.add(part(keys=[key_of(0)], slots=[1], num_left=1))
    assert "twice" in box.add(part(keys=[key_of(1)], slots=[1])).error


def test_a_job_without_its_head_is_never_run():
    """Its answer would speak for keys that never came: wrong bytes as a HIT."""
    box = intake()
    with pytest.raises(BadPartError, match="head"):
        box.add(part(keys=[key_of(1)], slots=[1], start=1, load=True))
    assert box.add(part(2, keys=[key_of(0)])).error == ""


def test_other_incarnations_and_mixed_parts_are_dropped():
    box = intake()
    for epochs in ((4, 6), (5, 7)):
        with pytest.raises(BadPartError):
            box.add(part(keys=[key_of(0)], epochs=epochs))
    box.add(part(1, keys=[key_of(0)], num_left=1))
    with pytest.raises(BadPartError):
        box.add(part(2, keys=[key_of(0)], start=1))
    assert [(job.job_id, job.num_keys) for job in box.take_cut()] == [(1, 1)]
    assert box.add(part(3, keys=[key_of(0)])).error == ""


def test_a_job_that_is_cut_short_costs_the_next_one_nothing():
    box = intake()
    box.add(part(1, keys=[key_of(0)], num_left=1))
    assert box.add(part(2, keys=[key_of(1)])).error == ""
    assert [job.error for job in box.take_cut()] == ["its last parts are missing"]
    assert box.take_cut() == []


# Registry ---------------------------------------------------------------------------


def config_with(**tier):
    return wire_config.from_dict(
        {"primary": {"block_bytes": 4096, "slots": 4}, "tier": [tier]}
    )


def test_registry_names_and_loads_built_in_types():
    assert {"slab", "fs", "memory"} <= set(tier_types())
    assert load_tier("memory") is MemoryTier
    with pytest.raises(TierConfigError, match="known are"):
        load_tier("nothing")


def test_unknown_types_and_missing_paths_are_refused_early():
    check_tier_types(config_with(type="memory"))
    check_tier_types(config_with(type="slab", path="/somewhere"))
    with pytest.raises(ConfigError, match="did you mean slab"):
        check_tier_types(config_with(type="slap", path="/somewhere"))
    with pytest.raises(ConfigError, match="add path"):
        check_tier_types(config_with(type="fs"))
