"""The engine over real processes: blocks leave, return, and survive a restart."""

import os
import signal
from pathlib import Path

import pytest
from engine_kit import (
    drop_primary,
    keys_of,
    load,
    make_config,
    request,
    scan,
    slab,
    step,
    store,
)

from shmoffload.engine import Engine
from shmoffload.errors import ConfigError, SessionInUseError, TierConfigError
from shmoffload.testing.poll import wait_until
from shmoffload.wire.session import TierState, TierWord, Word


def tier_word(engine, word, tier_idx=0):
    return engine.page.get_tier(tier_idx, word)


@pytest.mark.parametrize("kind", ["slab", "fs", "memory"])
def test_blocks_come_back_from_a_tier_byte_for_byte(session_name, tmp_path, kind):
    tier = {"type": kind, "path": str(tmp_path), "max_bytes": "8MiB"}
    if kind == "memory":
        del tier["path"]
    with Engine(make_config(session_name, [tier])) as engine:
        ctx, keys = request(engine, "a"), keys_of(0, 10)
        assert store(engine, ctx, keys) == keys
        assert engine.wait_idle(30)
        assert tier_word(engine, TierWord.BLOCKS_WRITTEN) == len(keys)
        drop_primary(engine)
        other = request(engine, "b")
        assert load(engine, other, keys + keys_of(100, 2)) == len(keys)
        assert tier_word(engine, TierWord.BLOCKS_READ) == len(keys)
        engine.on_request_finished(ctx)
        engine.on_request_finished(other)
        step(engine)
        assert not engine.has_pending_work()
        engine.manager.check_integrity()


def test_a_restart_finds_the_blocks_again(session_name, tmp_path):
    config = make_config(session_name, [slab(tmp_path)])
    keys = keys_of(0, 20)
    with Engine(config) as engine:
        store(engine, request(engine, "a"), keys)
        assert engine.wait_idle(30)
    with Engine(config) as engine:
        assert load(engine, request(engine, "b"), keys) == len(keys)
        assert tier_word(engine, TierWord.BLOCKS_WRITTEN) == 0


def test_another_namespace_never_sees_the_blocks(session_name, tmp_path):
    config = make_config(session_name, [slab(tmp_path)])
    with Engine(config) as engine:
        store(engine, request(engine, "a"), keys_of(0, 4))
        assert engine.wait_idle(30)
    other = make_config(session_name, [slab(tmp_path)], namespace="another model")
    with Engine(other) as engine:
        assert scan(engine, request(engine, "b"), keys_of(0, 4)) == 0


def test_no_block_travels_through_a_queue(session_name, tmp_path):
    """A worker maps the region itself; a queue carries under 100 bytes a key."""
    with Engine(make_config(session_name, [slab(tmp_path)], slots=400)) as engine:
        pid = tier_word(engine, TierWord.WORKER_PID)
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert f"shmoffload.{session_name}.region" in maps
        keys = keys_of(0, 300)
        store(engine, request(engine, "a"), keys)
        assert engine.wait_idle(30)
        wait_until(  # counted after the datagram has left
            lambda: tier_word(engine, TierWord.QUEUE_KEYS) >= len(keys),
            timeout_s=10,
            what="the worker's count of keys",
        )
        sent = tier_word(engine, TierWord.QUEUE_BYTES_IN)
        sent += tier_word(engine, TierWord.QUEUE_BYTES_OUT)
        assert sent / tier_word(engine, TierWord.QUEUE_KEYS) < 100


def test_a_job_of_8192_keys_passes(session_name, tmp_path):
    tier = {"type": "memory", "max_bytes": "512MiB"}
    config = make_config(
        session_name, [tier], slots=8200, credit_bytes="1GiB", job_deadline_s=60.0
    )
    with Engine(config) as engine:
        keys = keys_of(0, 8192)
        store(engine, request(engine, "a"), keys)
        assert engine.wait_idle(60)
        assert tier_word(engine, TierWord.BLOCKS_WRITTEN) == len(keys)
        wait_until(
            lambda: tier_word(engine, TierWord.JOBS_DONE) == 1,
            timeout_s=30,
            what="the one job to be counted",
        )


def test_the_page_shows_what_the_engine_does(session_name, tmp_path):
    config = make_config(session_name, [slab(tmp_path)])
    with Engine(config) as engine:
        ctx, keys = request(engine, "a"), keys_of(0, 3)
        store(engine, ctx, keys)
        assert engine.wait_idle(30)
        assert load(engine, ctx, keys) == 3
        page = engine.page
        assert page.get(Word.NUM_SLOTS) == config.num_slots
        assert page.get(Word.STRIDE_BYTES) == config.stride
        assert page.get(Word.BLOCK_BYTES) == config.block_bytes
        assert page.get(Word.SLOTS_READY) == page.get(Word.STORED_BLOCKS) == 3
        assert page.get(Word.LOADED_BLOCKS) == page.get(Word.HITS_PRIMARY) == 3
        assert page.get(Word.LOOKUPS) >= 6
        assert page.get(Word.REQUESTS) == 1


def test_process_titles_name_session_and_tier(session_name, tmp_path):
    with Engine(make_config(session_name, [slab(tmp_path, name="disk")])) as engine:
        pid = tier_word(engine, TierWord.WORKER_PID)
        title = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()
        assert title == f"shmoffload: {session_name} disk"


