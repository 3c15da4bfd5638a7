"""F47: the tail of a prefix goes before its head, in the primary and in every tier.

The primary goes by requests, whatever order copies end in. A tier knows jobs: of the
blocks of one store, or one load, the last goes first. Of a request in several jobs, as
chunked prefill makes them, the last job goes first once the request has ended.

The policies by themselves: ``tests/property/test_eviction_order``.
"""

import random

import engine_kit as kit
import msgspec
import pytest
from faults_kit import (
    check_quiet,
    fill,
    finish,
    keys,
    make_config,
    numbers,
    put_in_tiers,
)
from late_faults_kit import WAIT_S, pids, wait_up
from supervisor_kit import wait_gone

from shmoffload.core.types import LookupResult
from shmoffload.engine import Engine
from shmoffload.testing.faults.deaths import Death, strike
from shmoffload.testing.poll import wait_until

pytestmark = pytest.mark.timeout(300)
PREFIX = range(1, 9)
STRIDE = kit.BLOCK_BYTES + 4096
TIERS = ["slab", "fs", "memory"]
HIT = LookupResult.HIT


def make(session, kind, tmp_path, policy="auto"):
    """A primary and a tier that hold eight blocks each."""
    tier = {
        "type": kind,
        "path": str(tmp_path),
        "max_bytes": 8 * STRIDE,
        "min_free": 0,
        "nice": 0,
    }
    if kind == "memory":
        del tier["path"]
    config = make_config(session, [tier], slots=8)
    primary = msgspec.structs.replace(config.primary, policy=policy)
    return msgspec.structs.replace(config, primary=primary)


def store_in_random_order(engine, ctx, rng):
    """One offer; the copies end one by one in any order, and so do the cascades."""
    engine.step_begin()
    output = engine.prepare_store(keys(*PREFIX), ctx)
    fill(engine, output)
    order = list(PREFIX)
    rng.shuffle(order)
    for n in order:
        engine.complete_store(keys(n), ctx)
    engine.on_schedule_end(kit.END)
    assert engine.wait_idle(WAIT_S)


def tier_has(engine, ctx):
    engine.step_begin()
    there = [n for n in PREFIX if engine.tiers[0].lookup(keys(n)[0], ctx) is HIT]
    engine.on_schedule_end(kit.END)
    return there


@pytest.mark.parametrize(
    ("policy", "victims"), [("lru", [8, 7, 6]), ("arc", [7, 6, 4]), ("auto", [8, 7, 6])]
)
def test_f47_copies_end_in_any_order(session_name, tmp_path, policy, victims):
    """Cascades read the blocks and decoding touches them: no use, or one per request.

    Under ``arc`` what was touched goes later.
    """
    with Engine(make(session_name, "slab", tmp_path, policy)) as engine:
        first = kit.request(engine, "a")
        store_in_random_order(engine, first, random.Random(47))
        for _ in range(3):
            engine.step_begin()
            engine.touch(keys(2, 8, 5), first)
            engine.on_schedule_end(kit.END)
        finish(engine, first)
        second = kit.request(engine, "b")
        kit.store(engine, second, keys(21, 22, 23))
        left = set(PREFIX) - set(numbers(engine.manager.table.blocks))
        assert left == set(victims)
        assert engine.wait_idle(WAIT_S)
        finish(engine, second)
        check_quiet(engine)


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("kind", TIERS)
def test_f47_a_tier_gives_up_tails_first(session_name, tmp_path, kind, is_loaded):
    """After a store, and after a load, which is one use of the whole prefix."""
    with Engine(make(session_name, kind, tmp_path)) as engine:
        for name in ("a", "b")[: 1 + is_loaded]:
            ctx = kit.request(engine, name)
            if name == "a":
                kit.store(engine, ctx, keys(*PREFIX))
                assert engine.wait_idle(WAIT_S)
                kit.drop_primary(engine)
            else:
                assert kit.load(engine, ctx, keys(*PREFIX)) == 8
                kit.drop_primary(engine)
            finish(engine, ctx)
        third = kit.request(engine, "c")
        kit.store(engine, third, keys(21, 22, 23))
        assert engine.wait_idle(WAIT_S)
        assert tier_has(engine, third) == [1, 2, 3, 4, 5]
        finish(engine, third)
        check_quiet(engine)


def store_in_chunks(engine, ctx, *chunks):
    """Each chunk is a job of its own, sent before the one before it is answered."""
    for chunk in chunks:
        assert kit.store(engine, ctx, keys(*chunk)) == keys(*chunk)


