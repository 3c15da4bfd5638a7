"""Faults about many requests, slow tiers and what is counted."""

from manager_kit import (
    HIT,
    MISS,
    PENDING,
    RETRY,
    ManualTier,
    Rig,
    key,
    keys,
    land,
    make_mailbox,
    number,
    numbers,
    reply,
    sent_jobs,
    with_tier,
)

from shmoffload.core.policies.arc import ArcPolicy


def serve(rig, waiting, *, max_steps=40):
    """Step until every request has loaded its prefix; return hits in order."""
    served = []
    for _ in range(max_steps):
        loads = []
        for req_id, prefix in list(waiting.items()):
            hits = rig.scan(req_id, *prefix)
            if hits is not None:
                rig.load(req_id, *prefix[:hits])
                loads.append((req_id, prefix[:hits]))
                served.append((req_id, hits))
                del waiting[req_id]
        land(rig)
        for req_id, prefix in loads:
            rig.loaded(req_id, *prefix)
            rig.finish(req_id)
        if not waiting:
            return served
    raise AssertionError(f"still waiting after {max_steps} steps: {waiting}")


def test_f25_waiting_requests_stop_neither_stores_nor_each_other():
    waiting = {f"w{i}": [4 * i + j for j in range(4)] for i in range(50)}
    rig = with_tier(8, *range(200))
    rig.new("run")
    for req_id, prefix in waiting.items():
        rig.new(req_id, *prefix)
    refused = steps = 0
    loads = []
    while waiting:
        steps += 1
        assert steps < 500
        for req_id, prefix in list(waiting.items()):
            hits = rig.scan(req_id, *prefix)
            if hits is not None:
                assert hits == 4
                rig.load(req_id, *prefix)
                loads.append((req_id, prefix))
                del waiting[req_id]
        granted = rig.offer("run", 1000 + steps)
        refused += granted is None
        land(rig)
        if granted is not None:
            rig.stored("run", 1000 + steps)
        for req_id, prefix in loads:
            rig.loaded(req_id, *prefix)
            rig.finish(req_id)
        loads.clear()
    assert refused <= 0.05 * steps
    # Six and six of eight slots: the older gets all, whoever scans first.
    for order in ("ab", "ba"):
        prefixes = {"a": list(range(6)), "b": list(range(10, 16))}
        rig = with_tier(8, *prefixes["a"], *prefixes["b"])
        for req_id in "ab":
            rig.new(req_id, *prefixes[req_id])
        served = serve(rig, {req_id: prefixes[req_id] for req_id in order})
        assert served == [("a", 6), ("b", 6)]
        rig.settle()
        rig.check_quiescent()


def test_two_requests_that_got_half_each_still_end():
    rig = with_tier(8, *range(6), *range(10, 16))
    rig.new("a", *range(6))
    rig.new("b", *range(10, 16))
    for i in range(6):
        rig.look("b", 10 + i)
        rig.look("a", i)
    land(rig)
    served = serve(rig, {"b": list(range(10, 16)), "a": list(range(6))})
    assert served == [("a", 6), ("b", 6)]


def test_f26_verdict_waits_for_its_own_probes_only_and_not_for_ever():
    rig = with_tier(8, 1, job_deadline_s=10.0)
    slow = range(100, 200)
    for n in slow:
        rig.tiers[0].verdicts[key(n)] = RETRY
    for n in (*slow, 1):
        rig.new(f"r{n}", n)
    assert [rig.scan(f"r{n}", n) for n in slow] == [None] * 100
    assert rig.scan("r1", 1) is None
    land(rig)
    assert rig.scan("r1", 1) == 1  # among a hundred that wait
    for n in slow[:50]:
        del rig.tiers[0].verdicts[key(n)]
    assert [rig.scan(f"r{n}", n) for n in slow] == [0] * 50 + [None] * 50
    rig.advance(10.5)
    assert [rig.scan(f"r{n}", n) for n in slow] == [0] * 100
    rig.step()
    rig.tiers[0].verdicts.clear()
    rig.tiers[0].have.add(key(199))  # the late truth is of use to the next
    rig.new("late", 199)
    assert rig.look("late", 199) == [PENDING]


