"""Counting offers, against a list of pairs that is searched from its front."""

from hypothesis import given
from hypothesis import strategies as st

from shmoffload.core.offers import OfferRule

offers = st.lists(st.lists(st.integers(0, 9), max_size=7, unique=True), max_size=30)


class Pairs:
    """The rule as semantics.md 3.2 says it: [key, offers], oldest first."""

    def __init__(self, size):
        self.size, self.pairs = size, []

    def offer(self, keys):
        for key in keys:
            for pair in self.pairs:
                if pair[0] == key:
                    pair[1] += 1
                    self.pairs.remove(pair)
                    self.pairs.append(pair)
                    break
        known = {pair[0] for pair in self.pairs}
        for key in keys:
            if key in known:
                continue
            if len(self.pairs) == self.size:
                strangers = [pair for pair in self.pairs if pair[0] not in keys]
                if not strangers:
                    continue
                self.pairs.remove(strangers[0])
            self.pairs.append([key, 1])

    def count(self, key):
        return dict(self.pairs).get(key, 0)


@given(offers, st.integers(2, 4), st.integers(1, 8))
def test_offers_are_counted_as_by_the_rule(batches, threshold, size):
    ours, model = OfferRule(threshold, size).make_counts(), Pairs(size)
    for keys in batches:
        ours.count(dict.fromkeys(keys))
        model.offer(keys)
        assert len(ours) == len(model.pairs) <= size
        expected = [key for key in range(10) if model.count(key) >= threshold]
        assert ours.often_enough(range(10)) == expected
