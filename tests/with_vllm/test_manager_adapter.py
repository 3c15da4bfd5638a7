"""The manager as vLLM calls it: types, steps, idleness, faults, the reset fence."""

import inspect
import logging

import numpy as np
import pytest
from adapter_kit import (
    END,
    HIT,
    HIT_PENDING,
    MISS,
    keys_of,
    server,
    settings_of,
    slab,
)
from vllm.v1.kv_offload import base as vllm_base

from shmoffload.testing.poll import wait_until
from shmoffload.vllm import manager
from shmoffload.vllm.copies.fence import CopyKind
from shmoffload.vllm.copies.slots_spec import SlotsLoadStoreSpec
from shmoffload.vllm.manager import ShmOffloadingManager
from shmoffload.vllm.report.metrics import METHODS
from shmoffload.wire.session import TierWord

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CHUNK_LEVEL = (
    getattr(vllm_base.OffloadPolicy, "CHUNK_LEVEL", None)
    or vllm_base.OffloadPolicy.BLOCK_LEVEL
)
REQUEST_LEVEL = vllm_base.OffloadPolicy.REQUEST_LEVEL


@pytest.fixture
def bare(session_name):
    """A server without tiers."""
    with server(settings_of(session_name)) as started:
        yield started


def test_every_method_of_vllm_is_ours():
    """A method that vLLM adds has to be decided on, not inherited by chance."""
    theirs = {
        name
        for name, member in vars(vllm_base.OffloadingManager).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }
    assert theirs <= set(vars(ShmOffloadingManager))
    for name in theirs:
        ours = inspect.signature(getattr(ShmOffloadingManager, name)).parameters
        wanted = inspect.signature(
            getattr(vllm_base.OffloadingManager, name)
        ).parameters
        assert list(ours) == list(wanted), name


def test_stores_and_loads_are_in_vllm_words(bare):
    """Slots come as our spec, int32, in key order, with tickets without holes."""
    keys = keys_of(0, 4)
    ctx = bare.request("a")
    assert bare.scan(ctx, keys) == [MISS]
    bare.manager.on_schedule_end(END)
    output = bare.offer(ctx, keys)
    assert isinstance(output, vllm_base.PrepareStoreOutput)
    assert isinstance(output.store_spec, SlotsLoadStoreSpec)
    assert output.store_spec.block_ids.dtype == np.int32
    assert (output.keys_to_store, output.evicted_keys) == (keys, [])
    assert output.store_spec.ticket == 1
    assert bare.scan(ctx, keys[:1]) == [HIT_PENDING]
    bare.manager.complete_store(set(keys), ctx)
    known = bare.manager.prepare_store(keys, ctx)
    assert (known.keys_to_store, known.store_spec.ticket) == ([], 0)
    assert bare.offer(ctx, keys_of(4, 1)).store_spec.ticket == 2
    assert set(bare.load(ctx, keys)) == {vllm_base.CacheHitSource.HOST}
    assert bare.scan(ctx, keys) == [HIT] * 4
    assert bare.manager.prepare_load(keys, ctx).ticket == 2


def test_an_offer_without_room_is_none(bare):
    """None, as vLLM expects, and nothing is left open."""
    ctx = bare.request("a")
    assert bare.manager.prepare_store(keys_of(0, 33), ctx) is None
    assert len(bare.store(ctx, keys_of(0, 32))) == 32


def test_policies_have_vllm_names(bare):
    """One tier or none asks: REQUEST_LEVEL, else vLLM's name for BLOCK_LEVEL."""
    ctx = vllm_base.ReqContext("a")
    assert bare.manager.on_new_request(ctx).policy is CHUNK_LEVEL


def test_positions_that_come_later_are_seen(bare):
    """vLLM notes a block's position when the request has grown so far."""
    ctx = bare.request("a")
    key = keys_of(0, 1)[0]
    ctx.set_offload_key_position(key, 64)
    live = bare.engine.manager._requests["a"].ctx
    assert live.key_positions == {key: 64}


def test_cascades_leave_with_the_last_copy(session_name, tmp_path):
    """F13: an idle server makes no step, and it is not asked for one either."""
    with server(settings_of(session_name, [slab(tmp_path)])) as started:
        ctx = started.request("a")
        started.manager.on_schedule_end(END)
        output = started.offer(ctx, keys_of(0, 5))
        started.manager.on_request_finished(ctx)
        started.manager.complete_store(set(output.keys_to_store), ctx)
        started.await_written(5)
        assert not started.manager.has_pending_work()


