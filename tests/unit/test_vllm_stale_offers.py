"""Which requests must not store after a reset."""

from shmoffload.vllm.stale_offers import StaleOffers


def test_only_requests_that_had_run_at_the_reset_are_stale():
    offers = StaleOffers(may_have_window=True)
    offers.began(["old"])
    offers.reset()
    offers.began(["new"])
    assert offers.are_of("old")
    assert not offers.are_of("new")


def test_a_preempted_request_starts_again():
    offers = StaleOffers(may_have_window=True)
    offers.began(["a", "b"])
    offers.reset()
    offers.restart({"a"})
    assert not offers.are_of("a")
    assert offers.are_of("b")
    offers.reset()
    assert offers.are_of("a")


def test_a_finished_request_is_forgotten():
    offers = StaleOffers(may_have_window=True)
    offers.began(["a"])
    offers.reset()
    offers.forget("a")
    assert not offers.are_of("a")
    offers.reset()
    assert not offers.are_of("a")
    offers.forget("never seen")


def test_without_a_window_nobody_gives_blocks_back():
    offers = StaleOffers(may_have_window=False)
    offers.began(["a"])
    offers.reset()
    assert not offers.are_of("a")
