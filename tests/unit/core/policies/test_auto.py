"""``auto``: equal to its naive model, bounded, and never in the way of a tier."""

import random

import pytest
from auto_model import AutoModel
from hypothesis import given
from hypothesis import strategies as st
from policy_kit import Desk, HeldTier, ctx_of, in_order, key, keys, numbers

from shmoffload.core.policies import auto
from shmoffload.core.policies.auto import AutoPolicy
from shmoffload.core.types import OffloadPolicy

NUM_SLOTS = 12


def traffic(seed, num_requests, *, scans, num_sessions=6):
    """Sessions that grow, and one-off prompts; ``scans`` is the share of these."""
    chance = random.Random(seed)
    sessions, fresh = [[] for _ in range(num_sessions)], iter(range(10**9))
    for _ in range(num_requests):
        if chance.random() < scans:
            yield [next(fresh) for _ in range(chance.randint(1, 6))]
            continue
        session = chance.choice(sessions[: chance.randint(1, num_sessions)])
        if len(session) > 5:
            session.clear()
        session += [next(fresh) for _ in range(chance.randint(0, 2))]
        yield list(session)


def sweeps(num_rounds, *, first=0):
    """Three one-off prompts, then a short one that comes again: ARC loses it, too."""
    for i in range(num_rounds):
        for start in range(first + 18 * i, first + 18 * (i + 1), 6):
            yield list(range(start, start + 6))
        yield [-1, -2, -3, -4]


def check(policy):
    """Loose blocks have slots; nothing is remembered beyond the bounds."""
    order = set(policy._order.victims(lambda _: True))
    assert set(policy._loose) <= order
    lru, arc, second = policy._shadows
    assert len(lru._order) <= NUM_SLOTS
    assert len(second._order) <= NUM_SLOTS
    assert len(second._remembered) <= 4 * NUM_SLOTS
    assert len(arc._t1) + len(arc._t2) <= NUM_SLOTS
    assert max(len(arc._b1), len(arc._b2)) <= 2 * NUM_SLOTS


PHASES = ((0.0, 150, 6), (0.75, 450, 2), (0.0, 250, 6), (0.55, 450, 3))


def test_hits_and_evictions_equal_the_model():
    turns = []
    for seed in range(4):
        desk, model = Desk("auto", NUM_SLOTS), AutoModel(NUM_SLOTS)
        for number, (scans, length, sessions) in enumerate(PHASES):
            source = traffic(seed, length, scans=scans, num_sessions=sessions)
            for i, prompt in enumerate([*source, *sweeps(seed * 20, first=10**4)]):
                blocks = [n + 10 + number * 10**5 for n in prompt]
                before = numbers(desk.manager.table.blocks)
                hits = desk.serve(f"{number}.{i}", *blocks)
                expected_hits, gone = model.serve(blocks)
                assert hits == expected_hits
                after = numbers(desk.manager.table.blocks)
                assert set(before) - set(after) == set(gone)
                assert sorted(after) == sorted(model.real)
            check(desk.policy)
        turns += model.turns
    assert set(turns) >= {1, 2}, "the traffic is too easy"
    assert len(turns) >= 6


def follow_second(desk):
    """Send traffic until only what was used twice is worth a slot."""
    for i, prompt in enumerate(sweeps(300)):
        desk.serve(f"sweep{i}", *(n + 10**4 for n in prompt))
        if desk.policy.followed == "second":
            return
    pytest.fail(f"second was never followed, now {desk.policy.followed}")


def test_what_was_never_seen_is_refused_only_behind_second_use():
    desk = Desk("auto", NUM_SLOTS)
    assert desk.policy.followed == "lru"
    follow_second(desk)
    desk.new("a", *range(100, 104))
    assert desk.offer("a", *range(100, 104)) == ([], [])
    assert desk.manager.counters.blocks_not_admitted >= 4
    desk.finish("a")
    desk.new("b", *range(100, 104))
    assert desk.offer("b", *range(100, 104))[0] == [100, 101, 102, 103]


@pytest.mark.parametrize("level", OffloadPolicy)
def test_nothing_is_refused_that_a_tier_would_get(level):
    """REQUEST_LEVEL or not: what is not stored cannot be cascaded."""
    tier = HeldTier(policy=level)
    desk = Desk("auto", NUM_SLOTS, [tier])
    follow_second(desk)
    desk.new("a", 100, 101)
    desk.store("a", 100, 101)
    assert numbers(tier.stored)[-2:] == [100, 101]
    assert desk.manager.counters.blocks_not_admitted == 0
    # Nobody has used them twice, so they are the first to go.
    desk.finish("a")
    desk.step()
    assert set(in_order(desk.policy)[:2]) <= set(numbers(desk.policy._loose))
    assert {100, 101} <= set(numbers(desk.policy._loose))
    check(desk.policy)


