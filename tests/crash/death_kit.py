"""One session with a tier that can be held, for the matrix of deaths.

The held tier is a plug-in: its worker finds it by an entry point on ``PYTHONPATH``.
Files in a folder say where it holds; it says there that it has got so far. The same
module is the engine's side, in the test's process and in ``doomed_engine``.
"""

import sys
from pathlib import Path

from shmoffload.testing.poll import wait_until
from shmoffload.wire.session import TierWord

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "integration"))

import engine_kit as kit  # noqa: E402

NUM_SLOTS, NUM_KEYS = 32, 6
STAGES = ["starting", "idle", "mid-load", "mid-store", "draining"]
EXIT_CODE = 7
WAIT_S = 60

HELD_TIER = """
import os, threading, time
from pathlib import Path
from shmoffload.worker.tiers.slab import SlabTier

class HeldTier(SlabTier):
    def open(self, config, region, namespace):
        self.control = Path(config.path).parent / "control"
        threading.Thread(target=self.obey, daemon=True).start()
        self.hold("open")
        return super().open(config, region, namespace)

    def obey(self):
        while True:
            try:
                (self.control / "exit").unlink()
            except FileNotFoundError:
                time.sleep(0.01)
            else:
                os._exit(7)

    def hold(self, where):
        if (self.control / f"hold-{where}").exists():
            (self.control / f"held-{where}").touch()
            while (self.control / f"hold-{where}").exists():
                time.sleep(0.002)

    def put(self, keys, slots, deadline_s):
        half = len(keys) // 2
        done = super().put(keys[:half], slots[:half], deadline_s)
        self.hold("store")
        return done + super().put(keys[half:], slots[half:], deadline_s)

    def get(self, keys, slots, deadline_s):
        half = len(keys) // 2
        done = super().get(keys[:half], slots[:half], deadline_s)
        self.hold("load")
        return done + super().get(keys[half:], slots[half:], deadline_s)
"""


def install_plugin(folder):
    """Put the held tier where ``PYTHONPATH`` finds it."""
    info = folder / "held_tier-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: held-tier\nVersion: 1\n"
    )
    (info / "entry_points.txt").write_text(
        "[shmoffload.tiers]\nheld = held_tier:HeldTier\n"
    )
    (folder / "held_tier.py").write_text(HELD_TIER)


def blocks(stage):
    """Keys of a stage: in the tiers before it, under way in it, stored after it."""
    first = 1000 * STAGES.index(stage)
    return [kit.keys_of(first + at, NUM_KEYS) for at in (0, 100, 200)]


class Control:
    """The folder by which a held tier is told, and tells."""

    def __init__(self, folder):
        self.folder = folder / "control"
        self.folder.mkdir(exist_ok=True)

    def hold(self, where):
        (self.folder / f"hold-{where}").touch()

    def release(self):
        for file in [*self.folder.glob("hold-*"), *self.folder.glob("held-*")]:
            file.unlink(missing_ok=True)

    def is_held(self, where):
        return (self.folder / f"held-{where}").exists()

    def wait_held(self, where, *, meanwhile=lambda: None):
        wait_until(
            lambda: meanwhile() or self.is_held(where),
            timeout_s=WAIT_S,
            what=f"the tier to be held at {where}",
        )

    def exit_worker(self):
        (self.folder / "exit").touch()


def make_config(session, folder, *, hung_after_s=30.0, start_timeout_s=90.0):
    """Hangs are found late unless asked for: a busy machine looks like one."""
    tiers = [
        {
            "type": "held",
            "path": str(folder / "slab"),
            "max_bytes": "2MiB",
            "min_free": 0,
            "nice": 0,
        },
        {"type": "memory", "max_bytes": "2MiB", "nice": 0},
    ]
    return kit.make_config(
        session,
        tiers,
        slots=NUM_SLOTS,
        heartbeat_s=0.1,
        hung_after_s=hung_after_s,
        job_deadline_s=20.0,
        start_timeout_s=start_timeout_s,
        restart_backoff_s=0.05,
        restart_backoff_max_s=0.2,
        close_timeout_s=20.0,
    )


def reach(stage, engine, control):
    """Bring an engine that is up to a stage, its old blocks in both tiers."""
    old, new, _ = blocks(stage)
    ctx = kit.request(engine, "old")
    assert kit.store(engine, ctx, old) == old
    assert engine.wait_idle(WAIT_S)
    engine.on_request_finished(ctx)
    kit.step(engine)
    if stage in ("mid-store", "draining"):
        control.hold("store")
        ctx = kit.request(engine, "new")
        kit.store(engine, ctx, new)
        engine.on_request_finished(ctx)
        control.wait_held("store", meanwhile=lambda: kit.step(engine))
    elif stage == "mid-load":
        kit.drop_primary(engine)
        control.hold("load")
        ctx = kit.request(engine, "load")
        assert kit.scan(engine, ctx, old) is None
        control.wait_held("load", meanwhile=lambda: kit.scan(engine, ctx, old))
        engine.on_request_finished(ctx)
        kit.step(engine)


def is_all_up(engine):
    kit.step(engine)
    return all(tier.is_up for tier in engine.tiers)


def settle(engine):
    """Wait until every tier is up and every job answered."""
    wait_until(lambda: is_all_up(engine), timeout_s=WAIT_S, what="all tiers to be up")
    assert engine.wait_idle(WAIT_S)
    kit.step(engine)


def check_quiet(engine):
    """Nothing is open, pinned or lost, and no answer came twice."""
    engine.manager.check_integrity()
    table = engine.manager.table
    assert not engine.is_broken
    assert not engine.has_pending_work()
    assert table.num_pending == table.num_pinned == table.num_quarantined == 0
    assert len(table.blocks) + table.num_free == table.num_slots
    assert [tier.num_open_jobs for tier in engine.tiers] == [0, 0]
    assert [tier.late_replies for tier in engine.tiers] == [0, 0]
    assert [tier.open_store_bytes for tier in engine.tiers] == [0, 0]


def check_serves(engine, stages):
    """Old blocks come back from a tier with right bytes, new ones are taken."""
    kit.drop_primary(engine)
    ctx = kit.request(engine, "again")
    for stage in stages:
        old, new, later = blocks(stage)
        assert kit.load(engine, ctx, old) == NUM_KEYS
        assert 0 <= kit.load(engine, ctx, new) <= NUM_KEYS  # right bytes or a miss
    kit.store(engine, ctx, later)
    assert engine.wait_idle(WAIT_S)
    kit.drop_primary(engine)
    assert kit.load(engine, ctx, later) == NUM_KEYS
    engine.on_request_finished(ctx)
    kit.step(engine)
    check_quiet(engine)


def worker_pid(engine, tier_idx=0):
    return engine.page.get_tier(tier_idx, TierWord.WORKER_PID)
