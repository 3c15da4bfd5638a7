"""A worker's tier as the core sees it: epochs, residency, credits."""

import numpy as np
import pytest
from manager_kit import ENGINE_EPOCH, HIT, key, keys, make_mailbox, reply

from shmoffload.core.types import (
    AnnounceRequest,
    FinishRequest,
    JobMetadata,
    JobResult,
    OffloadPolicy,
    ReqContext,
    Residency,
    TierDown,
    TierUp,
)

A = ReqContext("a")


def job(job_id, *of_keys, load=False, ctx=A):
    slots = np.arange(len(of_keys), dtype=np.int32)
    return JobMetadata(job_id, keys(*of_keys), slots, load, ctx)


def resident(tier):
    return [n for n in range(10) if tier.lookup(key(n), A) is HIT]


def test_down_until_it_is_up_and_has_told_what_it_holds():
    tier = make_mailbox(epoch=0)
    assert not tier.admits(1)
    tier.feed([Residency(1, added=keys(1, 2))])
    assert resident(tier) == []
    tier.feed([Residency(1, added=keys(3), removed=keys(1)), TierUp(1, 4096)])
    assert resident(tier) == [2, 3]
    assert tier.capacity_bytes == 4096
    tier.feed([TierUp(1)])  # twice changes nothing
    assert resident(tier) == [2, 3]


def test_job_of_a_tier_that_is_down_fails_at_once():
    tier = make_mailbox(epoch=0)
    tier.submit_store(job(1, 1))
    tier.submit_load(job(2, 1, load=True))
    assert tier.get_finished_jobs() == [JobResult(1, False), JobResult(2, False)]
    assert tier.get_finished_jobs() == []
    assert tier.take_outbox() == []
    assert tier.jobs_refused == 2


def test_request_is_announced_with_its_first_job_and_finished_once():
    tier = make_mailbox()
    other = ReqContext("never-used")
    tier.on_new_request(A)
    tier.on_new_request(other)
    assert tier.take_outbox() == []
    first, second = job(1, 1), job(2, 2, load=True)
    tier.submit_store(first)
    tier.submit_load(second)
    tier.on_request_finished(other)
    tier.on_request_finished(A)
    tier.on_request_finished(A)
    announce = AnnounceRequest("a", OffloadPolicy.BLOCK_LEVEL)
    assert tier.take_outbox() == [announce, first, second, FinishRequest("a")]


def test_stored_keys_become_resident_even_of_a_job_that_failed_in_part():
    tier = make_mailbox()
    tier.submit_store(job(1, 1, 2, 3))
    tier.feed([reply(1, failed_idx=[1], removed=keys(3), error="No space left")])
    assert tier.get_finished_jobs() == [JobResult(1, False, keys(1, 3))]
    assert resident(tier) == [1]
    assert tier.last_error == "No space left"


def test_key_that_cannot_be_loaded_is_no_longer_resident():
    """F21: the same doomed load is not tried again."""
    tier = make_mailbox()
    tier.feed([Residency(1, added=keys(1, 2, 3))])
    tier.submit_load(job(1, 1, 2, load=True))
    tier.feed([reply(1, failed_idx=[0])])
    assert tier.get_finished_jobs() == [JobResult(1, False, keys(2))]
    assert resident(tier) == [2, 3]


@pytest.mark.parametrize(
    "stray",
    [
        pytest.param(reply(99), id="unknown job"),
        pytest.param(reply(1, engine=ENGINE_EPOCH - 1), id="another engine"),
        pytest.param(reply(1, worker=2), id="another worker"),
    ],
)
def test_reply_counts_only_with_all_three_names(stray):
    """INV-33."""
    tier = make_mailbox()
    tier.submit_store(job(1, 1))
    tier.feed([stray])
    assert tier.get_finished_jobs() == []
    assert tier.late_replies == 1
    assert resident(tier) == []
    tier.feed([reply(1), reply(1)])
    assert tier.get_finished_jobs() == [JobResult(1, True)]
    assert tier.late_replies == 2


