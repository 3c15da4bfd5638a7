"""The eviction order, against a model of semantics.md 3.3 (INV-13)."""

from hypothesis import given
from hypothesis import strategies as st
from manager_kit import key, keys, numbers

from shmoffload.core.policies.lru import LruPolicy
from shmoffload.core.types import ReqContext, make_offload_key


def ctx_of(req_id, *of_keys):
    return ReqContext(
        req_id, key_positions={key(n): (i + 1) * 16 for i, n in enumerate(of_keys)}
    )


def order(policy):
    return numbers(policy.victims(lambda _: True))


def test_a_request_moves_a_key_up_once_and_never_down():
    lru = LruPolicy()
    old, young = ctx_of("old", 0, 1), ctx_of("young", 1, 2)
    for k in keys(0, 1):
        lru.insert(k, old)
    lru.insert(key(2), young)
    lru.access(key(1), young)
    assert order(lru) == [0, 2, 1]
    lru.access(key(1), old)  # its rung is below: no move
    assert order(lru) == [0, 2, 1]
    lru.finish(old)
    assert order(lru) == [2, 1, 0]


def test_keys_without_positions_keep_the_order_of_use():
    lru = LruPolicy()
    ctx = ReqContext("a")
    for k in keys(2, 0, 1):
        lru.insert(k, ctx)
    assert order(lru) == [2, 0, 1]
    lru.finish(ctx)
    assert order(lru) == [1, 0, 2]


def test_groups_are_merged_by_position():
    lru = LruPolicy()
    grouped = [make_offload_key(b"%d" % i, group) for i in (0, 1) for group in (0, 1)]
    ctx = ReqContext(
        "a", key_positions=dict(zip(grouped, (16, 16, 32, 32), strict=True))
    )
    for k in grouped:
        lru.insert(k, ctx)
    before = list(lru.victims(lambda _: True))
    assert before == [*sorted(grouped[2:]), *sorted(grouped[:2])]
    lru.finish(ctx)
    assert list(lru.victims(lambda _: True)) == before


def test_victims_may_be_removed_on_the_way():
    lru = LruPolicy()
    ctx = ctx_of("a", *range(5))
    for k in keys(*range(5)):
        lru.insert(k, ctx)
    seen = []
    for k in lru.victims(lambda _: True):
        seen.append(k)
        lru.remove(k, evicted=True)
    assert numbers(seen) == [4, 3, 2, 1, 0]
    assert order(lru) == []


class Model:
    """Ranks as plain tuples, sorted each time."""

    def __init__(self):
        self.clock = 0
        self.rank = {}
        self.own = {}
        self.used = {}

    def use(self, n, req, position, *, new):
        used = self.used.setdefault(req, [])
        if not new and (n in used or n not in self.rank):
            return
        if n not in used:
            used.append(n)
        if req not in self.own:
            self.clock += 1
            self.own[req] = self.clock
        rank = (self.own[req], -position, key(n))
        if n not in self.rank or self.rank[n][0] < rank[0]:
            self.rank[n] = rank

    def finish(self, req, position_of):
        self.own.pop(req, None)
        used = [n for n in self.used.pop(req, []) if n in self.rank]
        for n in sorted(used, key=lambda n: (-position_of(n), key(n))):
            self.clock += 1
            self.rank[n] = (self.clock, 0, key(n))

    def order(self):
        return sorted(self.rank, key=self.rank.__getitem__)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["insert", "access", "remove", "finish"]),
            st.integers(0, 5),
            st.integers(0, 2),
        ),
        max_size=40,
    )
)
def test_order_equals_the_model(steps):
    lru, model, lives = LruPolicy(), Model(), [0, 0, 0]
    for word, n, who in steps:
        req = f"{who}.{lives[who]}"
        ctx = ctx_of(req, *range(6))
        if word == "insert" and n not in model.rank:
            lru.insert(key(n), ctx)
            model.use(n, req, n, new=True)
        elif word == "access":
            lru.access(key(n), ctx)
            model.use(n, req, n, new=False)
        elif word == "remove":
            lru.remove(key(n), evicted=True)
            model.rank.pop(n, None)
        elif word == "finish":
            lru.finish(ctx)
            model.finish(req, lambda n: n)
            lives[who] += 1
        assert order(lru) == model.order()