def test_known_blocks_leave_for_an_asking_tier(session_name, tmp_path):
    """0.32 prepares stores after the step's end; the tier gets them all the same."""
    with server(settings_of(session_name, [slab(tmp_path)])) as started:
        first = started.request("a", shmoffload={"store_tiers": []})
        keys = keys_of(0, 3)
        started.store(first, keys)
        started.manager.on_schedule_end(END)
        ctx = vllm_base.ReqContext(
            "b", kv_transfer_params={"shmoffload": {"policy": "request_level"}}
        )
        assert started.manager.on_new_request(ctx).policy is REQUEST_LEVEL
        assert started.load(ctx, keys)
        started.manager.on_schedule_end(END)
        assert started.offer(ctx, keys).keys_to_store == []
        started.manager.has_pending_work()  # what vLLM asks before it goes idle
        started.await_written(3)


def test_sources_are_told_after_the_load_is_prepared(session_name, tmp_path):
    """From the primary HOST, from the disk DISK once, then it is in the primary."""
    source = vllm_base.CacheHitSource
    with server(settings_of(session_name, [slab(tmp_path)])) as started:
        ctx, keys = started.request("a"), keys_of(0, 3)
        started.store(ctx, keys)
        started.await_written(3)
        assert started.load(ctx, keys) == [source.HOST] * 3
        started.drop_primary()
        assert started.load(ctx, keys[:2]) == [source.DISK] * 2
        assert started.load(started.request("b"), keys) == [
            source.HOST,
            source.HOST,
            source.DISK,
        ]
        assert started.load(ctx, keys) == [source.HOST] * 3


def test_the_memory_of_another_process_is_host(session_name):
    """A tier in memory is host memory; before a load is prepared too."""
    with server(
        settings_of(session_name, [{"type": "memory", "max_bytes": "8MiB"}])
    ) as started:
        ctx, keys = started.request("a"), keys_of(0, 2)
        started.store(ctx, keys)
        started.await_written(2)
        started.drop_primary()
        assert started.scan_to_end(ctx, keys) == [HIT, HIT]
        assert started.manager.get_load_source(keys[0], ctx) == "host"


def test_a_plug_in_of_unknown_kind_is_unspecified(session_name, tmp_path):
    """What no word fits is not guessed; a remote disk stays a disk."""
    with server(
        settings_of(session_name, [slab(tmp_path, medium="CPU", locality="REMOTE")])
    ) as started:
        ctx, keys = started.request("a"), keys_of(0, 1)
        started.store(ctx, keys)
        started.await_written(1)
        started.drop_primary()
        assert started.load(ctx, keys) == ["host"]


@pytest.mark.parametrize(
    ("params", "answer"),
    [
        ({"kv_load_tiers": [{"medium": "cpu"}]}, MISS),
        ({"kv_load_tiers": []}, MISS),
        ({"shmoffload": {"load_tiers": []}}, MISS),
        ({"kv_load_tiers": [{"medium": "storage"}]}, HIT_PENDING),
        ({}, HIT_PENDING),
    ],
)
def test_a_request_says_where_it_loads_from(session_name, tmp_path, params, answer):
    """vLLM's words and ours act; the same dict that came through the API."""
    with server(settings_of(session_name, [slab(tmp_path)])) as started:
        ctx, keys = started.request("a"), keys_of(0, 1)
        started.store(ctx, keys)
        started.await_written(1)
        started.drop_primary()
        assert started.scan(started.request("b", **params), keys) == [answer]


def test_a_fresh_server_wants_one_step(bare):
    """So that zeros reach /metrics; then it is as idle as it is."""
    assert bare.manager.has_pending_work()
    bare.manager.on_schedule_end(END)
    assert not bare.manager.has_pending_work()


def test_a_first_step_that_never_comes_is_not_waited_for(bare, monkeypatch):
    """Bounded, like every wait."""
    assert bare.manager.has_pending_work()
    monkeypatch.setattr(manager, "FIRST_STEP_TIMEOUT_S", 0.0)
    assert not bare.manager.has_pending_work()


