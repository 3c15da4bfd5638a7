"""F54: counters tell what happened, exactly; they never go back, whoever dies."""

import errno
import json

import engine_kit as kit
import pytest
from faults_kit import (
    HIT,
    MISS,
    PENDING,
    check_quiet,
    faulty,
    finish,
    keys,
    load_right,
    look,
    make_config,
)
from late_faults_kit import WAIT_S, Prompted, pids, wait_up, word
from supervisor_kit import wait_gone

from shmoffload.cli import main
from shmoffload.engine import Engine
from shmoffload.testing.faults.control import Call
from shmoffload.testing.faults.damage import blocks_of
from shmoffload.testing.faults.deaths import Death, strike
from shmoffload.testing.faults.link import FaultyLink
from shmoffload.testing.poll import wait_until
from shmoffload.wire.messages import JobDone, encode_frame
from shmoffload.wire.session import Fault, TierWord, Word

pytestmark = pytest.mark.timeout(300)
COUNTERS = [
    *[word for word in Word if Word.STEPS <= word <= Word.ALLOCATION_FAILURES],
]
TIER_COUNTERS = [
    TierWord.COMPLETIONS,
    *[w for w in TierWord if TierWord.BLOCKS_WRITTEN <= w <= TierWord.GARBAGE_FRAMES],
    *(TierWord.LOAD_NS, TierWord.STORE_NS, TierWord.RESTARTS),
    *[w for w in TierWord if TierWord.HITS <= w <= TierWord.LATE_REPLIES],
    *[fault.word for fault in Fault],
]


class Ledger:
    """All counters of an engine; none may ever go back."""

    def __init__(self, engine):
        self.engine = engine
        self.last = self.read()

    def read(self):
        page = self.engine.page
        return {
            **{w.name: page.get(w) for w in COUNTERS},
            **{f"TIER_{w.name}": page.get_tier(0, w) for w in TIER_COUNTERS},
        }

    def since(self):
        """Return what has risen since the last call, without times and traffic."""
        kit.step(self.engine)
        now, last = self.read(), self.last
        self.last = now
        assert [name for name in now if now[name] < last[name]] == []
        return {
            name: now[name] - last[name]
            for name in now
            if now[name] != last[name]
            and not name.endswith("_NS")
            and name not in ("STEPS", "REQUESTS", "TIER_COMPLETIONS")
            and "QUEUE" not in name
        }


def stored(num_blocks, stride, *, written=None):
    """What a store of so many blocks in one job adds."""
    written = num_blocks if written is None else written
    more = {"TIER_BLOCKS_WRITTEN": written, "TIER_BYTES_WRITTEN": written * stride}
    return {
        "STORED_BLOCKS": num_blocks,
        "TIER_STORE_JOBS": 1,
        "TIER_STORE_BLOCKS": num_blocks,
        "TIER_JOBS_DONE": 1,
        **(more if written else {}),
    }


def store(engine, name, *ns):
    ctx = kit.request(engine, name)
    kit.store(engine, ctx, keys(*ns))
    assert engine.wait_idle(WAIT_S)
    finish(engine, ctx)
    wait_counted(engine)


def wait_counted(engine):
    """``JOBS_DONE`` rises a moment after the answer was sent."""
    wait_until(
        lambda: (
            word(engine, TierWord.JOBS_QUEUED) == 0
            and word(engine, TierWord.JOBS_DONE) >= engine.expected_jobs
        ),
        timeout_s=WAIT_S,
        what="all jobs to be counted",
    )


@pytest.fixture
def engine(session_name, control):
    config = make_config(session_name, [faulty(control)], slots=128)
    with Engine(config) as made:
        made.expected_jobs = 0
        yield made


def check_gauges(engine):
    assert (
        0 <= word(engine, TierWord.USED_BYTES) <= word(engine, TierWord.CAPACITY_BYTES)
    )
    page = engine.page
    slots = [Word.SLOTS_READY, Word.SLOTS_PENDING, Word.SLOTS_QUARANTINED]
    assert 0 <= sum(page.get(w) for w in slots) <= page.get(Word.NUM_SLOTS)
    assert page.get(Word.HITS_PRIMARY) <= page.get(Word.LOOKUPS)
    loaded = page.get(Word.HITS_PRIMARY) + word(engine, TierWord.HITS)
    assert page.get(Word.LOADED_BLOCKS) == loaded <= page.get(Word.LOOKUPS)


