"""Scenarios of ``kv_load_tiers``: which tiers may serve a request, by their ids."""

from manager_kit import HIT, MISS, PENDING, ManualTier, Rig, keys

from shmoffload.core.types import TierTraits


def rig_with_media(*media, holds=(1,)):
    """One tier per medium, each with the same blocks."""
    tiers = [ManualTier(f"t{i}") for i in range(len(media))]
    for tier in tiers:
        tier.have.update(keys(*holds))
        tier.asked = []
        tier.lookup = _remembering(tier)
    traits = [TierTraits(medium=medium, locality="LOCAL") for medium in media]
    return Rig(5, tiers=tiers, traits=traits)


def _remembering(tier):
    lookup = tier.lookup

    def asked(k, ctx):
        tier.asked.append(ctx.req_id)
        return lookup(k, ctx)

    return asked


def look(rig, words):
    """A new request with these words looks for key 1, which only tiers have."""
    rig.new("a", 1, params={"kv_load_tiers": words})
    return rig.look("a", 1)


def test_s25_tiers_of_another_medium_are_not_asked():
    rig = rig_with_media("CPU", "CPU")
    rig.new("x", 2)
    rig.store("x", 2)
    assert look(rig, [{"medium": "STORAGE"}]) == [MISS]
    assert [tier.asked for tier in rig.tiers] == [[], []]
    assert rig.look("a", 2) == [HIT]  # the primary is always searched
    rig.new("b", 1)
    assert rig.look("b", 1) == [PENDING]  # who says nothing may use all
    # One of two is meant; what is not known of a tier matches.
    rig = rig_with_media("CPU", "STORAGE")
    assert look(rig, [{"medium": "STORAGE"}]) == [PENDING]
    assert [tier.asked for tier in rig.tiers] == [[], ["a"]]
    assert look(rig_with_media(None), [{"medium": "STORAGE"}]) == [PENDING]
    both = [{"medium": "STORAGE"}, {"medium": "CPU", "locality": "LOCAL"}]
    assert look(rig_with_media("CPU"), both) == [PENDING]
    assert look(rig_with_media("CPU"), [{"locality": "REMOTE"}]) == [MISS]


def test_s26_what_a_filter_says_that_says_nothing():
    """Nothing listed: no tier. Nothing understood: as if nothing had been said."""
    for words, answer in (
        ([], MISS),
        ("x", PENDING),
        ([{"medium": "TAPE"}], PENDING),
        ([7, {"medium": "CPU"}], PENDING),
        ([7, {"medium": "STORAGE"}], MISS),
    ):
        assert look(rig_with_media("CPU"), words) == [answer], words