def test_a_turn_finds_what_is_loose_in_bounded_parts(monkeypatch):
    monkeypatch.setattr(auto, "SEARCHED_PER_CALL", 2)
    desk = Desk("auto", NUM_SLOTS)
    follow_second(desk)
    assert desk.policy._search is not None
    calls = 0
    while desk.policy._search is not None:
        desk.serve(f"more{calls}", 0)
        calls += 1
    assert NUM_SLOTS / 2 / 2 - 1 <= calls <= NUM_SLOTS
    shadow = desk.policy._shadows[desk.policy._followed]
    here = set(desk.manager.table.blocks)
    assert set(desk.policy._loose) == {k for k in here if k not in shadow}


def told(policy, of_requests, *, part):
    """Tell a policy of requests in parts, one request after the other."""
    for number, prompt in enumerate(of_requests):
        ctx = ctx_of(f"r{number}", *prompt)
        for first in range(0, len(prompt), part):
            some = keys(*prompt[first : first + part])
            absent = [k for k in some if k not in policy._order]
            for k in policy.offer(some, absent, ctx, may_refuse=True):
                policy.insert(k, ctx)
        policy.finish(ctx)
    return policy


@pytest.mark.parametrize("part", [1, 2, 5])
def test_parts_leave_the_shadows_as_whole_requests_do(part):
    """Content and order, as long as one part does not push out the next."""
    prompts = list(traffic(7, 60, scans=0.2))
    whole, parts = (told(AutoPolicy(400), prompts, part=size) for size in (99, part))
    for one, other in zip(whole._shadows, parts._shadows, strict=True):
        for name, content in vars(one).items():
            if name.startswith(("_order", "_t", "_b")) and name != "_target":
                assert list(vars(other)[name]) == list(content), name
    assert whole._scores == parts._scores
    assert whole._num_requests == parts._num_requests == 60


def test_only_the_leading_run_scores_in_whatever_parts():
    """Blocks behind a hole are of no use, even if a later part finds them all."""
    for part in (1, 2, 3):
        policy = told(
            AutoPolicy(NUM_SLOTS), [[0, 1, 2], [0, 9, 2], [8, 0, 1]], part=part
        )
        assert policy._scores[0] == 1


def test_a_request_that_only_loads_is_told_when_it_finishes():
    policy = told(AutoPolicy(NUM_SLOTS), [[0, 1], [2, 3]], part=9)
    ctx = ctx_of("loads", 0, 1)
    for k in keys(0, 1):
        policy.access(k, ctx)
    before = policy._scores[0]
    policy.finish(ctx)
    assert policy._scores[0] == before + 2
    assert numbers(policy._shadows[0]._order) == [3, 2, 1, 0]
    assert policy._requests == {}


def test_a_block_that_came_from_a_tier_is_loose_until_it_is_told():
    policy = AutoPolicy(NUM_SLOTS)
    ctx = ctx_of("a", 0)
    policy.observe(key(0), ctx)
    policy.insert(key(0), ctx)
    assert numbers(policy._loose) == [0]
    policy.access(key(0), ctx)
    policy.finish(ctx)
    assert numbers(policy._loose) == []


def test_a_reset_forgets_all_but_whom_it_follows():
    desk = Desk("auto", NUM_SLOTS)
    follow_second(desk)
    desk.manager.reset_cache()
    assert desk.policy.followed == "second"
    assert in_order(desk.policy) == []
    assert not any(key(n) in s for s in desk.policy._shadows for n in range(4))
    check(desk.policy)


@given(st.integers(0, 10**6))
def test_many_requests_at_once_keep_the_books(seed):
    """Offers in parts, refusals, failed copies, loads, finishes in any order."""
    chance = random.Random(seed)
    desk, prompts, offered = Desk("auto", NUM_SLOTS), {}, {}
    source = traffic(seed, 80, scans=0.4)
    for number, prompt in enumerate(source):
        req_id = f"r{number}"
        desk.new(req_id, *prompt)
        prompts[req_id], offered[req_id] = prompt, 0
        for who in chance.sample(list(prompts), min(3, len(prompts))):
            first = offered[who]
            if first < len(prompts[who]):
                granted = desk.offer(who, *prompts[who][first : first + 2])
                if granted is not None:
                    offered[who] += 2
                    desk.stored(who, *granted[0], ok=chance.random() < 0.9)
            elif all(desk.holds(*prompts[who])) and chance.random() < 0.5:
                desk.load(who, *prompts[who])
            else:
                del prompts[who]
                desk.finish(who)
        if chance.random() < 0.02:
            desk.manager.reset_cache()
        desk.step()
        desk.manager.check_integrity()
        check(desk.policy)
    for who in prompts:
        desk.finish(who)
    assert desk.policy._requests == {}
