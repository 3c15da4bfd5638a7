"""Scenarios of tiers that fail, stop or die, by their ids; the worker is the test.

The same with real processes: ``tests/integration/test_engine.py``. A docstring
that says "ours" names the row of docs/decisions.md, section "Where we differ from
vLLM's tiering".
"""

import pytest
from manager_kit import (
    HIT,
    MISS,
    PENDING,
    ManualTier,
    Rig,
    keys,
    make_mailbox,
    reply,
    sent_jobs,
)

from shmoffload.core.types import FinishRequest, Residency, TierDown, TierUp


def rig_of_worker_and_other(num_slots, **settings):
    """A worker that holds 5 and 6, and a tier that holds nothing."""
    worker, other = make_mailbox(), ManualTier("other")
    worker.feed([Residency(1, added=keys(5, 6))])
    return Rig(num_slots, tiers=[worker, other], **settings), worker, other


def test_s58_shutdown_reaches_every_tier_and_raises_last():
    """Ours, row "the error comes last": the memory is released by the engine."""
    rig = Rig(2, 3)
    closed = []
    for tier in rig.tiers:
        tier.shutdown = lambda name=tier.name: closed.append(name)

    def fail():
        closed.append("t1")
        raise OSError("the tier does not let go")

    rig.tiers[1].shutdown = fail
    with pytest.raises(OSError, match="does not let go"):
        rig.manager.shutdown()
    assert closed == ["t0", "t1", "t2"]
    rig.manager.shutdown()
    assert closed == ["t0", "t1", "t2"]


def test_s60_stopped_worker_with_a_promotion_open():
    """Ours, row "deadline": MISS after it, the slot is quarantined until proof."""
    rig, worker, other = rig_of_worker_and_other(4, job_deadline_s=30.0)
    rig.new("a", 5, 6)
    rig.new("b", 1)
    assert rig.look("a", 5) == [PENDING]
    rig.step()
    (load,) = sent_jobs(worker)
    held = load.slots.tolist()
    # Others go on, also through the other tier.
    rig.store("b", 1)
    other.answer()
    rig.advance(29.0)
    assert rig.pins(1) == [1]  # the stopped worker's cascade
    assert rig.look("a", 5) == [PENDING]
    rig.advance(1.5)
    assert rig.look("a", 5) == [MISS]
    assert rig.look("a", 6) == [MISS]  # the whole tier says so now
    assert rig.look("b", 1) == [HIT]
    assert rig.manager.take_overdue_tiers() == [0]  # its worker is to be killed
    assert rig.manager.table.num_quarantined == 1
    assert not rig.manager.has_pending_work()
    rig.step()
    granted = rig.offer("b", 2, 3)
    assert rig.offer("b", 4) is None  # the pool without the slot is used up
    assert not set(granted.slots.tolist()) & set(held)
    rig.stored("b", 2, 3, ok=False)
    # It goes on (the answer comes late), or is dead: either frees the slot.
    worker.feed([reply(load.job_id)])
    rig.advance()
    assert rig.manager.table.num_quarantined == 0
    assert rig.counters.late_replies == 1
    assert rig.holds(5) == [False]


def test_death_frees_what_a_deadline_has_quarantined():
    rig, worker, _ = rig_of_worker_and_other(4, job_deadline_s=30.0)
    rig.new("a", 5)
    rig.look("a", 5)
    rig.step()
    rig.advance(31.0)
    worker.feed([TierDown(1, dead=False)])
    rig.advance()
    assert rig.manager.table.num_quarantined == 1
    worker.feed([TierDown(1, dead=True)])
    rig.advance()
    assert rig.manager.table.num_quarantined == 0
    worker.feed([Residency(2, added=keys(5)), TierUp(2)])
    rig.new("b", 5)
    assert rig.look("b", 5) == [PENDING]


def test_s61_worker_killed_mid_cascade_and_mid_promotion():
    """Ours, row "quarantine": a silence frees nothing, the proof of death does."""
    rig, worker, other = rig_of_worker_and_other(8)
    rig.new("a", 1, 5)
    rig.store("a", 1)
    assert rig.look("a", 5) == [PENDING]
    rig.step()
    cascade, promotion = sent_jobs(worker)
    assert [cascade.is_promotion, promotion.is_promotion] == [False, True]
    worker.feed([TierDown(1, dead=False)])
    rig.advance()
    assert rig.look("a", 5, 6) == [PENDING, MISS]
    assert rig.pins(1) == [2]
    worker.feed([TierDown(1, dead=True)])
    rig.advance()
    assert rig.look("a", 1, 5) == [HIT, MISS]
    assert rig.pins(1) == [1]  # of the other tier, which is not affected
    assert rig.counters.cascade_jobs_failed == [1, 0]
    assert rig.counters.promotion_jobs_failed == [1, 0]
    other.answer()
    worker.feed([Residency(2, added=keys(5)), TierUp(2)])
    worker.feed([reply(cascade.job_id), reply(promotion.job_id)])
    assert worker.late_replies == 2
    rig.advance()
    assert rig.pins(1) == [0]
    rig.new("b", 5)
    assert rig.look("b", 5) == [PENDING]
    rig.step()
    (again,) = sent_jobs(worker)
    worker.feed([reply(again.job_id, worker=2)])
    rig.advance()
    assert rig.look("b", 5) == [HIT]
    rig.finish("a")
    rig.finish("b")
    assert worker.take_outbox() == [FinishRequest("b")]  # it never heard of a
    rig.step()
    rig.check_quiescent()
