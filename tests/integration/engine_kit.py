"""A few lines of scheduler, for tests that drive a real engine."""

import hashlib

from shmoffload.core.types import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from shmoffload.testing.poll import wait_until
from shmoffload.wire import config as wire_config

BLOCK_BYTES = 16 * 1024
END = ScheduleEndContext()


def make_config(session, tiers, *, slots=32, namespace="test", **limits):
    return wire_config.from_dict(
        {
            "session": {"name": session, "namespace": namespace},
            "primary": {"block_bytes": BLOCK_BYTES, "slots": slots},
            "tier": tiers,
            # A test holds a tier as long as it likes, however quick it was before.
            "limits": {"close_timeout_s": 10.0, "job_deadline_min_s": 600.0, **limits},
        }
    )


def slab(path, **more):
    return {"type": "slab", "path": str(path), "max_bytes": "8MiB", **more}


def keys_of(start, count):
    return [
        make_offload_key(hashlib.sha256(b"%d" % i).digest())
        for i in range(start, start + count)
    ]


def bytes_of(key):
    return hashlib.shake_128(key).digest(BLOCK_BYTES)


def step(engine):
    engine.step_begin()
    engine.on_schedule_end(END)


def store(engine, ctx, keys):
    """Offer keys and copy what is wanted; the blocks cascade from here on."""
    engine.step_begin()
    output = engine.prepare_store(keys, ctx)
    assert output is not None, "the primary has no room"
    for key, slot in zip(output.keys_to_store, output.slots.tolist(), strict=True):
        engine.slot_view(slot)[:] = bytes_of(key)
    engine.complete_store(output.keys_to_store, ctx)
    engine.on_schedule_end(END)
    return list(output.keys_to_store)


def scan(engine, ctx, keys):
    """One step's prefix scan; number of hits, or None to ask again."""
    engine.step_begin()
    results = []
    for key in keys:
        results.append(engine.lookup(key, ctx))
        if results[-1] is LookupResult.MISS:
            break
    engine.on_schedule_end(END)
    waits = {LookupResult.HIT_PENDING, LookupResult.RETRY}
    return None if waits & set(results) else results.count(LookupResult.HIT)


def load(engine, ctx, keys, *, timeout_s=30.0):
    """Scan until definite, load and verify the hits; return their number."""
    answer = []

    def is_definite():
        hits = scan(engine, ctx, keys)
        if hits is not None:
            answer.append(hits)
        return hits is not None

    wait_until(is_definite, timeout_s=timeout_s, what="a definite scan")
    engine.step_begin()
    hits = keys[: answer[0]]
    assert all(engine.lookup(key, ctx) is LookupResult.HIT for key in hits)
    for key, slot in zip(hits, engine.prepare_load(hits, ctx).tolist(), strict=True):
        assert bytes(engine.slot_view(slot)) == bytes_of(key), "wrong bytes"
    engine.complete_load(hits, ctx)
    engine.on_schedule_end(END)
    return len(hits)


def request(engine, name):
    ctx = ReqContext(name)
    engine.on_new_request(ctx)
    return ctx


def drop_primary(engine):
    """Forget the primary; tiers keep their blocks."""
    engine.reset_cache()
    step(engine)
