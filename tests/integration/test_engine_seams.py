"""What the vLLM adapter needs of an engine beyond the manager's calls."""

import pytest
from engine_kit import (
    END,
    bytes_of,
    keys_of,
    load,
    make_config,
    request,
    scan,
    slab,
    store,
)

from shmoffload.engine import Engine
from shmoffload.testing.poll import wait_until
from shmoffload.wire.session import TierWord


def test_flush_sends_what_a_last_copy_has_put_out(session_name, tmp_path):
    with Engine(make_config(session_name, [slab(tmp_path)])) as engine:
        ctx, keys = request(engine, "a"), keys_of(0, 5)
        engine.step_begin()
        output = engine.prepare_store(keys, ctx)
        for key, slot in zip(output.keys_to_store, output.slots.tolist(), strict=True):
            engine.slot_view(slot)[:] = bytes_of(key)
        engine.on_schedule_end(END)
        engine.on_request_finished(ctx)
        engine.complete_store(keys, ctx)  # after the last step
        engine.flush()
        wait_until(
            lambda: engine.page.get_tier(0, TierWord.BLOCKS_WRITTEN) == len(keys),
            timeout_s=30,
            what="the blocks on the disk, without a step",
        )
    engine.flush()  # closed: nothing to send, nothing raised


def test_slots_of_answers_when_the_core_has_failed(session_name, monkeypatch):
    with Engine(make_config(session_name, [])) as engine:
        ctx, keys = request(engine, "a"), keys_of(0, 3)
        store(engine, ctx, keys)
        engine.step_begin()
        assert scan(engine, ctx, keys) == 3
        pending = keys_of(50, 1)
        engine.prepare_store(pending, ctx)

        def fail(*_args):
            raise RuntimeError("a bug of ours")

        monkeypatch.setattr(engine.manager, "touch", fail)
        engine.touch(keys, ctx)
        assert engine.is_broken
        with pytest.raises(KeyError, match="off"):
            engine.prepare_load(keys, ctx)
        slots = engine.slots_of([keys[2], keys[0], keys[2]])
        assert slots.dtype == "int32"
        found = [bytes(engine.slot_view(slot)) for slot in slots.tolist()]
        assert found == [bytes_of(keys[2]), bytes_of(keys[0]), bytes_of(keys[2])]
        assert engine.slots_of([]).shape == (0,)
        for absent in (pending, keys_of(99, 1)):
            with pytest.raises(KeyError):
                engine.slots_of(keys + absent)
    with pytest.raises(KeyError, match="closed"):
        engine.slots_of(keys)


def test_slots_of_pins_nothing(session_name):
    with Engine(make_config(session_name, [])) as engine:
        keys = keys_of(0, 2)
        store(engine, request(engine, "a"), keys)
        engine.slots_of(keys)
        assert [engine.manager.table.blocks[key].pins for key in keys] == [0, 0]
        engine.manager.check_integrity()


def test_no_events_unless_asked_for(session_name):
    with Engine(make_config(session_name, [])) as engine:
        store(engine, request(engine, "a"), keys_of(0, 2))
        assert engine.take_events() == []


def test_events_of_the_primary(session_name):
    with Engine(make_config(session_name, []), events=True) as engine:
        ctx, keys = request(engine, "a"), keys_of(0, 2)
        store(engine, ctx, keys)
        (stored,) = engine.take_events()
        assert list(stored.keys) == keys
        assert not stored.is_removed
        assert engine.take_events() == []
        assert load(engine, ctx, keys) == 2
        assert engine.take_events() == []
