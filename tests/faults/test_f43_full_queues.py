"""F43: large jobs, full queues, many queues: no limit of the system is a surprise."""

import array
import time

import engine_kit as kit
import pytest
from faults_kit import Tap, check_quiet, keys, make_config
from late_faults_kit import (
    WAIT_S,
    engine_process,
    finish_all,
    hear,
    pids,
    tell,
    wait_nothing_left,
    wait_up,
    word,
)
from supervisor_kit import wait_gone
from worker_kit import ENGINE_EPOCH, WORKER_EPOCH, WorkerRig

from shmoffload.core.types import LookupResult
from shmoffload.engine import Engine
from shmoffload.testing.faults.deaths import Death, resume, strike
from shmoffload.testing.poll import wait_until
from shmoffload.testing.tier_tests import key_of
from shmoffload.wire import channel
from shmoffload.wire.messages import MAX_KEYS_PER_FRAME, JobDone, JobPart, encode_frame
from shmoffload.wire.session import TierWord

pytestmark = pytest.mark.timeout(300)
NUM = 8192
SMALL_BUFFER = 64 << 10  # less than the parts of the job; wmem_max is 208 KiB


@pytest.fixture
def small_buffer(monkeypatch):
    """What a queue takes at once, whatever this machine's wmem_max is."""
    monkeypatch.setattr(channel, "SEND_BUFFER_BYTES", SMALL_BUFFER)


def make(session, **limits):
    tier = {"type": "memory", "max_bytes": "256MiB", "nice": 0}
    return make_config(session, [tier], slots=NUM + 100, credit_bytes="1GiB", **limits)


def store_all(engine, name, numbers):
    """Store blocks whose bytes nobody looks at: the job is what matters here."""
    ctx = kit.request(engine, name)
    engine.step_begin()
    output = engine.prepare_store(keys(*numbers), ctx)
    engine.complete_store(output.keys_to_store, ctx)
    engine.on_schedule_end(kit.END)
    engine.on_request_finished(ctx)
    kit.step(engine)


def test_f43_what_a_full_queue_does_not_take_waits_in_order(session_name, small_buffer):
    """The worker is stopped: nine parts, some of them sent; then jobs behind them."""
    with Engine(make(session_name)) as engine:
        link, (worker,) = engine._links[0], pids(engine)
        tap = Tap(engine)
        strike(worker, Death.HANG)
        try:
            store_all(engine, "large", range(NUM))
            assert len(tap.job_ids) < 9
            assert link.num_unsent > 0
            for i in range(20):
                kit.store(engine, kit.request(engine, f"r{i}"), keys(NUM + i))
                assert engine.lookup(keys(NUM + i)[0], kit.ReqContext(f"r{i}"))
            assert not engine.is_broken
            assert tap.done == []
            assert word(engine, TierWord.BLOCKS_WRITTEN) == 0
        finally:
            resume(worker)
        assert engine.wait_idle(WAIT_S)
        sent = list(dict.fromkeys(tap.job_ids))
        assert len(tap.job_ids) == 9 + 20
        assert sorted(sent) == sent
        assert [done.job_id for done in tap.done] == sent
        assert {done.failed_idx for done in tap.done} == {b""}
        parts = tap.said("store", "large")
        assert [n for part in parts for n in part[1:]] == list(range(NUM))
        assert word(engine, TierWord.BLOCKS_WRITTEN) == NUM + 20
        kit.drop_primary(engine)
        ctx = kit.request(engine, "load")
        assert kit.load(engine, ctx, keys(*range(NUM, NUM + 20))) == 20
        finish_all(engine)
        check_quiet(engine)


def test_f43_beyond_the_outbox_stores_are_refused_and_counted(
    session_name, small_buffer
):
    """A bound behind the bound: no exception, no wait; the primary keeps its copy."""
    with Engine(make(session_name, outbox_messages=4)) as engine:
        tier, (worker,) = engine.tiers[0], pids(engine)
        strike(worker, Death.HANG)
        try:
            store_all(engine, "large", range(NUM))
            for i in range(20):
                kit.store(engine, kit.request(engine, f"r{i}"), keys(NUM + i))
            (num_dropped,) = engine.manager.counters.cascade_blocks_dropped
            assert num_dropped > 0
            assert tier.num_open_jobs + num_dropped == 21
            assert word(engine, TierWord.BLOCKS_DROPPED) == num_dropped
        finally:
            resume(worker)
        assert engine.wait_idle(WAIT_S)
        assert word(engine, TierWord.BLOCKS_WRITTEN) == NUM + 20 - num_dropped
        ctx = kit.request(engine, "load")
        engine.step_begin()
        here = [engine.lookup(key, ctx) for key in keys(*range(NUM, NUM + 20))]
        engine.on_schedule_end(kit.END)
        assert here == [LookupResult.HIT] * 20
        finish_all(engine)
        check_quiet(engine)