@pytest.mark.parametrize("kind", TIERS)
def test_f47_the_chunks_of_a_request_are_one_prefix(session_name, tmp_path, kind):
    with Engine(make(session_name, kind, tmp_path)) as engine:
        first, second = kit.request(engine, "a"), kit.request(engine, "b")
        store_in_chunks(engine, first, (1, 2, 3, 4), (5, 6), (7, 8))
        assert engine.wait_idle(WAIT_S)
        finish(engine, first)
        store_in_chunks(engine, second, (21, 22), (23,))
        assert engine.wait_idle(WAIT_S)
        assert tier_has(engine, second) == [1, 2, 3, 4, 5]
        finish(engine, second)
        check_quiet(engine)


@pytest.mark.parametrize("kind", TIERS)
def test_f47_a_loaded_head_outlives_the_stored_rest(session_name, tmp_path, kind):
    with Engine(make(session_name, kind, tmp_path)) as engine:
        put_in_tiers(engine, 1, 2, 3, 4)
        second = kit.request(engine, "b")
        assert kit.load(engine, second, keys(*PREFIX)) == 4
        store_in_chunks(engine, second, (5, 6), (7, 8))
        assert engine.wait_idle(WAIT_S)
        finish(engine, second)
        third = kit.request(engine, "c")
        kit.store(engine, third, keys(21, 22, 23))
        assert engine.wait_idle(WAIT_S)
        assert tier_has(engine, third) == [1, 2, 3, 4, 5]
        finish(engine, third)
        check_quiet(engine)


def test_f47_who_ends_last_is_evicted_last(session_name, tmp_path):
    """Chunks of two requests took turns; the one that began first ends last."""
    with Engine(make(session_name, "slab", tmp_path)) as engine:
        first, second = kit.request(engine, "a"), kit.request(engine, "b")
        for chunk in ((1, 2), (3, 4)):
            store_in_chunks(engine, first, chunk)
            store_in_chunks(engine, second, [n + 4 for n in chunk])
        assert engine.wait_idle(WAIT_S)
        finish(engine, second)
        finish(engine, first)
        third = kit.request(engine, "c")
        kit.store(engine, third, keys(21, 22, 23))
        assert engine.wait_idle(WAIT_S)
        assert tier_has(engine, third) == [1, 2, 3, 4, 5]
        finish(engine, third)
        check_quiet(engine)


def test_f47_the_order_of_chunks_outlives_an_orderly_end(session_name, tmp_path):
    """In a slab. After a kill, and of ``fs`` always, it is the order of storing."""
    config = make(session_name, "slab", tmp_path)
    with Engine(config) as engine:
        first = kit.request(engine, "a")
        store_in_chunks(engine, first, (1, 2, 3, 4), (5, 6, 7, 8))
        assert engine.wait_idle(WAIT_S)
        finish(engine, first)
        second = kit.request(engine, "b")
        kit.store(engine, second, keys(21))  # its answer comes after the first's use
        assert engine.wait_idle(WAIT_S)
        finish(engine, second)
    with Engine(config) as engine:
        check_order(engine, num_left=4)


@pytest.mark.parametrize("kind", ["slab", "fs"])
@pytest.mark.parametrize("how", ["close", "kill"])
def test_f47_the_order_outlives_the_worker(session_name, tmp_path, kind, how):
    config = make(session_name, kind, tmp_path)
    with Engine(config) as engine:
        first = kit.request(engine, "a")
        kit.store(engine, first, keys(*PREFIX))
        assert engine.wait_idle(WAIT_S)
        finish(engine, first)
        if how == "kill":
            restart_worker(engine)
            check_order(engine)
    if how == "close":
        with Engine(config) as engine:
            check_order(engine)


def check_order(engine, num_left=5):
    kit.drop_primary(engine)
    ctx = kit.request(engine, "c")
    kit.store(engine, ctx, keys(31, 32, 33))
    assert engine.wait_idle(WAIT_S)
    assert tier_has(engine, ctx) == list(PREFIX)[:num_left]
    kit.drop_primary(engine)
    assert kit.load(engine, ctx, keys(*PREFIX)) == num_left
    finish(engine, ctx)


def restart_worker(engine):
    (victim,) = pids(engine)
    strike(victim, Death.SIGKILL)
    wait_gone([victim])
    wait_until(
        lambda: kit.step(engine) or not engine.tiers[0].is_up,
        timeout_s=WAIT_S,
        what="the death to be noticed",
    )
    wait_up(engine)
