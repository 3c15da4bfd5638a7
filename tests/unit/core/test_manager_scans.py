"""Who waits for whom: scans, reservations, the promotion share."""

from manager_kit import HIT, MISS, PENDING, RETRY, key, keys, land, with_tier


def test_prefix_in_both_places_under_transient_pins():
    """A prefix in both places; half of the primary is pinned by others."""
    rig = with_tier(8, *range(4, 12))
    rig.new("a", 0, 1, 2, 3)
    rig.store("a", 0, 1, 2, 3)  # its cascade pins four slots
    rig.new("b", *range(12))
    for _ in range(3):
        hits = rig.scan("b", *range(12))
        if hits is not None:
            break
        rig.step()
        for job in list(rig.tiers[0].jobs.values()):
            if job.is_promotion:
                rig.tiers[0].answer_job(job)
        rig.advance()
    assert hits == 8


def test_share_binds_a_younger_scan_and_frees_with_the_older():
    rig = with_tier(8, *range(4), *range(10, 18))
    rig.new("a", *range(4))
    rig.new("b", *range(10, 18))
    assert rig.look("a", *range(4)) == [PENDING] * 4
    assert rig.look("b", *range(10, 18)) == [RETRY] * 8
    land(rig)
    assert rig.scan("a", *range(4)) == 4
    rig.load("a", *range(4))
    assert rig.look("b", *range(10, 14)) == [PENDING] * 4


def test_share_binds_after_a_refused_store_of_another():
    rig = with_tier(4, *range(10, 14))
    rig.new("s", 1)
    rig.new("a", *range(10, 14))
    rig.offer("s", 0, 1, 2, 3, 4)  # refused for ever
    assert rig.look("a", *range(10, 14)) == [PENDING, PENDING, MISS, MISS]


def test_abandoned_scan_holds_its_blocks_for_a_while_only():
    rig = with_tier(4, *range(4), *range(10, 14), scan_hold_s=5.0)
    rig.new("a", *range(4))
    rig.look("a", *range(4))
    land(rig)
    rig.new("b", *range(10, 14))
    assert rig.look("b", 10) == [RETRY]
    rig.advance(5.1)
    rig.step()
    assert rig.look("b", 10) == [PENDING]


def test_promotion_never_takes_what_an_older_scan_counts_on():
    """INV-21, beyond the step in which it was told."""
    rig = with_tier(4, promotion_share=1.0)
    rig.resident(0, 1, 2, 3)
    rig.tiers[0].have.update(keys(7, 8, 9))
    rig.new("a", 0, 1, 8)
    rig.new("b", 9, 7)
    assert rig.look("a", 0, 1, 8) == [HIT, HIT, PENDING]
    rig.step()
    assert rig.look("b", 9, 7) == [PENDING, RETRY]
    assert rig.holds(0, 1, 8, 9) == [True] * 4


def test_promotion_never_takes_what_its_own_last_scan_counted():
    """The scan comes again; its first key may not push its later ones out."""
    rig = with_tier(3, promotion_share=1.0)
    rig.resident(0, 1, 2)
    rig.tiers[0].have.update(keys(8, 9))
    rig.new("a", 9, 0, 1, 8)
    assert rig.look("a", 0, 1, 8) == [HIT, HIT, PENDING]
    land(rig)
    assert rig.look("a", 9) == [MISS]
    assert rig.holds(0, 1, 8) == [True] * 3


def test_older_scan_is_served_though_a_younger_one_always_comes_first():
    """At the step's end, when HITs are free again, the older takes what it needs."""
    rig = with_tier(4, *range(4), *range(10, 14))
    rig.new("a", *range(4))
    rig.new("b", *range(10, 14))
    rig.tiers[0].verdicts[key(13)] = RETRY  # b cannot end
    assert rig.scan("b", *range(10, 14)) is None
    land(rig)
    hits = None
    for _ in range(5):
        assert rig.scan("b", *range(10, 14)) is None
        hits = rig.scan("a", *range(4))
        if hits is not None:
            break
        land(rig)
    assert hits == 4