def test_slots_under_a_copy_are_quarantined_until_its_ticket(bare):
    """0.32 does not say when copies of before a reset have ended; workers do."""
    ctx, table = bare.request("a"), bare.engine.manager.table
    done = bare.manager.prepare_store(keys_of(0, 2), ctx).store_spec.ticket
    late = bare.manager.prepare_store(keys_of(2, 3), ctx).store_spec.ticket
    bare.manager.reset_cache()
    assert table.num_quarantined == 5
    bare.log.done(CopyKind.STORE, late)
    bare.manager.on_schedule_end(END)
    assert table.num_quarantined == 5
    # Of after the reset, so not waited for.
    assert bare.manager.prepare_store(keys_of(0, 1), bare.request("b")).keys_to_store
    bare.log.done(CopyKind.STORE, done)
    assert bare.scan(ctx, keys_of(9, 1)) == [MISS]  # a step begins
    assert table.num_quarantined == 0
    assert table.num_free == 31


def test_a_copy_of_before_a_reset_is_not_taken_for_a_later_one(bare):
    """vLLM completes the new one only: the old slot must not be freed for it."""
    ctx, keys = bare.request("a"), keys_of(0, 1)
    old = bare.manager.prepare_store(keys, ctx).store_spec
    bare.manager.reset_cache()
    new = bare.offer(ctx, keys).store_spec  # its ticket waits for the older one
    assert new.block_ids != old.block_ids
    bare.manager.complete_store(set(keys), ctx)
    assert bare.scan(ctx, keys) == [HIT]
    assert bare.engine.manager.table.num_quarantined == 1
    bare.engine.manager.check_integrity()
    bare.log.done(CopyKind.STORE, old.ticket)
    bare.manager.on_schedule_end(END)
    assert bare.engine.manager.table.num_quarantined == 0


def test_slots_under_a_load_are_quarantined_until_its_ticket(bare):
    """The reverse direction: the GPU still reads them."""
    ctx, keys = bare.request("a"), keys_of(0, 2)
    bare.store(ctx, keys)
    assert bare.scan(ctx, keys) == [HIT, HIT]
    ticket = bare.manager.prepare_load(keys, ctx).ticket
    bare.manager.on_schedule_end(END)
    bare.manager.reset_cache()
    bare.manager.on_schedule_end(END)
    assert bare.engine.manager.table.num_quarantined == 2
    bare.log.done(CopyKind.LOAD, ticket)
    bare.manager.on_schedule_end(END)
    assert bare.engine.manager.table.num_quarantined == 0


def test_a_second_rank_holds_the_fence(session_name):
    """Slots are shared by all ranks: the slowest counts."""
    with server(settings_of(session_name, num_ranks=2)) as started:
        ctx = started.request("a")
        started.offer(ctx, keys_of(0, 2))
        started.manager.reset_cache()
        started.manager.on_schedule_end(END)
        assert started.engine.manager.table.num_quarantined == 2
        started.engine.region.set_copies_done(1, CopyKind.STORE, 1)
        started.manager.on_schedule_end(END)
        assert started.engine.manager.table.num_quarantined == 0


def test_vllm_may_end_the_fence_itself(bare):
    """0.33 calls ``on_reset_flushed``; our fence later finds nothing to do."""
    ctx = bare.request("a")
    ticket = bare.manager.prepare_store(keys_of(0, 2), ctx).store_spec.ticket
    bare.manager.reset_cache()
    bare.manager.on_reset_flushed()
    assert bare.engine.manager.table.num_quarantined == 0
    bare.log.done(CopyKind.STORE, ticket)
    bare.manager.on_schedule_end(END)
    bare.engine.manager.check_integrity()


# What fails ---------------------------------------------------------------------------

_CALLS = {
    "lookup": (lambda m, ctx: m.lookup(keys_of(0, 1)[0], ctx), MISS),
    "get_load_source": (
        lambda m, ctx: m.get_load_source(keys_of(0, 1)[0], ctx),
        "external_unspecified",
    ),
    "touch": (lambda m, ctx: m.touch(keys_of(0, 1), ctx), None),
    "complete_load": (lambda m, ctx: m.complete_load(keys_of(0, 1), ctx), None),
    "prepare_store": (lambda m, ctx: m.prepare_store(keys_of(0, 1), ctx), None),
    "complete_store": (lambda m, ctx: m.complete_store(keys_of(0, 1), ctx), None),
    "on_new_request": (
        lambda m, ctx: m.on_new_request(ctx),
        vllm_base.RequestOffloadingContext(policy=CHUNK_LEVEL),
    ),
    "on_request_finished": (lambda m, ctx: m.on_request_finished(ctx), None),
    "on_schedule_end": (lambda m, ctx: m.on_schedule_end(END), None),
    "has_pending_work": (lambda m, ctx: m.has_pending_work(), False),
    "take_events": (lambda m, ctx: list(m.take_events()), []),
    "reset_cache": (lambda m, ctx: m.reset_cache(), None),
    "on_reset_flushed": (lambda m, ctx: m.on_reset_flushed(), None),
    "get_stats": (lambda m, ctx: m.get_stats(), None),
    "shutdown": (lambda m, ctx: m.shutdown(), None),
}


