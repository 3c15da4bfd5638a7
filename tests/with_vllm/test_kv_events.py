"""Residency events through vLLM's own tracker: per tier, with their payload."""

import dataclasses
import types

import pytest
from adapter_kit import END, keys_of, server, settings_of, slab
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventGroupSpec,
    OffloadingEventsTracker,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_offload import base as vllm_base

from shmoffload.core.events import OffloadingEvent
from shmoffload.testing.poll import wait_until
from shmoffload.vllm.report import events

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TOKENS = 16
HAS_METADATA_ONLY = "metadata_only" in events._FIELDS


class Follower:
    """vLLM's tracker behind a manager, and a mirror of what it announces.

    Attributes:
        where: (medium, owner) -> block hashes that a router believes to be there.
        payloads: block hash -> its tokens, as last announced.
    """

    def __init__(self, started):
        self._started = started
        self.tracker = OffloadingEventsTracker(
            vllm_base.OffloadingKVEventsConfig(
                enable_kv_cache_events=True, self_describing_kv_events=True
            )
        )
        self.where, self.payloads, self.seen = {}, {}, []

    def record(self, keys):
        """Do what the connector does for blocks that a request stores."""
        hashes = [key[:-4] for key in keys]
        request = types.SimpleNamespace(
            block_hashes=hashes,
            all_token_ids=list(range(TOKENS * len(keys))),
            lora_request=None,
        )
        group = types.SimpleNamespace(
            hashes_per_chunk=1,
            tokens_per_chunk=TOKENS,
            tokens_per_block=TOKENS,
            group_idx=0,
            sliding_window_size_in_chunks=None,
            kv_event_group_spec=OffloadingEventGroupSpec("full_attention", None),
        )
        for idx, key in enumerate(keys):
            self.tracker.record_store(request, group, idx, key)

    def drain(self):
        """Publish what the manager has to say; returns what is published."""
        published = list(self.tracker.take_events(self._started.manager.take_events()))
        for event in published:
            there = self.where.setdefault((event.medium, event.ownership), set())
            if isinstance(event, BlockStored):
                there.update(event.block_hashes)
                self.payloads[event.block_hashes[0]] = list(event.token_ids)
            else:
                assert isinstance(event, BlockRemoved)
                there.difference_update(event.block_hashes)
        self.seen += published
        return published

    def reset(self):
        """Do what vLLM does at a reset: everything is announced as gone."""
        self._started.drop_primary()
        self.tracker.reset()
        self.where.clear()

    def await_in(self, place, keys):
        """Step until a router believes exactly ``keys`` to be somewhere."""
        wanted = set(names(keys))

        def is_there():
            self._started.manager.lookup(keys_of(999, 1)[0], self._any_request())
            self._started.manager.on_schedule_end(END)
            self.drain()
            return self.where.get(place, set()) == wanted

        wait_until(is_there, timeout_s=30.0, what=f"{len(keys)} blocks in {place}")

    def _any_request(self):
        return vllm_base.ReqContext("nobody")


def names(keys):
    """Return what events call blocks."""
    return [maybe_convert_block_hash(key[:-4]) for key in keys]


PRIMARY = ("CPU", None)
DISK = ("STORAGE", "disk")


@pytest.fixture
def small(session_name, tmp_path):
    """Four slots before a disk tier, and who follows it."""
    with server(
        settings_of(session_name, [slab(tmp_path, name="disk")], slots=4)
    ) as started:
        yield started, Follower(started)


def test_a_stored_block_is_announced_with_its_tokens(small):
    """In the primary at once, in the tier when it is there, each under its name."""
    started, follower = small
    ctx, keys = started.request("a"), keys_of(0, 3)
    follower.record(keys)
    started.store(ctx, keys)
    published = follower.drain()
    assert follower.where == {PRIMARY: set(names(keys))}
    assert {event.locality for event in published} == {None}
    assert follower.payloads[names(keys)[1]] == list(range(TOKENS, 2 * TOKENS))
    follower.await_in(DISK, keys)
    told = [event for event in follower.seen if event.ownership == "disk"]
    assert {event.locality for event in told} == {"LOCAL"}
    assert all(event.token_ids for event in told)
    assert follower.where[PRIMARY] == set(names(keys))


def test_a_block_that_the_primary_drops_is_still_in_the_tier(small):
    """One removal, of the primary; the payload stays as long as the tier has it."""
    started, follower = small
    ctx, keys = started.request("a"), keys_of(0, 4)
    follower.record(keys)
    started.store(ctx, keys)
    follower.await_in(DISK, keys)
    more = keys_of(10, 2)
    follower.record(more)
    started.manager.on_request_finished(ctx)
    evicted = started.offer(started.request("b"), more).evicted_keys
    assert len(evicted) == 2
    published = follower.drain()
    assert [type(event) for event in published] == [BlockRemoved]
    assert (published[0].medium, published[0].ownership) == PRIMARY
    assert follower.where[PRIMARY] == set(names(keys)) - set(names(evicted))
    assert follower.where[DISK] >= set(names(evicted))
    assert set(evicted) <= set(follower.tracker._pending_event_metadata)


