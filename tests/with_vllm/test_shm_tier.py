"""``ShmTier`` under vLLM's own tiering manager: bytes, deaths, each job once."""

import os
import random
import signal
import threading
import time

import pytest
from shm_tier_kit import VLLM, WAIT_S, bytes_of, keys_of, offloading_config, serving

from shmoffload.errors import ConfigError
from shmoffload.testing.poll import wait_until

# Each test starts processes, most of them twice: slow where others use the machine.
pytestmark = pytest.mark.timeout(200)


def slab(path):
    return {"tier": "slab", "path": str(path), "max_bytes": "16MiB"}


def test_blocks_come_back_from_the_tier(session_name, tmp_path):
    keys = keys_of(0, 12)
    with serving(session_name, **slab(tmp_path)) as server:
        assert server.store(keys) == keys
        server.wait_resident(12)
        server.drop_primary()
        assert server.load(keys) == 12


def test_more_blocks_than_primary_and_staging_hold(session_name, tmp_path):
    batches = [keys_of(start, 8) for start in range(0, 160, 8)]
    with serving(session_name, **slab(tmp_path)) as server:
        for number, batch in enumerate(batches, start=1):
            assert server.store(batch) == batch
            server.wait_resident(8 * number)
        for batch in batches:
            assert server.load(batch) == 8


def test_a_load_larger_than_the_staging_goes_in_pieces(session_name, tmp_path):
    keys = keys_of(0, 32)
    options = {"num_rows": 40, "staging_bytes": "80KiB"}  # four slots
    with serving(session_name, **options, **slab(tmp_path)) as server:
        for start in range(0, 32, 2):
            server.store(keys[start : start + 2])
            server.wait_resident(start + 2)
        server.drop_primary()
        assert server.load(keys) == 32


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_never_gives_wrong_bytes(session_name, tmp_path, seed):
    rng = random.Random(seed)
    chains = [keys_of(100 * number, 12) for number in range(8)]
    hits = 0
    with serving(session_name, num_rows=24, **slab(tmp_path)) as server:
        for _ in range(150):
            keys = rng.choice(chains)[: rng.randint(1, 12)]
            action = rng.random()
            if action < 0.45:
                server.store(keys)
            elif action < 0.9:
                hits += server.load(keys)
            elif action < 0.95:
                server.drop_primary()
            else:
                server.step()
    assert hits > 50


def test_a_restart_keeps_the_blocks(session_name, tmp_path):
    keys = keys_of(0, 10)
    with serving(session_name, **slab(tmp_path)) as server:
        server.store(keys)
        server.wait_resident(10)
    with serving(session_name, **slab(tmp_path)) as server:
        assert server.load(keys) == 10


def test_another_namespace_is_a_miss(session_name, tmp_path):
    keys = keys_of(0, 4)
    with serving(session_name, **slab(tmp_path)) as server:
        server.store(keys)
        server.wait_resident(4)
    other = offloading_config(model=VLLM.config.OffloadingModelConfig("/b", "float32"))
    with serving(session_name, config=other, **slab(tmp_path)) as server:
        assert server.load(keys) == 0


def test_a_killed_worker_is_a_miss_and_comes_back(session_name, tmp_path):
    keys = keys_of(0, 8)
    with serving(session_name, **slab(tmp_path)) as server:
        server.store(keys)
        server.wait_resident(8)
        old = server.worker_pid
        os.kill(old, signal.SIGKILL)
        server.drop_primary()
        assert server.load(keys) <= 8  # of the staging, or a miss; never wrong
        wait_until(
            lambda: server.step() or server.worker_pid not in (0, old),
            timeout_s=WAIT_S,
            what="a new worker",
        )
        server.wait_resident(8)
        server.drop_primary()
        assert server.load(keys) == 8


def test_a_worker_killed_under_a_load_fails_the_load(session_name, tmp_path):
    keys = keys_of(0, 30)
    with serving(session_name, num_rows=40, **slab(tmp_path)) as server:
        for start in range(0, 30, 10):
            server.store(keys[start : start + 10])
            server.wait_resident(start + 10)
        server.drop_primary()
        os.kill(server.worker_pid, signal.SIGSTOP)
        ctx = server.request()
        assert server.scan(keys, ctx) is None  # the load is on its way
        assert "load" in server.tier.given.values()
        os.kill(server.worker_pid, signal.SIGKILL)
        server.settle()
        server.finish(ctx)
        server.wait_resident(30)
        server.drop_primary()
        assert server.load(keys) == 30