def test_f27_slow_tier_is_bounded_and_holds_up_nobody():
    cap = 16
    slow = make_mailbox(credit_blocks=cap, name="slow")
    fast = ManualTier("fast")
    rig = Rig(64, tiers=[slow, fast])
    num_sent = 0
    for i in range(80):
        rig.new(f"r{i}", *range(8 * i, 8 * i + 8))
        rig.store(f"r{i}", *range(8 * i, 8 * i + 8))
        rig.finish(f"r{i}")
        fast.answer()
        rig.advance()
        rig.step()
        num_sent += sum(len(job.keys) for job in sent_jobs(slow))
        pinned = [b for b in rig.manager.table.blocks.values() if b.pins]
        assert len(pinned) <= cap
        assert slow.open_store_bytes <= cap * 64
    assert len(fast.have) == 640
    assert rig.counters.cascade_blocks_dropped == [640 - num_sent, 0]
    assert num_sent == cap
    assert rig.tracked() == set()
    for job_id in list(slow._open):
        slow.feed([reply(job_id)])
    rig.advance()
    rig.check_quiescent()
    rig.new("next", 9000)
    rig.store("next", 9000)
    assert numbers(sent_jobs(slow)[0].keys) == [9000]


def test_f47_heads_of_a_prefix_outlive_its_tails():
    """Whatever order copies end in, whatever reads them; once per request."""
    for policy, victims in ((None, [8, 7, 6]), (ArcPolicy(10), [7, 6, 4])):
        rig = Rig(10, policy=policy)
        prefix = list(range(1, 9))
        rig.new("a", *prefix)
        rig.offer("a", *prefix)
        for n in (5, 1, 8, 2, 7, 3, 6, 4):
            rig.stored("a", n)
        for job in reversed(list(rig.tiers[0].jobs.values())):
            rig.tiers[0].answer_job(job)
        rig.advance()
        for n in (2, 8, 5):  # decode touches its prefix again and again
            rig.manager.touch(keys(n), rig.contexts["a"])
        rig.finish("a")
        rig.new("b", 21, 22)
        rig.store("b", 21, 22)
        rig.settle()
        rig.new("p", 31, 32, 33)
        assert numbers(rig.offer("p", 31, 32, 33).evicted_keys) == victims
        if policy is not None:  # what was touched has moved to T2, once
            assert numbers(policy._t2) == [8, 5, 2]


def test_f54_counters_tell_a_known_story():
    """40 keys in the primary, 30 in the tier of which 5 cannot be read, 30 nowhere."""
    rig = Rig(100)
    rig.new("warm", *range(40))
    rig.store("warm", *range(40))
    rig.settle()
    rig.finish("warm")
    assert rig.counters.cascade_blocks == [40]
    rig.tiers[0].have = set(keys(*range(40, 70)))
    rig.new("a", *range(100))
    answers = rig.look("a", *range(100))
    assert answers == [HIT] * 40 + [PENDING] * 30 + [MISS] * 30
    counters = rig.counters
    assert counters.hits_primary == 40
    assert counters.hits_tier == [30]
    assert counters.misses == 30
    rig.step()
    rig.tiers[0].answer(ok=False, only=keys(*range(40, 65)))
    rig.advance()
    assert counters.promotions_started == 30
    assert counters.promotions_landed == 25
    assert counters.promotions_failed == 5
    assert [rig.manager.load_source(key(n)) for n in (0, 40)] == [-1, 0]
    rig.look("a", *range(65))
    rig.load("a", *range(65))
    assert counters.loads_primary == 40
    assert counters.loads_tier == [25]  # attributed although they are here now
    rig.load("a", 40)
    assert (counters.loads_primary, counters.loads_tier) == (41, [25])
    before = [*counters.loads_tier, counters.hits_primary, counters.promotions_landed]
    rig.manager.reset_cache()
    after = [*counters.loads_tier, counters.hits_primary, counters.promotions_landed]
    assert after == before
    for n in (number(k) for k in keys(*range(100))):
        assert rig.holds(n) == [False]