def test_a_promoted_block_is_in_the_primary_again(small):
    """With its payload, which the tier's residency has kept."""
    started, follower = small
    ctx, keys = started.request("a"), keys_of(0, 4)
    follower.record(keys)
    started.store(ctx, keys)
    follower.await_in(DISK, keys)
    started.manager.on_request_finished(ctx)
    other = started.request("b")
    filler = keys_of(20, 4)
    started.store(other, filler)
    follower.drain()
    assert follower.where[PRIMARY] == set(names(filler))
    started.manager.on_request_finished(other)
    follower.await_in(DISK, keys + filler)
    follower.payloads.clear()
    started.load(started.request("c"), keys[:1])
    follower.drain()
    assert names(keys)[0] in follower.where[PRIMARY]
    assert follower.payloads[names(keys)[0]] == list(range(TOKENS))


def test_what_a_tier_evicts_is_removed_there(session_name):
    """From both: nobody keeps a payload for it any more."""
    tier = {"type": "memory", "name": "disk", "medium": "STORAGE", "max_bytes": "64KiB"}
    with server(settings_of(session_name, [tier], slots=4)) as started:
        follower = Follower(started)
        ctx, keys = started.request("a"), keys_of(0, 2)
        follower.record(keys)
        started.store(ctx, keys)
        follower.await_in(DISK, keys)
        capacity = len(started.engine.tiers[0]._resident)
        assert capacity == 2
        started.manager.on_request_finished(ctx)
        for start in (10, 20, 30):
            other, more = started.request(f"b{start}"), keys_of(start, 2)
            follower.record(more)
            started.store(other, more)
            started.manager.on_request_finished(other)
            settle(started, follower)
        gone = set(names(keys))
        assert not gone & follower.where[DISK]
        assert not gone & follower.where[PRIMARY]
        assert not set(keys) & set(follower.tracker._pending_event_metadata)
        assert follower.where[PRIMARY] == set(names(resident(started)))


def settle(started, follower):
    """Step until no job is open."""

    def is_idle():
        started.manager.lookup(keys_of(999, 1)[0], vllm_base.ReqContext("nobody"))
        started.manager.on_schedule_end(END)
        return not started.engine.tiers[0].num_open_jobs

    wait_until(is_idle, timeout_s=30.0, what="the end of all jobs")
    follower.drain()


def resident(started):
    """Return the blocks that can be read from the primary."""
    return list(started.engine.manager.table.blocks)


def test_after_a_reset_the_tier_is_told_anew(small):
    """vLLM announces that all is gone, everywhere; the disk has it all the same."""
    started, follower = small
    ctx, keys = started.request("a"), keys_of(0, 3)
    follower.record(keys)
    started.store(ctx, keys)
    follower.await_in(DISK, keys)
    follower.reset()
    follower.await_in(DISK, keys)
    assert not follower.where.get(PRIMARY)


def test_a_reset_that_vllm_does_not_announce_removes_what_was_there(small):
    """Its own reset fails under running requests, and then it announces nothing."""
    started, follower = small
    ctx, keys = started.request("a"), keys_of(0, 3)
    follower.record(keys)
    started.store(ctx, keys)
    follower.await_in(PRIMARY, keys)
    started.drop_primary()
    follower.tracker.reset()
    follower.await_in(PRIMARY, [])
    follower.await_in(DISK, keys)


def test_a_tier_may_stay_silent(session_name, tmp_path):
    """vLLM's tiers announce only if they are told to; so do ours."""
    settings = settings_of(session_name, [slab(tmp_path, name="disk")])
    settings = dataclasses.replace(settings, tier_events=(False,))
    with server(settings) as started:
        follower = Follower(started)
        keys = keys_of(0, 3)
        follower.record(keys)
        started.store(started.request("a"), keys)
        settle(started, follower)
        assert follower.where == {PRIMARY: set(names(keys))}


def test_without_events_nothing_is_kept(session_name):
    """Nobody drains them then."""
    with server(settings_of(session_name, events=False)) as started:
        started.store(started.request("a"), keys_of(0, 2))
        assert list(started.manager.take_events()) == []


def test_a_write_that_failed_is_no_removal():
    """Nobody was told of the block: 0.33 drops its payload, 0.32 knows no such word."""
    failed = OffloadingEvent(keys_of(0, 1), is_removed=True, metadata_only=True)
    translated = events.to_vllm([failed], [])
    if not HAS_METADATA_ONLY:
        assert translated == []
        return
    assert [event.metadata_only for event in translated] == [True]
