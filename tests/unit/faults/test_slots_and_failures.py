"""Faults about slots that somebody still uses, and about jobs that fail."""

from manager_kit import (
    HIT,
    MISS,
    PENDING,
    RETRY,
    Rig,
    key,
    keys,
    make_mailbox,
    numbers,
    reply,
    sent_jobs,
    with_tier,
)

from shmoffload.core.types import ReqContext, Residency, TierDown, make_offload_key
from shmoffload.core.window_scan import GroupKeys, match_groups


def free_slots(rig):
    table = rig.manager.table
    return [*range(table._next_unused, table.num_slots), *table._returned]


def test_f05_not_now_has_one_meaning_per_cause():
    """A truth table: what is in the way, what lookup says."""

    def ready(rig):
        rig.new("x", 1)
        rig.store("x", 1)

    def writing(rig):
        rig.new("x", 1)
        rig.offer("x", 1)

    def queued(rig):
        rig.tiers[0].have.add(key(1))
        rig.look("a", 1)

    def no_room(rig):
        rig.tiers[0].have.add(key(1))
        rig.new("x", 2, 3)
        rig.offer("x", 2, 3)

    def unsure(rig):
        rig.tiers[0].verdicts[key(1)] = RETRY

    def unsure_but_below(rig):
        rig.tiers[0].verdicts[key(1)] = RETRY
        rig.tiers[1].have.add(key(1))

    def held_after_reset(rig):
        """Ours, row "quarantine": no hold, only the writer's slot is closed."""
        rig.tiers[0].have.add(key(1))
        rig.new("x", 2)
        rig.offer("x", 2)
        rig.manager.reset_cache()

    for arrange, expected in (
        (ready, HIT),
        (writing, PENDING),
        (queued, PENDING),
        (no_room, MISS),
        (unsure, RETRY),
        (unsure_but_below, PENDING),
        (held_after_reset, PENDING),
    ):
        rig = Rig(2, 2)
        rig.new("a", 1)
        arrange(rig)
        assert rig.look("a", 1) == [expected], arrange.__name__
        assert rig.counters.allocation_failures == (arrange is no_room)

    worker = make_mailbox()
    worker.feed([Residency(1, added=keys(1)), TierDown(1, dead=False)])
    rig = Rig(2, tiers=[worker])
    rig.new("a", 1)
    assert rig.look("a", 1) == [MISS]  # never RETRY: nobody will answer

    rig = Rig(2, job_deadline_s=10.0)  # INV-35: nor is a busy tier asked for ever
    rig.tiers[0].verdicts[key(1)] = RETRY
    rig.new("a", 1)
    answers = []
    for _ in range(13):
        answers += rig.look("a", 1)
        rig.step()
        rig.advance(1.0)
    assert answers == [RETRY] * 11 + [MISS] * 2


def test_f10_reset_with_writers_still_running():
    """A live request can store again; a slot is closed until its writer answers."""
    rig = with_tier(3, 5)
    rig.new("a", 1)
    rig.offer("a", 1)
    rig.new("b", 5)
    rig.look("b", 5)
    rig.step()
    held = {rig.slot(1), rig.slot(5)}
    rig.manager.reset_cache()
    granted = rig.offer("a", 1)
    assert not set(granted.slots.tolist()) & held
    rig.new("c", 6)
    assert rig.offer("c", 6) is None
    rig.stored("a", 1)  # late: frees the old slot, says nothing of the new one
    assert rig.look("a", 1) == [PENDING]
    rig.tiers[0].answer()
    rig.advance()
    assert rig.manager.table.num_quarantined == 0
    rig.stored("a", 1)
    assert rig.look("a", 1) == [HIT]
    for req_id in "abc":
        rig.finish(req_id)
    rig.settle()
    rig.check_quiescent()


def test_f14_hit_is_reserved_until_the_step_ends():
    """Ours, row "a HIT holds": the first of the two contracts."""
    rig = Rig(2)
    rig.resident(1, 2)
    rig.new("a", 1, 2)
    rig.new("b", 3, 4)
    assert rig.look("a", 1, 2) == [HIT, HIT]
    assert rig.offer("b", 3, 4) is None
    slots = rig.load("a", 1, 2).tolist()
    assert slots == [rig.slot(1), rig.slot(2)]
    rig.loaded("a", 1, 2)
    assert rig.offer("b", 3, 4) is None
    rig.step()
    assert numbers(rig.offer("b", 3, 4).keys_to_store) == [3, 4]


def test_f19_slot_is_freed_once_and_jobs_carry_their_own_numbers():
    for stage in ("queued", "running", "answered", "applied"):
        rig = with_tier(4, 1, 2)
        rig.new("a", 1, 2)
        rig.look("a", 1, 2)
        if stage != "queued":
            rig.step()
        if stage in ("answered", "applied"):
            rig.tiers[0].answer()
        if stage == "applied":
            rig.advance()
        rig.finish("a")
        rig.manager.reset_cache()
        rig.tiers[0].answer()
        rig.advance()
        rig.advance()
        free = free_slots(rig)
        assert sorted(free) == [0, 1, 2, 3], stage
        rig.check_quiescent()

    rig = Rig(4)
    rig.new("a", 1, 2)
    granted = rig.offer("a", 1, 2)
    written = granted.slots.tolist()
    granted.slots[:] = -1
    rig.stored("a", 1, 2)
    (job,) = rig.tiers[0].jobs.values()
    assert job.slots.tolist() == written
    job.slots[:] = -1
    assert [rig.slot(1), rig.slot(2)] == written


