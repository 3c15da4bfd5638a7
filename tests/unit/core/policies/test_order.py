"""The chain: an order whose walk survives changes."""

from hypothesis import given
from hypothesis import strategies as st

from shmoffload.core.policies.order import Chain


def test_a_walk_skips_what_is_removed_before_it_comes_there():
    chain = Chain()
    for item in range(6):
        chain.add(item)
    seen = []
    for item in chain:
        seen.append(item)
        if item == 1:
            for gone in (0, 1, 2, 3):  # the walk stands on one, two follow
                assert chain.discard(gone)
            chain.renew(4)
    assert seen == [0, 1, 5, 4]
    assert list(chain) == [5, 4]
    assert not chain.discard(0)
    assert not chain.renew(0)


@given(
    st.lists(st.tuples(st.sampled_from(["add", "discard", "renew"]), st.integers(0, 5)))
)
def test_a_chain_is_an_ordered_set(steps):
    chain, model = Chain(), []
    for word, item in steps:
        here = item in model
        if word == "add":
            chain.add(item)
            model += [] if here else [item]
        elif word == "discard":
            assert chain.discard(item) is here
            model = [i for i in model if i != item]
        else:
            assert chain.renew(item) is here
            model = [i for i in model if i != item] + [item] * here
        assert list(chain) == model
        assert len(chain) == len(model)
        assert (item in chain) is (item in model)
    chain.clear()
    assert list(chain) == []
    assert len(chain) == 0
