"""What the tests of warm re-attach share; run as a script it is the engine that dies.

``python warm_kit.py CONFIG NUM_STORED NUM_UNSEALED``: start, store that many blocks,
let them reach the tiers, store some more that reach none, say "ready", and wait.
"""

import contextlib
import faulthandler
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from shmoffload.core.types import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from shmoffload.engine import Engine
from shmoffload.wire.config import decode, encode, from_dict

BLOCK_BYTES = 5000  # padded: the checksum is of the payload alone
NUM_SLOTS = 16
LONG_S = 60.0
SHM = Path("/dev/shm")
END = ScheduleEndContext()


def config_of(session, *, namespace="a", persist=False, check=True, tiers=None):
    return from_dict(
        {
            "session": {"name": session, "namespace": namespace},
            "primary": {
                "slots": NUM_SLOTS,
                "block_bytes": BLOCK_BYTES,
                "persist": persist,
                "check_adopted": check,
            },
            # Not polite: beside servers that spin, a nice worker starves.
            "tier": [{"type": "memory", "nice": 0}] if tiers is None else tiers,
        }
    )


def key_of(i):
    return make_offload_key(hashlib.sha256(b"%d" % i).digest())


KEYS = [key_of(i) for i in range(NUM_SLOTS)]


def bytes_of(key):
    return hashlib.shake_128(key).digest(BLOCK_BYTES)


def store(engine, keys, *, commit=True):
    """Store blocks; without ``commit`` they stay PENDING."""
    ctx = ReqContext(f"store {keys[0].hex()}")
    engine.on_new_request(ctx)
    engine.step_begin()
    granted = engine.prepare_store(keys, ctx)
    for key, slot in zip(granted.keys_to_store, granted.slots.tolist(), strict=True):
        engine.slot_view(slot)[:] = bytes_of(key)
    if commit:
        engine.complete_store(granted.keys_to_store, ctx)
        engine.on_request_finished(ctx)
    engine.on_schedule_end(END)


def load_all(engine, keys=KEYS):
    """Return which keys the primary has, each loaded with its bytes verified.

    Nothing is asked of a tier: a key that the primary lacks is not looked up.
    """
    ctx = ReqContext("load")
    engine.on_new_request(ctx)
    engine.step_begin()
    found = [key for key in keys if key in engine.manager.table.blocks]
    assert all(engine.lookup(key, ctx) is LookupResult.HIT for key in found)
    assert all(engine.load_source(key) == -1 for key in found)
    for key, slot in zip(found, engine.prepare_load(found, ctx).tolist(), strict=True):
        assert bytes(engine.slot_view(slot)) == bytes_of(key), "wrong bytes"
    engine.complete_load(found, ctx)
    engine.on_request_finished(ctx)
    engine.on_schedule_end(END)
    engine.manager.check_integrity()
    counters = engine.manager.counters
    assert sum(counters.hits_tier) == counters.promotions_started == 0
    return found


def region_names(session):
    return sorted(p.name for p in SHM.glob(f"shmoffload.{session}.region"))


def our_names(session):
    return sorted(p.name for p in SHM.glob(f"shmoffload.{session}*"))


@contextlib.contextmanager
def engine_process(config, num_stored, num_unsealed=0, **popen):
    """An engine in its own process that has stored; killed at the end."""
    words = [encode(config).decode(), str(num_stored), str(num_unsealed)]
    with subprocess.Popen(
        [sys.executable, __file__, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        **popen,
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def daemon_process(directory, config):
    """``shmoffload serve`` for the tiers of a configuration."""
    lines = [f'[session]\nname = "{config.session.name}"']
    lines += [f'[[tier]]\ntype = "{tier.type}"\nnice = 0' for tier in config.tier]
    file = directory / "serve.toml"
    file.write_text("\n".join(lines))
    with subprocess.Popen(
        [sys.executable, "-m", "shmoffload.cli", "serve", "-c", str(file)],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            line = process.stderr.readline()
            assert "ready" in line, line + process.stderr.read()
            yield process
        finally:
            process.terminate()


def main():
    faulthandler.dump_traceback_later(LONG_S * 0.9, exit=False)  # a hang says where
    engine = Engine(decode(sys.argv[1].encode()))
    num_stored, num_unsealed = map(int, sys.argv[2:])
    store(engine, KEYS[:num_stored])
    assert engine.wait_idle(LONG_S)
    if num_unsealed:
        store(engine, KEYS[num_stored:][:num_unsealed], commit=False)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if sys.stdin.readline() == "reset cut\n":
        engine.region.end_change = lambda: os.kill(os.getpid(), signal.SIGKILL)
        engine.reset_cache()
    engine.close()


if __name__ == "__main__":
    main()
