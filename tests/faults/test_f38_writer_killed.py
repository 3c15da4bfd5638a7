"""F38: a writer's death rolls everything back that it had in hand, within a step.

A death at every stage of a worker's life: ``tests/crash/test_death_matrix``.
"""

import engine_kit as kit
import pytest
from faults_kit import Tap, check_quiet, keys, make_config
from late_faults_kit import WAIT_S, finish_all, patch_workers, pids, wait_up, word
from supervisor_kit import wait_gone

from shmoffload.core.types import LookupResult
from shmoffload.engine import Engine
from shmoffload.testing.faults.deaths import Death, strike
from shmoffload.testing.poll import wait_until
from shmoffload.wire.session import TierWord

pytestmark = pytest.mark.timeout(300)

# Where a job of a disk tier stands when its worker is killed. The gate is a file: while
# it is there, who comes by says so and waits.
PRELUDE = """
GATE = {gate!r}
def gate(what):
    while tier_idx == 0 and os.path.exists(GATE):
        open(GATE + what, "w").close()
        time.sleep(0.002)
"""
POINTS = {
    "before a byte is read or written": """
from shmoffload.worker.executor import Executor
def held(real, what):
    def run(self, job, outcome):
        gate(what)
        return real(self, job, outcome)
    return run
Executor._run_load = held(Executor._run_load, "load")
Executor._run_store = held(Executor._run_store, "store")
""",
    "half written, half read": """
from shmoffload.worker.tiers.fs import FsTier
turns = dict(store=0, load=0)
def held(real, what):
    def run(self, key, *rest):
        turns[what] += os.path.exists(GATE)
        if turns[what] > 2:  # of a job's four blocks
            gate(what)
        return real(self, key, *rest)
    return run
FsTier._write = held(FsTier._write, "store")
FsTier._get = held(FsTier._get, "load")
""",
    "written and not renamed": """
from shmoffload.worker.tiers.fs import FsTier
def held(real, what):
    def run(self, *rest):
        gate(what)
        return real(self, *rest)
    return run
FsTier._give_name = held(FsTier._give_name, "store")
FsTier._get = held(FsTier._get, "load")
""",
    "done and not answered": """
from shmoffload.worker.replies import Replies
real = Replies.answer
def answer(self, job, *rest, **more):
    gate("load" if job.is_promotion else "store")
    return real(self, job, *rest, **more)
Replies.answer = answer
""",
}
# Blocks of the first store that are found again: a put goes from the last to the first.
KEPT = {
    "before a byte is read or written": [],
    "half written, half read": [102, 103],
    "written and not renamed": [],
    "done and not answered": [100, 101, 102, 103],
}


def make(session, tmp_path):
    """A disk tier that is killed, and one that holds a single block."""
    tiers = [
        {
            "type": "fs",
            "path": str(tmp_path / "d"),
            "max_bytes": "4MiB",
            "min_free": 0,
            "threads": 2,
            "nice": 0,
        },
        {"type": "memory", "max_bytes": "20KiB", "nice": 0},
    ]
    return make_config(
        session, tiers, slots=48, restart_backoff_s=4.0, restart_backoff_max_s=4.0
    )


def start_jobs(engine):
    """Three stores and two loads, of four blocks each; the loads' come from disk."""
    kit.drop_primary(engine)
    for i in range(3):
        ctx = kit.request(engine, f"store-{i}")
        kit.store(engine, ctx, keys(*range(100 + 10 * i, 104 + 10 * i)))
        engine.on_request_finished(ctx)
    for i in range(2):
        ctx = kit.request(engine, f"load-{i}")
        assert kit.scan(engine, ctx, keys(*range(10 * i, 10 * i + 4))) is None
        engine.on_request_finished(ctx)


@pytest.mark.parametrize("point", POINTS)
def test_f38_five_jobs_are_failed_once(session_name, tmp_path, monkeypatch, point):
    gate = tmp_path / "gate"
    patch = PRELUDE.format(gate=str(gate)) + POINTS[point]
    patch_workers(monkeypatch, patch)
    old = [*range(4), *range(10, 14)]
    with Engine(make(session_name, tmp_path)) as engine:
        first = kit.request(engine, "old")
        kit.store(engine, first, keys(*old))
        assert engine.wait_idle(WAIT_S)
        engine.on_request_finished(first)
        gate.touch()
        tier, table, others = engine.tiers[0], engine.manager.table, pids(engine)[1]
        failed = engine.page.get_tier(0, TierWord.JOBS_FAILED)
        tap = Tap(engine)
        start_jobs(engine)
        wait_until(
            lambda: (
                kit.step(engine)
                or (
                    all(gate.with_name(f"gate{w}").exists() for w in ("store", "load"))
                    and engine.tiers[1].num_open_jobs == 0  # its pins are not ours
                )
            ),
            timeout_s=WAIT_S,
            what="a store and a load to be held",
        )
        assert tier.num_open_jobs == 5
        assert len(tap.job_ids) == 5
        (victim, _) = pids(engine)
        strike(victim, Death.SIGKILL)
        wait_gone([victim])
        wait_until(
            lambda: kit.step(engine) or not tier.is_up,
            timeout_s=WAIT_S,
            what="the death to be noticed",
        )
        # All at once, in that step: nothing of it is left to wait for.
        assert tier.num_open_jobs == tier.open_store_bytes == 0
        assert tap.done == []  # no answer of its own has come
        assert tier.late_replies == tier.bad_replies == 0
        assert word(engine, TierWord.JOBS_FAILED) == failed + 5
        assert table.num_pinned == table.num_pending == table.num_quarantined == 0
        assert not set(keys(*old)) & set(table.blocks)  # never shown as ready
        ctx = kit.request(engine, "down")
        engine.step_begin()
        everything = [*old, *range(100, 104), *range(110, 114), *range(120, 124)]
        answers = [tier.lookup(key, ctx) for key in keys(*everything)]
        assert set(answers) == {LookupResult.MISS}
        engine.on_schedule_end(kit.END)
        assert kit.scan(engine, ctx, keys(*old)) == 0
        gate.unlink()
        wait_up(engine)
        kept = [n for n in everything if tier.lookup(keys(n)[0], ctx) != answers[0]]
        assert kept == [*old, *KEPT[point]]
        assert pids(engine)[1] == others
        kit.drop_primary(engine)
        for group in (old[:4], old[4:], KEPT[point]):
            found = kit.load(engine, kit.request(engine, f"r{group}"), keys(*group))
            assert found == len(group)
        assert list(tmp_path.rglob("*.tmp")) == []
        finish_all(engine)
        check_quiet(engine)