def test_a_corrupted_block_is_a_miss(session_name, tmp_path):
    keys = keys_of(0, 6)
    with serving(session_name, **slab(tmp_path)) as server:
        server.store(keys)
        server.wait_resident(6)
    bad = bytes_of(keys[3])[:64]
    (file,) = [p for p in tmp_path.rglob("*") if p.is_file() and bad in p.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.index(bad)] ^= 0xFF
    file.write_bytes(data)
    with serving(session_name, **slab(tmp_path)) as server:
        assert server.load(keys) == 3
        assert server.load(keys[4:]) == 2
        assert server.store(keys[3:4]) == keys[3:4]  # it can be stored again
        server.wait_resident(6)


def test_a_stopped_worker_fails_stores_and_never_waits(session_name, tmp_path):
    with serving(session_name, num_rows=64, **slab(tmp_path)) as server:
        os.kill(server.worker_pid, signal.SIGSTOP)
        began = time.monotonic()
        for start in range(0, 60, 6):
            assert server.store(keys_of(start, 6)) is not None
            server.settle()
        assert time.monotonic() - began < 5
        failed = [result for result in server.tier.results if not result.success]
        assert failed
        assert not server.manager.has_pending_work()  # no pin is left
        os.kill(server.worker_pid, signal.SIGCONT)
        server.wait_resident(12)


def test_a_load_that_nobody_answers_ends_at_its_deadline(session_name, tmp_path):
    keys = keys_of(0, 6)
    limits = {"limits": {"job_deadline_s": 1.0, "hung_after_s": 60.0}}
    with serving(session_name, **limits, **slab(tmp_path)) as server:
        server.store(keys)
        server.wait_resident(6)
    with serving(session_name, **limits, **slab(tmp_path)) as server:
        os.kill(server.worker_pid, signal.SIGSTOP)
        assert server.load(keys) == 0
        server.wait_resident(6)  # by the worker that took its place
        assert server.load(keys) == 6


def test_drain_ends_every_job_and_touches_no_row_afterwards(session_name, tmp_path):
    keys = keys_of(0, 12)
    with serving(session_name, **slab(tmp_path)) as server:
        server.store(keys)
        server.wait_resident(12)
    with serving(session_name, **slab(tmp_path)) as server:
        ctx = server.request()
        assert server.scan(keys, ctx) is None
        assert server.manager.has_pending_work()
        server.drop_primary()  # asserts that vLLM has no job left
        server.check_answers()
        before = bytes(server.view)
        server.wait_resident(12)
        assert bytes(server.view) == before
        server.finish(ctx)
        assert server.load(keys) == 12


def test_no_job_is_answered_under_its_copy(session_name, tmp_path):
    keys = keys_of(0, 6)
    with serving(session_name, **slab(tmp_path)) as server:
        server.store(keys)
        server.wait_resident(6)
        server.drop_primary()
        copier, may_copy = server.tier._jobs._copier, threading.Event()
        copy = copier._copy

        def slow_copy(copies):
            assert may_copy.wait(WAIT_S)
            return copy(copies)

        copier._copy = slow_copy
        ctx = server.request()
        assert server.scan(keys, ctx) is None
        server.store(keys_of(50, 4))
        for _ in range(20):
            server.step()
        assert sum(server.tier.answered.values()) == 1  # the first store
        assert server.scan(keys, ctx) is None
        may_copy.set()
        server.settle()
        server.finish(ctx)
        assert server.load(keys) == 6


def test_known_blocks_are_not_copied_again(session_name, tmp_path):
    keys = keys_of(0, 6)
    options = {"policy": "request_level", **slab(tmp_path)}
    with serving(session_name, **options) as server:
        server.store(keys)
        assert server.policy is VLLM.base.OffloadPolicy.REQUEST_LEVEL
        server.wait_resident(6)
        server.engine.reset_cache()  # its staging: only the tier has them now
        prepared = server.engine.manager.counters.stores_prepared
        assert server.store(keys) == []  # vLLM offers them to the tier all the same
        server.settle()
        assert [result.success for result in server.tier.results] == [True, True]
        assert server.engine.manager.counters.stores_prepared == prepared


