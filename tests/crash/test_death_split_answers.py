"""A worker dies when some parts of what it has to say are said, and others not.

An answer of thousands of keys takes several datagrams: evicted and missing keys go
before it. The worker's queue is made so narrow that two such parts fill it while the
engine does not listen; there it dies, for real. What was said may be used, but the
job was not answered: it fails, once, and all of its slots come back.
"""

import os

import death_kit as dk
import pytest
from supervisor_kit import names_of

from shmoffload.engine import Engine
from shmoffload.testing.faults.control import Call
from shmoffload.testing.faults.damage import blocks_of
from shmoffload.testing.faults.deaths import Death, strike, wait_gone, worker_pid
from shmoffload.testing.leaks import new_session_name
from shmoffload.testing.poll import wait_until
from shmoffload.wire.session import TierWord

BLOCK_BYTES = 4096
NUM_KEYS = 4000
NUM_WHOLE = 700
NARROW_BYTES = 32 << 10
"""The kernel doubles it, and lets a frame in while there is room for a byte: two of
40 KiB."""
OLD, NEW = 0, 50_000

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def control(tmp_path, monkeypatch):
    monkeypatch.setattr(dk.kit, "BLOCK_BYTES", BLOCK_BYTES)
    made = dk.make_control(tmp_path, inner="slab")
    yield made
    made.clear()


@pytest.fixture
def engine(session_name, tmp_path, control):
    """An engine with ``NUM_KEYS`` blocks in its first tier, which that fills."""
    config = dk.make_config(
        session_name,
        tmp_path,
        slots=NUM_KEYS,
        max_bytes=NUM_KEYS * (BLOCK_BYTES + 4096),
    )
    with dk.Neighbour(new_session_name()), Engine(config) as made:
        ctx = dk.kit.request(made, "old")
        keys = dk.kit.keys_of(OLD, NUM_KEYS)
        assert dk.kit.store(made, ctx, keys) == keys
        assert made.wait_idle(dk.WAIT_S)
        made.on_request_finished(ctx)
        dk.kit.drop_primary(made)
        assert made.tiers[0].num_resident == NUM_KEYS
        yield dk.watch(made)


class Speech:
    """What a worker says from here on, while the engine does not listen."""

    def __init__(self, engine, control):
        self.engine, self.control = engine, control
        self.num_said = self.word(TierWord.COMPLETIONS)
        self.num_done = self.word(TierWord.JOBS_DONE)
        self.others = worker_pid(engine.config.session.name, 1)

    def word(self, word):
        return self.engine.page.get_tier(0, word)

    def narrow(self):
        before = self.control.num_struck("narrow")
        self.control.narrow(NARROW_BYTES)
        wait_until(
            lambda: self.control.num_struck("narrow") > before,
            timeout_s=dk.WAIT_S,
            what="the worker to narrow its queue",
        )

    def cut_off(self, num_parts, *, then=lambda: None):
        """Kill the worker when it has said so many parts, and cannot say more.

        ``then`` is called while it is stopped: what it said can be heard.
        """
        wait_until(
            lambda: self.word(TierWord.COMPLETIONS) == self.num_said + num_parts,
            timeout_s=dk.WAIT_S,
            what=f"{num_parts} parts",
        )
        pid = worker_pid(self.engine.config.session.name)
        assert strike(pid, Death.HANG)
        then()
        assert strike(pid, Death.SIGKILL)
        wait_gone(pid)
        assert self.word(TierWord.COMPLETIONS) == self.num_said + num_parts
        assert self.word(TierWord.JOBS_DONE) == self.num_done


def go_on(engine, speech, num_lost):
    """The death is noticed; everything open fails once; the tier comes back."""
    wait_until(
        lambda: dk.kit.step(engine) or engine.tiers[0].jobs_lost,
        timeout_s=dk.WAIT_S,
        what="the death to be noticed",
    )
    assert engine.tiers[0].jobs_lost == num_lost
    dk.settle(engine)
    dk.check_quiet(engine)
    assert engine.tiers[0].jobs_lost == num_lost
    assert worker_pid(engine.config.session.name, 1) == speech.others