class _Broken:
    """Raises whatever is asked of it."""

    def __getattr__(self, name):
        raise RuntimeError(f"planted: {name}")

    def __call__(self, *args):
        raise RuntimeError("planted: a call")


@pytest.mark.parametrize("method", _CALLS)
def test_no_exception_reaches_vllm(bare, monkeypatch, caplog, method):
    """One would end the server: a miss, a count, and one traceback in the log."""
    call, answer = _CALLS[method]
    ctx = bare.request("a")
    with monkeypatch.context() as planted:
        planted.setattr(bare.manager, "_engine", _Broken())
        planted.setattr(bare.manager, "_lookup", _Broken())
        planted.setattr(bare.manager._metrics, "_series", _Broken())
        with caplog.at_level(logging.ERROR, logger="shmoffload"):
            assert call(bare.manager, ctx) == answer
            assert call(bare.manager, ctx) == answer
    assert bare.manager._metrics._errors[method] == 2
    told = [record for record in caplog.records if f"in {method}" in record.message]
    assert len(told) == 1
    assert told[0].exc_info


def test_every_guarded_method_is_counted_by_name():
    """A method that is not in the table would raise while it reports."""
    assert set(_CALLS) | {"prepare_load"} == set(METHODS)


@pytest.mark.parametrize("error", [RuntimeError, KeyError])
def test_a_load_after_the_core_failed_has_right_bytes(bare, monkeypatch, error):
    """Between HIT and ``prepare_load`` there is no miss left to answer."""
    ctx, keys = bare.request("a"), keys_of(0, 3)
    bare.store(ctx, keys)
    slots = bare.engine.slots_of(keys)
    assert bare.scan(ctx, keys) == [HIT] * 3

    def fail(*args):
        raise error("planted")

    monkeypatch.setattr(bare.engine.manager, "prepare_load", fail)
    assert bare.manager.prepare_load(keys, ctx).block_ids.tolist() == slots.tolist()
    assert bare.engine.is_broken
    assert bare.scan(ctx, keys) == [MISS]
    bare.manager.complete_load(set(keys), ctx)
    assert bare.manager.prepare_store(keys_of(9, 1), ctx) is None


def test_a_load_of_what_was_no_hit_stops_the_server(bare, caplog):
    """The one exception: vLLM would compute with whatever it is given."""
    ctx = bare.request("a")
    with (
        caplog.at_level(logging.CRITICAL, logger="shmoffload"),
        pytest.raises(KeyError),
    ):
        bare.manager.prepare_load(keys_of(0, 1), ctx)
    assert "wrong bytes" in caplog.text


def test_calls_after_shutdown_are_misses(bare):
    """vLLM 0.33 may ask once more; twice shut down is fine."""
    ctx = bare.request("a")
    bare.store(ctx, keys_of(0, 1))
    bare.manager.shutdown()
    bare.manager.shutdown()
    assert bare.scan(ctx, keys_of(0, 1)) == [MISS]
    assert bare.manager.prepare_store(keys_of(0, 1), ctx) is None
    assert not bare.manager.has_pending_work()
    bare.manager.on_request_finished(ctx)
    assert bare.manager.get_stats() is None


def test_a_dead_worker_is_noticed_in_a_step(session_name, tmp_path):
    """Steps begin with reads: they hear of deaths though nobody signals."""
    with server(settings_of(session_name, [slab(tmp_path)])) as started:
        ctx = started.request("a")
        started.engine._control.kill_worker(
            0, started.engine.tiers[0].worker_epoch, reason="a test", now_s=0.0
        )

        def is_down():
            started.scan(ctx, keys_of(0, 1))
            started.manager.on_schedule_end(END)
            return started.tier_word(TierWord.RESTARTS) == 1

        wait_until(is_down, timeout_s=30.0, what="a restart")