def test_f54_a_known_story(engine, control, session_name, capsys):
    """100 lookups: 40 in the primary, 30 in the tier of which 5 are bad, 30 nowhere."""
    stride = engine.config.stride
    engine.expected_jobs = 1
    store(engine, "tier", *range(40, 70))
    kit.drop_primary(engine)
    ledger = Ledger(engine)
    engine.expected_jobs = 2
    store(engine, "both", *range(40))
    assert ledger.since() == stored(40, stride)
    bad = set(keys(*range(50, 55)))
    for block in blocks_of(control.folder):
        if block.key in bad:
            block.write(b"x" * 100)
    ctx = kit.request(engine, "a")
    engine.step_begin()
    answers = look(engine, ctx, *range(100))
    engine.on_schedule_end(kit.END)
    assert answers == [HIT] * 40 + [PENDING] * 30 + [MISS] * 30
    engine.expected_jobs = 3
    assert engine.wait_idle(WAIT_S)
    wait_counted(engine)
    assert ledger.since() == {
        "LOOKUPS": 100,
        "MISSES": 30,
        "TIER_LOAD_JOBS": 1,
        "TIER_LOAD_BLOCKS": 30,
        "TIER_BLOCKS_READ": 25,
        "TIER_BYTES_READ": 25 * stride,  # of those that were right
        "TIER_BLOCKS_BAD": 5,
        "TIER_JOBS_FAILED": 1,
        "TIER_JOBS_DONE": 1,
    }
    good = [n for n in range(70) if n not in range(50, 55)]
    engine.step_begin()
    assert look(engine, ctx, *good) == [HIT] * 65
    assert engine.load_source(keys(3)[0]) == -1
    assert engine.load_source(keys(45)[0]) == 0  # of the tier, although it is here now
    load_right(engine, ctx, *good)
    engine.on_schedule_end(kit.END)
    assert ledger.since() == {
        "LOOKUPS": 65,
        "HITS_PRIMARY": 40,
        "TIER_HITS": 25,
        "LOADED_BLOCKS": 65,
    }
    check_gauges(engine)
    finish(engine, ctx)
    with pytest.raises(SystemExit):
        main(["status", "--session", session_name, "--json"])
    seen = json.loads(capsys.readouterr().out)
    assert (seen["counters"]["hits_primary"], seen["counters"]["misses"]) == (40, 30)
    assert (seen["tiers"][0]["hits"], seen["tiers"][0]["blocks_bad"]) == (25, 5)
    check_quiet(engine)


def test_f54_failures_resets_and_restarts_take_nothing_back(engine, control):
    """Each failure adds to its own counter; a new worker goes on where one ended."""
    stride = engine.config.stride
    ledger = Ledger(engine)
    engine.expected_jobs = 1
    store(engine, "a", *range(4))
    assert ledger.since() == stored(4, stride)
    control.fail(Call.PUT, errno.EIO)
    engine.expected_jobs = 2
    store(engine, "fails", *range(10, 14))
    assert ledger.since() == {
        **stored(4, stride, written=0),
        "TIER_BLOCKS_FAILED": 4,
        "TIER_FAILED_IO": 4,
        "TIER_JOBS_FAILED": 1,
    }
    kit.drop_primary(engine)
    assert ledger.since() == {}
    # A load that fails adds to failures and takes nothing from hits.
    control.fail(Call.GET, errno.EIO)
    ctx = kit.request(engine, "l")
    engine.step_begin()
    assert look(engine, ctx, 0, 1) == [PENDING] * 2
    engine.on_schedule_end(kit.END)
    engine.expected_jobs = 3
    assert engine.wait_idle(WAIT_S)
    wait_counted(engine)
    finish(engine, ctx)
    assert ledger.since() == {
        "LOOKUPS": 2,
        "TIER_LOAD_JOBS": 1,
        "TIER_LOAD_BLOCKS": 2,
        "TIER_BLOCKS_FAILED": 2,
        "TIER_FAILED_IO": 2,
        "TIER_JOBS_FAILED": 1,
        "TIER_JOBS_DONE": 1,
    }
    # A worker that dies in the middle of a store.
    control.hold(Call.PUT)
    ctx = kit.request(engine, "dies")
    kit.store(engine, ctx, keys(*range(20, 24)))
    control.wait_held(Call.PUT, meanwhile=lambda: kit.step(engine))
    (victim,) = pids(engine)
    strike(victim, Death.SIGKILL)
    wait_gone([victim])
    control.release()
    wait_until(
        lambda: kit.step(engine) or not engine.tiers[0].is_up,
        timeout_s=WAIT_S,
        what="the death to be noticed",
    )
    wait_up(engine)
    finish(engine, ctx)
    assert ledger.since() == {
        "STORED_BLOCKS": 4,
        "TIER_STORE_JOBS": 1,
        "TIER_STORE_BLOCKS": 4,
        "TIER_JOBS_FAILED": 1,
        "TIER_RESTARTS": 1,
    }
    assert word(engine, TierWord.RESIDENT_BLOCKS) == 6  # a gauge: two of those four
    engine.expected_jobs = 4
    store(engine, "b", *range(30, 33))
    assert ledger.since() == stored(3, stride)
    check_gauges(engine)
    check_quiet(engine)


def test_f54_doubled_late_and_foreign_answers_have_a_counter(engine):
    """They change nothing else; blocks that credit refuses have another."""
    stride = engine.config.stride
    ledger = Ledger(engine)
    engine.expected_jobs = 1
    with FaultyLink.of(engine) as link:
        link.duplicate()
        store(engine, "a", 1, 2)
        assert link.num_struck("duplicate") == 1
    assert ledger.since() == {**stored(2, stride), "TIER_LATE_REPLIES": 1}
    real = engine._links[0]
    real._channel = prompted = Prompted(real._channel)
    tier = engine.tiers[0]
    for epochs in (
        (engine._epoch + 1, tier.worker_epoch),
        (engine._epoch, tier.worker_epoch + 1),
        (engine._epoch, tier.worker_epoch),
    ):
        prompted.frames.append(encode_frame([JobDone(*epochs, 1)]))
    kit.step(engine)
    risen = ledger.since()
    assert risen == {"TIER_LATE_REPLIES": 3}
    assert tier.num_resident == 2
    assert word(engine, TierWord.BLOCKS_DROPPED) == 0
    assert word(engine, TierWord.JOBS_DROPPED) == 0
    check_gauges(engine)
