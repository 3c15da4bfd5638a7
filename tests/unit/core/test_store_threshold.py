"""``primary.store_threshold``: a block is stored at its n-th offer."""

import pytest
from manager_kit import ManualTier, key, keys, numbers

from shmoffload.core.manager import TieringOffloadingManager
from shmoffload.core.offers import OfferRule
from shmoffload.core.policies.arc import ArcPolicy
from shmoffload.core.types import OffloadPolicy, ReqContext
from shmoffload.engine.core_settings import core_settings
from shmoffload.errors import ConfigError
from shmoffload.wire.config import from_dict

A = ReqContext("a", key_positions={key(n): n for n in range(10)})


def make(threshold, *tiers, slots=8, size=100, **more):
    manager = TieringOffloadingManager(
        slots, tiers, block_bytes=64, offer_rule=OfferRule(threshold, size), **more
    )
    manager.on_new_request(A)
    return manager


def offer(manager, *of_keys, ok=True):
    output = manager.prepare_store(keys(*of_keys), A)
    if output is None:
        return None
    manager.complete_store(output.keys_to_store, A, ok)
    manager.check_integrity()
    return numbers(output.keys_to_store)


@pytest.mark.parametrize("threshold", [0, 1])
def test_off_stores_everything_at_once_and_counts_nothing(threshold):
    assert OfferRule(threshold).make_counts() is None
    manager = make(threshold)
    assert offer(manager, 1, 2) == [1, 2]
    assert manager.counters.stores_skipped == 0


def test_a_block_is_stored_at_its_third_offer():
    manager = make(3)
    assert offer(manager, 1, 2) == []
    assert offer(manager, 2, 3) == []
    assert offer(manager, 1, 2, 3) == [2]
    assert manager.counters.stores_skipped == 6
    assert offer(manager, 1, 2, 3) == [1, 3]  # 2 is here: neither stored nor skipped
    assert manager.counters.stores_skipped == 6
    assert manager.counters.stores_prepared == 3
    assert manager.counters.blocks_not_admitted == 0


def test_a_failed_store_and_a_reset_forget_no_offer():
    manager = make(2)
    offer(manager, 1)
    assert offer(manager, 1, ok=False) == [1]
    assert offer(manager, 1) == [1]
    manager.reset_cache()
    assert offer(manager, 1) == [1]


def test_a_refused_offer_counts():
    manager = make(2, slots=1)
    offer(manager, 1, 2)
    assert offer(manager, 1, 2) is None
    assert offer(manager, 2) == [2]


def test_late_offers_do_not_count():
    manager = make(2)
    stranger = ReqContext("stranger")
    assert manager.prepare_store(keys(1), stranger) is None
    assert offer(manager, 1) == []


def test_the_oldest_count_goes_first_and_never_one_of_the_offer():
    manager = make(2, size=2)
    offer(manager, 1, 2)
    assert offer(manager, 2, 3) == [2]  # 3 takes the place of 1
    assert offer(manager, 1) == []
    offer(manager, 4, 5)
    assert offer(manager, 4, 5, 6) == [4, 5]  # no place for 6
    assert offer(manager, 6) == []  # its first


def test_the_policy_hears_nothing_of_a_skipped_block():
    heard = []

    class Listening(ArcPolicy):
        def offer(self, of_keys, absent, ctx, *, may_refuse):
            heard.append((numbers(of_keys), numbers(absent)))
            return super().offer(of_keys, absent, ctx, may_refuse=may_refuse)

    manager = make(2, policy=Listening(8))
    offer(manager, 1, 2)
    offer(manager, 2, 3)
    offer(manager, 2, 4)
    assert heard == [([], []), ([2], [2]), ([2], [])]


def test_stored_blocks_go_to_tiers_and_skipped_ones_are_said_to_be_missing():
    whole, each = ManualTier("whole", OffloadPolicy.REQUEST_LEVEL), ManualTier("each")
    told = []
    whole.on_request_incomplete = lambda _, of_keys: told.append(numbers(of_keys))
    manager = make(2, whole, each)
    offer(manager, 1)
    offer(manager, 1, 2)
    for tier in (whole, each):
        (job,) = tier.jobs.values()
        assert numbers(job.keys) == [1]
    manager.on_request_finished(A)
    assert told == [[2]]


def test_with_accept_prefix_room_is_taken_by_what_is_worth_it():
    manager = make(2, slots=1, accept_prefix=True)
    offer(manager, 2, 3)
    assert offer(manager, 1, 2, 3) == [2]
    assert manager.counters.stores_shortened == 1


def configured(**primary):
    return from_dict({"primary": {"slots": 4, "block_bytes": 64, **primary}})


def test_configuration_reaches_the_core():
    assert core_settings(configured())["offer_rule"] == OfferRule()
    config = configured(store_threshold=3, max_tracker_size=10)
    assert core_settings(config)["offer_rule"] == OfferRule(3, 10)


@pytest.mark.parametrize(
    ("key_name", "value"),
    [("store_threshold", -1), ("max_tracker_size", 0), ("max_tracker_size", 1 << 40)],
)
def test_nonsense_is_refused(key_name, value):
    with pytest.raises(ConfigError, match=rf"primary\.{key_name} = .*give"):
        configured(**{key_name: value})