def test_reply_about_positions_that_do_not_exist_fails_the_whole_job():
    tier = make_mailbox()
    tier.feed([Residency(1, added=keys(1, 2))])
    tier.submit_load(job(1, 1, 2, load=True))
    tier.feed([reply(1, failed_idx=[5])])
    assert tier.get_finished_jobs() == [JobResult(1, False, [])]
    assert tier.bad_replies == 1


def test_open_jobs_outlive_a_silent_worker_and_end_with_its_death():
    tier = make_mailbox()
    tier.feed([Residency(1, added=keys(5))])
    tier.submit_store(job(1, 1))
    tier.submit_load(job(2, 5, load=True))
    tier.take_outbox()
    tier.feed([TierDown(1, dead=False)])
    assert resident(tier) == []
    assert tier.get_finished_jobs() == []
    tier.feed([reply(1)])  # sent before the end: counts, but holds nothing
    assert tier.get_finished_jobs() == [JobResult(1, True)]
    assert resident(tier) == []
    tier.feed([TierUp(1), Residency(1, added=keys(6))])  # it never comes back
    assert not tier.is_up
    tier.feed([TierDown(1, dead=True)])
    assert tier.get_finished_jobs() == [JobResult(2, False)]
    assert tier.num_open_jobs == 0
    assert tier.open_store_bytes == 0


def test_restart_announces_again_only_who_sends_again():
    tier = make_mailbox()
    b = ReqContext("b")
    tier.submit_store(job(1, 1))
    tier.submit_store(job(2, 2, ctx=b))
    tier.feed([TierDown(1, dead=True), Residency(2, added=keys(1)), TierUp(2)])
    assert tier.take_outbox() == []
    again = job(3, 3)
    tier.submit_store(again)
    tier.submit_store(job(4, 4))
    tier.on_request_finished(b)
    outbox = tier.take_outbox()
    assert outbox[0] == AnnounceRequest("a", OffloadPolicy.BLOCK_LEVEL)
    assert [type(o) for o in outbox[1:]] == [JobMetadata, JobMetadata]
    tier.feed([reply(3, worker=1), reply(3, worker=2)])
    assert tier.late_replies == 1
    assert resident(tier) == [1, 3]


def test_newer_worker_before_the_death_of_the_last_is_told():
    """Its jobs stay open: only a proven death frees their slots."""
    tier = make_mailbox()
    tier.submit_store(job(1, 1))
    tier.feed([TierUp(2)])
    assert tier.is_up
    assert tier.num_open_jobs == 1
    tier.submit_store(job(2, 2))
    tier.feed([TierDown(1, dead=True)])
    assert tier.is_up
    assert tier.get_finished_jobs() == [JobResult(1, False)]
    assert tier.num_open_jobs == 1


def test_credits_are_bytes_of_unanswered_cascades():
    tier = make_mailbox(credit_blocks=4)
    assert tier.admits(4)
    assert not tier.admits(5)
    tier.submit_store(job(1, 1, 2, 3))
    tier.submit_load(job(2, 4, load=True))  # loads cost none
    assert tier.admits(1)
    assert not tier.admits(2)
    tier.take_outbox()
    assert not tier.admits(2)
    tier.feed([reply(1)])
    assert tier.admits(4)


def test_outbox_is_bounded():
    tier = make_mailbox(max_outbox=4)
    for job_id in range(1, 5):
        tier.submit_store(job(job_id, job_id))
    assert not tier.admits(1)
    assert tier.get_finished_jobs() == [JobResult(4, False)]
    assert len(tier.take_outbox()) <= 4
    assert tier.admits(1)


def test_a_tiers_code_has_the_word_where_the_configuration_has_none():
    wants_all = TierUp(1, policy=OffloadPolicy.REQUEST_LEVEL)
    silent = make_mailbox(epoch=0, policy=None)
    assert silent.on_new_request(A).policy is OffloadPolicy.BLOCK_LEVEL
    silent.feed([wants_all])
    assert silent.on_new_request(A).policy is OffloadPolicy.REQUEST_LEVEL
    told = make_mailbox(epoch=0, policy=OffloadPolicy.BLOCK_LEVEL)
    told.feed([wants_all])
    assert told.on_new_request(A).policy is OffloadPolicy.BLOCK_LEVEL