def test_a_killed_worker_is_a_miss_and_comes_back(session_name, tmp_path):
    tiers = [slab(tmp_path / "a", name="one"), slab(tmp_path / "b", name="two")]
    with Engine(make_config(session_name, tiers)) as engine:
        keys = keys_of(0, 8)
        store(engine, request(engine, "a"), keys)
        assert engine.wait_idle(30)
        drop_primary(engine)
        epoch = tier_word(engine, TierWord.WORKER_EPOCH)
        os.kill(tier_word(engine, TierWord.WORKER_PID), 9)

        def is_noticed():
            step(engine)
            return not engine.tiers[0].is_up

        wait_until(is_noticed, timeout_s=10, what="the engine to notice the death")
        assert load(engine, request(engine, "b"), keys) == len(keys)  # from "two"
        drop_primary(engine)

        def is_back():
            step(engine)
            return engine.tiers[0].is_up

        wait_until(is_back, timeout_s=30, what="the worker to come back")
        assert tier_word(engine, TierWord.WORKER_EPOCH) > epoch
        wait_until(
            lambda: tier_word(engine, TierWord.STATE) == TierState.UP,
            timeout_s=10,
            what="the supervisor to see it",
        )
        assert load(engine, request(engine, "c"), keys) == len(keys)
        engine.manager.check_integrity()


def test_a_killed_supervisor_is_replaced(session_name, tmp_path):
    with Engine(make_config(session_name, [slab(tmp_path)])) as engine:
        keys = keys_of(0, 8)
        store(engine, request(engine, "a"), keys)
        assert engine.wait_idle(30)
        drop_primary(engine)
        old = engine.page.get(Word.SUPERVISOR_PID)
        os.kill(old, 9)

        def is_down():
            step(engine)
            return not engine.tiers[0].is_up

        wait_until(is_down, timeout_s=10, what="the loss to be noticed")
        assert scan(engine, request(engine, "b"), keys) == 0

        def is_back():
            step(engine)
            return engine.tiers[0].is_up

        wait_until(is_back, timeout_s=30, what="the next supervisor's worker")
        assert engine.page.get(Word.SUPERVISOR_PID) != old
        assert load(engine, request(engine, "c"), keys) == len(keys)


def test_a_stopped_worker_stalls_nothing(session_name, tmp_path):
    """S60: every call returns; after the deadline a miss; then it is replaced."""
    config = make_config(session_name, [slab(tmp_path)], job_deadline_s=1.0)
    with Engine(config) as engine:
        keys = keys_of(0, 8)
        store(engine, request(engine, "a"), keys)
        assert engine.wait_idle(30)
        drop_primary(engine)
        pid = tier_word(engine, TierWord.WORKER_PID)
        os.kill(pid, signal.SIGSTOP)
        ctx = request(engine, "b")
        assert scan(engine, ctx, keys) is None
        hits = []

        def is_definite():
            hits[:] = [scan(engine, ctx, keys)]
            return hits[0] is not None

        wait_until(is_definite, timeout_s=20, what="a definite miss")
        assert hits == [0]

        def is_back():
            step(engine)
            is_new = tier_word(engine, TierWord.WORKER_PID) != pid
            return is_new and engine.tiers[0].is_up

        wait_until(is_back, timeout_s=30, what="the stopped worker's successor")
        assert load(engine, request(engine, "c"), keys) == len(keys)
        engine.manager.check_integrity()


def test_a_second_engine_of_a_session_is_refused(session_name, tmp_path):
    config = make_config(session_name, [slab(tmp_path)])
    with Engine(config) as engine:
        with pytest.raises(SessionInUseError, match=session_name):
            Engine(config)
        store(engine, request(engine, "a"), keys_of(0, 4))
        assert engine.wait_idle(30)
        assert tier_word(engine, TierWord.BLOCKS_WRITTEN) == 4
        assert Path(f"/dev/shm/shmoffload.{session_name}.page").exists()


def test_bad_tiers_are_refused_with_a_sentence(session_name, tmp_path):
    with pytest.raises(ConfigError, match="slab"):
        Engine(make_config(session_name, [{"type": "slap", "path": str(tmp_path)}]))
    (tmp_path / "file").write_text("x")
    with pytest.raises(TierConfigError, match="file"):
        Engine(make_config(session_name, [slab(tmp_path / "file")]))
    two = [slab(tmp_path, name="one"), slab(tmp_path, name="two")]
    with pytest.raises(TierConfigError, match="in use"):
        Engine(make_config(session_name, two))


def test_close_twice_and_after_an_error(session_name, tmp_path):
    engine = Engine(make_config(session_name, [slab(tmp_path)]))
    ctx, keys = request(engine, "a"), keys_of(0, 2)
    store(engine, ctx, keys)
    engine.close()
    engine.close()
    step(engine)  # a server that has not noticed yet gets misses, no exception
    assert scan(engine, ctx, keys) == 0
    assert engine.prepare_store(keys, ctx) is None
    with pytest.raises(KeyError, match="off"):
        engine.prepare_load(keys, ctx)
    assert engine.wait_idle(1)
    config = make_config(session_name, [slab(tmp_path)])
    with pytest.raises(RuntimeError, match="of the server"), Engine(config):
        raise RuntimeError("a bug of the server")