def test_no_record_of_requests_and_jobs_is_left(session_name, tmp_path):
    with serving(session_name, **slab(tmp_path)) as server:
        for start in range(0, 48, 6):
            server.store(keys_of(start, 6))
            server.drop_primary()
            server.load(keys_of(start // 2, 4))
        assert "load" in server.tier.given.values()
        server.settle()
        jobs, book = server.tier._jobs, server.engine.manager._book
        assert not jobs._requests
        assert not jobs.num_open
        assert not book.live
        assert not book.closing
        server.engine.manager.check_integrity()


@pytest.mark.parametrize(
    "where",
    ["holds", "_reserve", "_end_store", "_take_ready", "_look_up", "begin_step"],
)
def test_a_bug_of_ours_is_a_miss_not_an_exception(
    session_name, tmp_path, monkeypatch, where, caplog
):
    keys = keys_of(0, 6)
    with serving(session_name, **slab(tmp_path)) as server:
        server.store(keys)
        server.wait_resident(6)
        server.drop_primary()
        server.engine.reset_cache()  # its staging
        calls = vars(type(server.tier._jobs))[where]

        def broken(self, *args):
            monkeypatch.setattr(type(self), where, calls)
            raise ValueError("a planted bug")

        monkeypatch.setattr(type(server.tier._jobs), where, broken)
        server.store(keys_of(50, 4))
        server.load(keys)
        server.settle()
        assert server.tier._jobs.is_off
        assert server.load(keys_of(60, 2)) == 0
        assert server.store(keys_of(70, 2)) is not None
    assert "is off" in caplog.text


def test_vllms_memory_is_let_go_at_shutdown(session_name, tmp_path):
    with serving(session_name, **slab(tmp_path)) as server:
        server.store(keys_of(0, 4))
    del server.view
    server.region._view.release()
    server.region.cleanup()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, 'add "tier"'),
        ({"tier": "slob", "path": "/tmp/x"}, "slab"),
        ({"tier": "slab", "path": "/tmp/x", "stagging_bytes": 1}, "staging_bytes"),
        ({"tier": "memory", "staging_bytes": 1}, "too small"),
        ({"tier": "memory", "limits": {"credit_bytes": 1}}, "staging_bytes"),
    ],
)
def test_a_wrong_option_is_one_sentence(session_name, options, sentence):
    with (
        pytest.raises(ConfigError, match=sentence),
        serving(session_name, **options),
    ):
        pass


def test_a_memory_tier_says_that_it_is_memory(session_name):
    with serving(session_name, tier="memory", max_bytes="4MiB") as server:
        assert server.tier.medium is VLLM.base.Medium.CPU
        server.store(keys_of(0, 4))
        server.wait_resident(4)
        server.drop_primary()
        assert server.load(keys_of(0, 4)) == 4


def test_a_failed_start_leaves_no_engine(session_name, tmp_path, monkeypatch):
    class BrokenJobs:
        def __init__(self, engine, view):
            raise ValueError("a planted bug")

    monkeypatch.setattr(VLLM.tier, "RowJobs", BrokenJobs)
    with (
        pytest.raises(ValueError, match="a planted bug"),
        serving(session_name, **slab(tmp_path)),
    ):
        pass
    # The fixtures look for the engine's memory and its processes.


@pytest.mark.parametrize("where", ["_copier", "_engine"])
def test_a_failing_shutdown_raises_nothing_and_ends_the_engine(
    session_name, tmp_path, monkeypatch, caplog, where
):
    with serving(session_name, **slab(tmp_path)) as server:
        server.store(keys_of(0, 4))
        part = getattr(server.tier._jobs, where)
        close = part.close

        def broken(*args):
            close(*args)
            raise ValueError("a planted bug")

        monkeypatch.setattr(part, "close", broken)
        server.tier.shutdown()
        assert "a planted bug" in caplog.text