def test_f43_a_worker_dies_with_half_of_a_job_in_its_queue(session_name, small_buffer):
    """The job fails, once; what was not sent goes to no other worker."""
    with Engine(make(session_name)) as engine:
        link, (worker,) = engine._links[0], pids(engine)
        strike(worker, Death.HANG)
        store_all(engine, "large", range(NUM))
        assert link.num_unsent > 0
        strike(worker, Death.SIGKILL)
        wait_gone([worker])
        wait_until(
            lambda: kit.step(engine) or not engine.tiers[0].num_open_jobs,
            timeout_s=WAIT_S,
            what="the job to be answered",
        )
        assert link.num_unsent == 0
        wait_up(engine)
        tap = Tap(engine)
        kit.store(engine, kit.request(engine, "next"), keys(NUM + 1))
        assert engine.wait_idle(WAIT_S)
        assert tap.said("store") == [["next", NUM + 1]]
        assert word(engine, TierWord.RESIDENT_BLOCKS) == 1
        assert word(engine, TierWord.GARBAGE_FRAMES) == 0


def part_of(job_id, start, total):
    end = min(start + MAX_KEYS_PER_FRAME, total)
    return JobPart(
        ENGINE_EPOCH,
        WORKER_EPOCH,
        job_id,
        False,
        "r",
        time.monotonic() + WAIT_S,
        [key_of(i) for i in range(start, end)],
        array.array("i", range(start, end)).tobytes(),
        total - end,
        start,
    )


def test_f43_a_worker_acts_on_whole_jobs_only(session_name):
    """Eight of nine parts: it waits. Another job instead of the ninth: it failed."""
    with WorkerRig(session_name, slots=NUM, type="memory", nice=0) as rig:
        rig.ready()
        starts = range(0, NUM, MAX_KEYS_PER_FRAME)
        assert len(starts) == 9
        for start in starts[:-1]:
            rig.send(encode_frame([part_of(1, start, NUM)]))
        rig.wait_for(TierWord.QUEUE_KEYS, 8 * MAX_KEYS_PER_FRAME)
        beat = rig.word(TierWord.HEARTBEAT_NS)
        wait_until(
            lambda: rig.word(TierWord.HEARTBEAT_NS) > beat + 3e8,
            timeout_s=WAIT_S,
            what="three turns of the worker",
        )
        assert rig.said(JobDone) == []
        assert rig.word(TierWord.BLOCKS_WRITTEN) == 0
        assert rig.word(TierWord.JOBS_QUEUED) == 0
        rig.next_id = 1
        rig.fill(7, key_of(99_999))
        assert rig.run([key_of(99_999)], [7]) == ([], "")
        cut = rig.answer(1)
        assert "its last parts are missing" in cut.error
        assert len(cut.failed_idx) == 4 * 8 * MAX_KEYS_PER_FRAME
        assert rig.word(TierWord.BLOCKS_WRITTEN) == 1
        for start in starts:
            rig.send(encode_frame([part_of(3, start, NUM)]))
        assert rig.answer(3).failed_idx == b""
        assert rig.word(TierWord.BLOCKS_WRITTEN) == 1 + NUM


def test_f43_more_queues_than_a_user_may_have_message_queues(session_name):
    """Two engines with six tiers each; POSIX queues ended at nine in all."""
    tiers = [{"type": "memory", "name": f"m{i}", "nice": 0} for i in range(6)]
    with (
        Engine(make_config(session_name, tiers)) as one,
        Engine(make_config(f"{session_name}-b", tiers)) as other,
    ):
        for engine in (one, other):
            kit.store(engine, kit.request(engine, "a"), keys(1, 2))
            assert engine.wait_idle(WAIT_S)
            for i in range(6):
                assert word(engine, TierWord.RESIDENT_BLOCKS, i) == 2
            kit.drop_primary(engine)
            assert kit.load(engine, kit.request(engine, "b"), keys(1, 2)) == 2


ENGINE = """
import resource
from shmoffload.errors import ShmoffloadError
session, limit = sys.argv[1:]
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), hard))
tiers = [{"type": "memory", "name": f"m{i}", "nice": 0} for i in range(8)]
config = kit.make_config(session, tiers, start_timeout_s=5.0)
try:
    engine = Engine(config)
except ShmoffloadError as error:
    say("refused", error)
else:
    say("up")
    hear()
    engine.close()
"""


@pytest.mark.parametrize("limit", [16, 24])
def test_f43_too_few_descriptors_are_a_sentence_at_the_start(session_name, limit):
    """The limit that we do have: what it is, what is needed, what to type."""
    with engine_process(ENGINE, session_name, limit) as engine:
        said = hear(engine)
        assert said.startswith(f"refused this process may have {limit} files open")
        need = int(said.partition(" needs ")[2].split()[0])
        assert need > limit
        assert f"type `ulimit -n {4 * need}`" in said
        assert engine.wait(WAIT_S) == 0
    with engine_process(ENGINE, session_name, need) as engine:
        assert hear(engine) == "up"  # and that is enough
        tell(engine, "end")
        assert engine.wait(WAIT_S) == 0
    wait_nothing_left(session_name)