def test_f20_deadline_is_no_proof_that_the_transfer_ended():
    worker = make_mailbox()
    worker.feed([Residency(1, added=keys(1))])
    rig = Rig(3, tiers=[worker], job_deadline_s=30.0)
    rig.new("a", 1)
    rig.look("a", 1)
    rig.step()
    (load,) = sent_jobs(worker)
    (held,) = load.slots.tolist()
    rig.advance(31.0)
    rig.finish("a")
    rig.new("b", *range(10, 20))
    used = []
    for n in range(10, 20):
        granted = rig.offer("b", n)
        if granted is not None:
            used += granted.slots.tolist()
    assert sorted([*used, held]) == [0, 1, 2]
    worker.feed([reply(load.job_id)])
    rig.advance()
    assert rig.offer("b", 19).slots.tolist() == [held]


def test_f21_bad_block_is_tried_once_per_request():
    """Ours, row "one try": whatever the tier goes on saying."""
    rig = with_tier(4, 1)
    rig.new("a", 1)
    answers = []
    for _ in range(50):
        answers += rig.look("a", 1)
        rig.step()
        rig.tiers[0].answer(ok=False)
        rig.advance()
    assert answers == [PENDING] + [MISS] * 49
    assert rig.tiers[0].said("load") == [["a", 1]]

    worker = make_mailbox()  # and what could not be read is not held, for anybody
    worker.feed([Residency(1, added=keys(1, 2))])
    rig = Rig(4, tiers=[worker])
    rig.new("a", 1, 2)
    rig.look("a", 1, 2)
    rig.step()
    (load,) = sent_jobs(worker)
    worker.feed([reply(load.job_id, failed_idx=[0], error="Input/output error")])
    rig.advance()
    rig.new("b", 1, 2)
    assert rig.look("b", 1, 2) == [MISS, HIT]


def test_f22_one_bad_key_of_eight_costs_one_key():
    rig = with_tier(16, *range(8), request_level={0})
    rig.new("a", *range(8))
    rig.new("listener", *range(8))
    rig.look("a", *range(8))
    rig.offer("listener", *range(8))
    rig.step()
    good = [n for n in range(8) if n != 2]
    rig.tiers[0].answer(ok=False, only=keys(*good))
    rig.advance()
    answers = rig.look("a", *range(8))
    assert answers == [HIT if n in good else MISS for n in range(8)]
    assert rig.tiers[0].said("store") == [["listener", *good]]
    assert rig.counters.promotions_landed == 7
    assert rig.counters.promotions_failed == 1


def test_f24_failed_copies_are_counted_and_poison_nothing():
    rig = with_tier(4, 5)
    rig.new("a", 1, 2, 5)
    rig.store("a", 1)
    rig.look("a", 5)
    rig.step()
    rig.tiers[0].answer(ok=False)
    rig.advance()
    assert rig.look("a", 1, 5) == [HIT, MISS]  # primary copy intact; recompute
    rig.offer("a", 2)
    rig.stored("a", 2, ok=False)
    assert rig.look("a", 2) == [MISS]
    counters = rig.counters
    assert counters.cascade_blocks_failed == [1]
    assert counters.promotions_failed == 1
    assert counters.stores_failed == 1

    worker = make_mailbox()
    rig = Rig(4, tiers=[worker])
    rig.new("a", 1)
    rig.store("a", 1)
    (job,) = sent_jobs(worker)
    worker.feed([reply(job.job_id, failed_idx=[0], error="No space left on device")])
    rig.advance()
    assert worker.num_resident == 0
    assert rig.look("a", 1) == [HIT]


def test_f52_groups_agree_on_what_all_of_them_have():
    """Full attention, a window of two blocks, a side index beside the full one."""
    num_blocks, window = 6, 2
    named = [
        [make_offload_key(b"prompt-%d" % i, group) for i in range(num_blocks)]
        for group in range(3)
    ]
    groups = [GroupKeys(named[0]), GroupKeys(named[1], window), GroupKeys(named[2])]
    # The store filter: of the window only what a lookup at the end will need.
    stored = [*named[0], *named[1][-window:], *named[2]]

    def matched(without=()):
        rig = Rig(32)
        ctx = rig.contexts["a"] = ReqContext("a")
        rig.manager.on_new_request(ctx)
        kept = [k for k in stored if k not in without]
        rig.manager.prepare_store(kept, ctx)
        rig.manager.complete_store(kept, ctx)
        rig.settle()
        found = match_groups(lambda k: rig.manager.lookup(k, ctx), groups)
        rig.step()
        rig.finish("a")
        rig.settle()
        rig.check_quiescent()
        assert found.is_decided
        return found.num_blocks

    assert matched() == num_blocks
    assert matched(without=[named[1][-1]]) == 0  # no window ends before it
    stored = [k for group in named for k in group]
    assert matched(without=[named[1][3]]) == num_blocks  # before the last window
    assert matched(without=[named[2][3]]) == 3  # a side key cuts all groups
    assert matched(without=[named[2][3], named[1][2]]) == 2
    assert matched(without=[named[0][0]]) == 0