def check_serves(engine, name, num_old, num_new):
    """So many of the old and of the new keys are found, with right bytes."""
    ctx = dk.kit.request(engine, name)
    for first, num in ((OLD, num_old), (NEW, num_new)):
        dk.kit.drop_primary(engine)
        keys = dk.kit.keys_of(first, NUM_KEYS)
        assert dk.kit.load(engine, ctx, keys, timeout_s=dk.WAIT_S) == num
    engine.on_request_finished(ctx)
    dk.kit.step(engine)
    dk.check_quiet(engine)


def store_new(engine):
    """Begin to store as many blocks as the tier holds: all old ones are evicted."""
    ctx = dk.kit.request(engine, "new")
    keys = dk.kit.keys_of(NEW, NUM_KEYS)
    assert dk.kit.store(engine, ctx, keys) == keys
    engine.on_request_finished(ctx)
    dk.kit.step(engine)
    assert engine.tiers[0].num_open_jobs == 1


def test_between_the_parts_of_a_loads_answer(engine, control):
    """Most blocks are not there any more: the answer names each of them."""
    first_bad = blocks_of(control.store)[NUM_WHOLE]
    os.truncate(first_bad.path, first_bad.offset)
    speech = Speech(engine, control)
    speech.narrow()
    ctx = dk.kit.request(engine, "load")
    assert dk.kit.scan(engine, ctx, dk.kit.keys_of(OLD, NUM_KEYS)) is None
    assert engine.tiers[0].num_open_jobs == 1
    speech.cut_off(2)
    engine.on_request_finished(ctx)
    go_on(engine, speech, 1)
    check_serves(engine, "again", NUM_WHOLE, 0)


def test_between_the_parts_of_a_stores_answer(engine, control):
    """It has evicted as many blocks as it has stored; both were told by halves."""
    speech = Speech(engine, control)
    speech.narrow()
    store_new(engine)
    speech.cut_off(2)
    go_on(engine, speech, 1)
    # Stored they are, for the next worker has found them; the job failed for all that.
    check_serves(engine, "again", 0, NUM_KEYS)


def test_between_the_parts_of_an_answer_to_an_engine_that_closes(
    engine, control, session_name
):
    speech = Speech(engine, control)
    speech.narrow()
    store_new(engine)
    speech.cut_off(2)
    engine.close()
    table = engine.manager.table
    assert table.num_pinned == table.num_quarantined == 0
    assert engine.tiers[0].jobs_lost == 1
    assert names_of(session_name) == []
    with Engine(engine.config) as fresh:
        dk.watch(fresh)
        check_serves(fresh, "fresh", 0, NUM_KEYS)
    dk.check_storage(control)


def test_between_the_parts_of_what_a_start_finds(engine, control):
    """A tier that was told by halves is no tier: it is up with the next worker."""
    control.hold(Call.OPEN)
    first = worker_pid(engine.config.session.name)
    assert strike(first, Death.SIGKILL)
    wait_gone(first)
    control.wait_held(Call.OPEN)
    speech = Speech(engine, control)
    speech.narrow()
    control.release()
    seen = []

    def is_up():
        dk.kit.step(engine)
        tier = engine.tiers[0]
        seen.append((tier.is_up, tier.num_resident))
        return tier.is_up and worker_pid(engine.config.session.name) not in (0, first)

    def hear_it():
        wait_until(
            lambda: is_up() or (engine._links[0].hello and len(engine.tiers[0]._told)),
            timeout_s=dk.WAIT_S,
            what="the engine to hear what was said",
        )
        assert len(engine.tiers[0]._told) == 2000

    speech.cut_off(3, then=hear_it)  # with Hello
    wait_until(is_up, timeout_s=dk.WAIT_S, what="the tier to be up")
    assert seen[-1] == (True, NUM_KEYS)
    assert set(seen) <= {(False, 0), (True, NUM_KEYS)}
    assert engine.tiers[0].worker_epoch == 3
    assert engine.tiers[0].jobs_lost == 0
    check_serves(engine, "again", NUM_KEYS, 0)
