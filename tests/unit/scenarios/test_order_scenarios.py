"""Scenarios of eviction order, by their ids."""

from manager_kit import Rig, key, keys, numbers

from shmoffload.core.policies.arc import ArcPolicy
from shmoffload.core.types import ReqContext


def test_s53_tails_go_before_heads_and_older_requests_first():
    """However the copies end, before and after the finish."""
    rig = Rig(6)
    rig.new("a", 0, 1, 2)
    rig.new("b", 10, 11, 12)
    rig.offer("a", 0, 1, 2)
    rig.offer("b", 10, 11, 12)
    for req_id, *of_keys in (("b", 11), ("a", 2, 0), ("b", 12, 10), ("a", 1)):
        rig.stored(req_id, *of_keys)
    rig.settle()
    order = [2, 1, 0, 12, 11, 10]
    assert rig.order() == order
    rig.finish("a")
    rig.finish("b")
    assert rig.order() == order
    rig.new("c", *range(20, 26))
    assert numbers(rig.offer("c", *range(20, 26)).evicted_keys) == order


def test_s54_arc_promotes_what_a_request_used_once_when_it_finishes():
    """T1 and T2, then ghosts, then a ghost hit that moves the target."""
    arc = ArcPolicy(4)
    rig = Rig(4, 0, policy=arc)
    rig.new("a", 0, 1, 2, 3)
    rig.store("a", 0, 1, 2, 3)
    rig.finish("a")
    assert numbers(arc._t1) == [3, 2, 1, 0]
    rig.new("b", 0, 1)
    for _ in range(2):
        rig.look("b", 0, 1)
        rig.load("b", 0, 1)
        rig.loaded("b", 0, 1)
        rig.step()
    rig.finish("b")
    assert (numbers(arc._t1), numbers(arc._t2)) == ([3, 2], [1, 0])
    rig.new("c", 4, 5)
    granted = rig.offer("c", 4, 5)
    assert numbers(granted.evicted_keys) == [3, 2]
    assert (numbers(arc._b1), numbers(arc._b2)) == ([3, 2], [])
    rig.stored("c", 4, 5)
    rig.finish("c")
    rig.new("d", 2, 3)
    granted = rig.offer("d", 2, 3)
    assert arc._target == 2.0
    from_t1, from_t2 = numbers(granted.evicted_keys)
    assert from_t1 in (4, 5)
    assert from_t2 in (0, 1)


def test_s55_a_pin_does_not_change_recency():
    rig = Rig(3)
    rig.resident(0, 1, 2)
    order = rig.order()
    for block in rig.manager.table.blocks.values():
        rig.manager.table.pin(block)
        assert rig.order() == order
        rig.manager.table.unpin(block)
    assert rig.order() == order == [2, 1, 0]
    arc = ArcPolicy(2)
    ctx = ReqContext("a", key_positions={key(0): 1, key(1): 2})
    for k in keys(0, 1):
        arc.insert(k, ctx)
    before = list(arc.victims(lambda _: True))
    assert list(arc.victims(lambda k: k != key(0))) == [key(1)]
    assert list(arc.victims(lambda _: True)) == before
