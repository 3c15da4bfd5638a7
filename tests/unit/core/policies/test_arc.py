"""ARC, word by word (semantics.md 3.4)."""

import pytest
from policy_kit import Desk, ctx_of, in_order, key, keys, numbers

from shmoffload.core.policies.arc import ArcPolicy


def lists(policy):
    return numbers(policy._t1), numbers(policy._t2)


def ghosts(policy):
    return numbers(policy._b1), numbers(policy._b2)


def filled(policy, *of_numbers):
    """Insert on behalf of one finished request; tails go first."""
    ctx = ctx_of("seed", *of_numbers)
    for k in reversed(keys(*of_numbers)):
        policy.insert(k, ctx)
    policy.finish(ctx)
    return policy


def evict(policy, num, *spared):
    order = policy.victims(lambda k: k not in keys(*spared))
    gone = [next(order) for _ in range(num)]
    for k in gone:
        policy.remove(k, evicted=True)
    return numbers(gone)


def test_arc_moves_uses_to_t2_and_learns_from_ghosts():
    """S54, through the manager."""
    desk = Desk("arc", 4)
    desk.new("a", 0, 1, 2, 3)
    desk.store("a", 0, 1, 2, 3)
    desk.finish("a")
    assert lists(desk.policy) == ([3, 2, 1, 0], [])
    desk.new("b", 0, 1)
    desk.load("b", 0, 1)
    desk.load("b", 0, 1)
    desk.finish("b")
    assert lists(desk.policy) == ([3, 2], [1, 0])
    desk.new("c", 10, 11)
    assert desk.store("c", 10, 11) == [3, 2]
    desk.finish("c")
    assert ghosts(desk.policy) == ([3, 2], [])
    assert lists(desk.policy) == ([11, 10], [1, 0])
    desk.new("d", 2, 3)
    assert sorted(desk.store("d", 2, 3)) == [1, 11]
    assert desk.policy._target == 2.0


def test_arc2_takes_what_comes_back_into_t2():
    """ARC as published; the rest of S54 is the same."""
    desk = Desk("arc2", 2)
    for req_id, prompt in (("a", (0, 1)), ("b", (2, 3)), ("c", (0, 1))):
        desk.serve(req_id, *prompt)
    assert lists(desk.policy) == ([], [1, 0])
    desk = Desk("arc", 2)
    for req_id, prompt in (("a", (0, 1)), ("b", (2, 3)), ("c", (0, 1))):
        desk.serve(req_id, *prompt)
    assert lists(desk.policy) == ([1, 0], [])


@pytest.mark.parametrize(("name", "per_slot"), [("arc", 1), ("arc2", 4)])
def test_ghost_lists_are_bounded(name, per_slot):
    desk = Desk(name, 3)
    for i in range(40):
        desk.serve(f"r{i}", 3 * i, 3 * i + 1, 3 * i + 2)
    assert len(desk.policy._b1) == 3 * per_slot
    assert numbers(desk.policy._b1)[-1] == 3 * 38


def test_a_failed_store_leaves_no_ghost():
    desk = Desk("arc", 4)
    desk.new("a", 0, 1)
    desk.offer("a", 0, 1)
    desk.stored("a", 0, 1, ok=False)
    desk.finish("a")
    assert lists(desk.policy) == ghosts(desk.policy) == ([], [])


def test_what_is_still_being_written_was_not_used():
    """Pending observations do not promote; ready ones do."""
    desk = Desk("arc", 4)
    desk.new("a", 0, 1)
    desk.new("b", 0, 1)
    desk.offer("a", 0, 1)
    desk.offer("b", 0, 1)
    desk.finish("b")
    desk.stored("a", 0, 1)
    desk.finish("a")
    assert lists(desk.policy) == ([1, 0], [])
    desk.new("c", 0, 1)
    desk.offer("c", 0, 1)
    assert lists(desk.policy) == ([1, 0], [])  # uses count at the finish
    desk.finish("c")
    assert lists(desk.policy) == ([], [1, 0])


def test_the_target_moves_once_per_request_and_key():
    """Also while the offer is refused and repeated; both ways, with real division."""
    desk = Desk("arc", 3)
    desk.serve("a", 0, 1, 2)
    desk.serve("b", 3, 4)  # B1 = [2, 1]
    desk.new("c", 1, 2)
    desk.new("pins", 0, 3, 4)
    desk.manager.prepare_load(keys(0, 3, 4), desk.contexts["pins"])
    for _ in range(3):
        assert desk.offer("c", 2, 1) is None
    assert desk.policy._target == 2.0
    assert ghosts(desk.policy) == ([1, 2], [])
    policy = filled(ArcPolicy(9), *range(8))
    ctx = ctx_of("u", *range(5))
    for k in keys(*range(5)):
        policy.access(k, ctx)
    policy.finish(ctx)  # T1 = 7 6 5, T2 = 4 3 2 1 0
    assert evict(policy, 5, 3, 2, 1) == [7, 6, 5, 4, 0]
    assert ghosts(policy) == ([7, 6, 5], [4, 0])
    policy._target = 5.0
    for _ in range(2):
        policy.observe(key(4), ctx_of("v"))
    assert policy._target == 3.5
    assert ghosts(policy) == ([7, 6, 5], [0, 4])


def test_if_one_list_has_nothing_that_may_go_the_other_one_gives():
    """Both ways; before 0.28 vLLM refused where T2 had nothing left."""
    policy = filled(ArcPolicy(4), 0, 1, 2, 3)
    ctx = ctx_of("u", 0, 1)
    for k in keys(0, 1):
        policy.access(k, ctx)
    policy.finish(ctx)  # T1 = 3 2, T2 = 1 0
    assert numbers(policy.victims(lambda k: k not in keys(3, 2))) == [1, 0]
    policy._target = 4.0
    assert numbers(policy.victims(lambda k: k not in keys(1, 0))) == [3, 2]
    assert in_order(policy) == [1, 0, 3, 2]
    policy._target = 2.9  # floor
    assert in_order(policy) == [3, 1, 0, 2]


def test_a_walk_counts_what_it_has_promised_and_survives_changes():
    """One at a time as promotions take them, or all at the end as stores do."""
    at_once = filled(ArcPolicy(6), *range(6))
    ctx = ctx_of("u", 0, 1, 2)
    for k in keys(0, 1, 2):
        at_once.access(k, ctx)
    at_once.finish(ctx)  # T1 = 5 4 3, T2 = 2 1 0
    at_once._target = 2.0
    expected = in_order(at_once)
    assert expected == [5, 4, 2, 1, 0, 3]
    walk, seen = at_once.victims(lambda _: True), []
    for k in walk:
        seen += numbers([k])
        at_once.remove(k, evicted=True)
    assert seen == expected
    assert in_order(at_once) == []


def test_clear_forgets_ghosts_and_target():
    desk = Desk("arc", 2)
    desk.serve("a", 0, 1)
    desk.serve("b", 2, 3)
    desk.serve("c", 0, 1)
    assert desk.policy._target
    desk.manager.reset_cache()
    assert not desk.policy._target
    assert lists(desk.policy) == ghosts(desk.policy) == ([], [])
    assert desk.policy._requests == {}


def test_arc_remembers_no_finished_request():
    desk = Desk("arc", 2)
    desk.serve("a", 0, 1)
    assert desk.policy._requests == {}
