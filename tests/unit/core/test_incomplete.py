"""A tier that wants whole requests gets each offered key, or hears that it will not.

Rule 6 of docs/architecture.md; the notice is ours, vLLM has none.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manager_kit import ManualTier, Rig, key, keys, numbers

from shmoffload.core.mailbox import MailboxTier
from shmoffload.core.types import (
    AnnounceRequest,
    FinishRequest,
    JobMetadata,
    OffloadPolicy,
    ReqContext,
    RequestIncomplete,
    TierTraits,
    TierUp,
)
from shmoffload.engine.tier_link import TierLink
from shmoffload.wire.messages import (
    MAX_FRAME_BYTES,
    MAX_KEYS_PER_FRAME,
    Finished,
    Incomplete,
    decode_to_worker,
)
from shmoffload.worker.intake import BadPartError, Intake

REQUEST = OffloadPolicy.REQUEST_LEVEL


class AskingTier(ManualTier):
    """Wants whole requests; its log has the notices."""

    def __init__(self, name="t0"):
        super().__init__(name, REQUEST)

    def on_request_incomplete(self, ctx, of_keys):
        self._say("incomplete", ctx.req_id, *numbers(of_keys))


def asking(num_slots, num_tiers=1, **settings):
    tiers = [AskingTier(f"t{i}") for i in range(num_tiers)]
    return Rig(num_slots, tiers=tiers, **settings)


def words(rig, tier_idx=0):
    return [entry for entry in rig.tiers[tier_idx].log if entry[0] != "new"]


def test_nothing_is_said_when_nothing_is_missing():
    rig = asking(6)
    rig.resident(1, 2)
    rig.new("a", 1, 2, 3)
    rig.store("a", 1, 2, 3)
    rig.offer("a", 1)
    rig.finish("a")
    assert words(rig) == [("store", "a", 1, 2), ("store", "a", 3), ("finished", "a")]
    assert rig.counters.incomplete_keys == [0]


def test_a_block_level_tier_hears_nothing():
    rig = Rig(4, tiers=[AskingTier()], traits=[TierTraits(level=None)])
    rig.tiers[0].policy = OffloadPolicy.BLOCK_LEVEL
    rig.new("a", 1)
    rig.offer("a", 1)
    rig.stored("a", 1, ok=False)
    rig.finish("a")
    assert words(rig) == [("finished", "a")]


def failed_copy(rig):
    rig.offer("a", 1)
    rig.stored("a", 1, ok=False)


def refused_for_good(rig):
    rig.new("other", *range(20, 24))
    rig.offer("other", *range(20, 24))
    assert rig.offer("a", 1) is None


def no_credit(rig):
    rig.tiers[0].credit = False
    rig.store("a", 1)


def submit_fails(rig):
    rig.tiers[0].raises = ("store",)
    rig.store("a", 1)


def tier_fails(rig):
    rig.store("a", 1)
    rig.tiers[0].answer(ok=False)
    rig.advance()


def reset(rig):
    rig.offer("a", 1)
    rig.manager.reset_cache()
    rig.stored("a", 1)


def parked_on_a_failure(rig):
    rig.new("other", 1)
    rig.offer("other", 1)
    rig.offer("a", 1)
    rig.stored("other", 1, ok=False)


WAYS = [
    failed_copy,
    refused_for_good,
    no_credit,
    submit_fails,
    tier_fails,
    reset,
    parked_on_a_failure,
]


@pytest.mark.parametrize("lose", WAYS, ids=lambda way: way.__name__)
def test_every_way_to_lose_a_key_is_told_once_before_the_last_word(lose):
    rig = asking(4)
    rig.new("a", 1)
    lose(rig)
    rig.finish("a")
    of_a = [entry for entry in words(rig) if entry[1] == "a"]
    assert of_a[-2:] == [("incomplete", "a", 1), ("finished", "a")]
    assert rig.tiers[0].said("incomplete").count(["a", 1]) == 1


@pytest.mark.parametrize("lose", WAYS[:5], ids=lambda way: way.__name__)
def test_what_comes_after_all_is_not_missing(lose):
    rig = asking(8)
    rig.new("a", 1)
    lose(rig) if lose is not refused_for_good else failed_copy(rig)
    rig.tiers[0].credit, rig.tiers[0].raises = True, ()
    rig.store("a", 1)
    rig.finish("a")
    assert rig.tiers[0].said("incomplete") == []
    assert rig.tiers[0].log[-2:] == [("store", "a", 1), ("finished", "a")]


def test_store_tiers_count_and_the_excluded_tier_is_told_all():
    rig = asking(4, 2)
    rig.new("a", 1, 2, params={"shmoffload": {"store_tiers": ["t1"]}})
    rig.store("a", 1, 2)
    rig.finish("a")
    assert words(rig, 0) == [("incomplete", "a", 1, 2), ("finished", "a")]
    assert words(rig, 1) == [("store", "a", 1, 2), ("finished", "a")]
    assert rig.counters.incomplete_keys == [2, 0]


def test_a_shed_tail_is_told():
    rig = asking(8, max_cascade_share=0.25)
    rig.new("a", 1, 2, 3)
    rig.store("a", 1, 2, 3)
    rig.finish("a")
    assert words(rig) == [
        ("store", "a", 1, 2),
        ("incomplete", "a", 3),
        ("finished", "a"),
    ]


def test_the_notice_waits_for_the_last_copy_of_a_finished_request():
    rig = asking(4)
    rig.new("a", 1, 2)
    rig.offer("a", 1)
    rig.offer("a", 2)
    rig.finish("a")
    rig.stored("a", 1, ok=False)
    assert words(rig) == []
    rig.stored("a", 2)
    assert words(rig) == [("store", "a", 2), ("incomplete", "a", 1), ("finished", "a")]


def test_a_tier_that_breaks_on_the_notice_still_hears_the_end():
    rig = asking(4)
    rig.tiers[0].raises = ("incomplete",)
    rig.new("a", 1)
    failed_copy(rig)
    rig.finish("a")
    assert words(rig) == [("finished", "a")]
    assert rig.counters.tier_errors == 1


# The channel --------------------------------------------------------------------


def mailbox(max_outbox=100):
    tier = MailboxTier(
        "t",
        policy=REQUEST,
        credit_bytes=1000,
        block_bytes=10,
        engine_epoch=1,
        max_outbox=max_outbox,
    )
    tier.feed([TierUp(1)])
    return tier


def test_the_mailbox_puts_the_notice_between_jobs_and_the_last_word():
    tier = mailbox()
    rig = Rig(4, tiers=[tier])
    rig.new("a", 1, 2)
    rig.store("a", 1)
    failed_copy_of(rig, 2)
    rig.finish("a")
    kinds = [type(output) for output in tier.take_outbox()]
    assert kinds == [AnnounceRequest, JobMetadata, RequestIncomplete, FinishRequest]


def failed_copy_of(rig, number):
    rig.offer("a", number)
    rig.stored("a", number, ok=False)


def test_the_notice_may_be_the_first_word_and_carries_the_requests_level():
    tier = mailbox()
    tier._policy = OffloadPolicy.BLOCK_LEVEL
    rig = Rig(4, tiers=[tier])
    rig.new("a", 1, params={"shmoffload": {"policy": "request_level"}})
    failed_copy_of(rig, 1)
    rig.finish("a")
    assert tier.take_outbox() == [
        AnnounceRequest("a", REQUEST),
        RequestIncomplete("a", keys(1)),
        FinishRequest("a"),
    ]


def test_a_tier_that_is_down_or_full_is_not_told():
    tier = mailbox(max_outbox=2)
    ctx = ReqContext("a")
    tier.on_request_incomplete(ctx, keys(1))
    assert tier.notices_dropped == 1
    tier.shutdown()
    tier.on_request_incomplete(ctx, keys(1))
    tier.on_request_finished(ctx)
    assert tier.take_outbox() == []
    assert tier.notices_dropped == 1


class Wire:
    """A channel that keeps what is sent."""

    def __init__(self):
        self.frames = []

    def send(self, frame):
        assert len(frame) <= MAX_FRAME_BYTES
        self.frames.append(frame)
        return True

    def close(self):
        pass


@given(st.integers(0, 3 * MAX_KEYS_PER_FRAME))
def test_a_notice_is_split_by_frames_and_arrives_whole_and_in_order(num_keys):
    link, wire = TierLink(engine_epoch=1), Wire()
    link._channel = wire
    every = [key(i) for i in range(num_keys)]
    link.send([RequestIncomplete("a", every), FinishRequest("a")])
    messages = [m for frame in wire.frames for m in decode_to_worker(frame)]
    assert isinstance(messages.pop(), Finished)
    assert all(isinstance(m, Incomplete) and m.req_id == "a" for m in messages)
    intake = Intake(num_slots=1, engine_epoch=1, worker_epoch=1)
    assert [k for m in messages for k in intake.note(m)] == every


def test_notices_of_many_requests_share_frames_up_to_the_limit():
    link, wire = TierLink(engine_epoch=1), Wire()
    link._channel = wire
    link.send([RequestIncomplete("a", keys(*range(600))) for _ in range(3)])
    sizes = [sum(len(m.keys) for m in decode_to_worker(f)) for f in wire.frames]
    assert sizes == [600, 600, 600]


@pytest.mark.parametrize("bad", [b"", b"four", b"x" * 41])
def test_a_notice_of_what_is_no_key_is_refused(bad):
    intake = Intake(num_slots=1, engine_epoch=1, worker_epoch=1)
    with pytest.raises(BadPartError):
        intake.note(Incomplete("a", [key(1), bad]))


def test_context_of_a_notice_is_the_requests_own():
    seen = []
    rig = asking(4)
    rig.tiers[0].on_request_incomplete = lambda ctx, of_keys: seen.append(ctx)
    rig.new("a", 1)
    failed_copy(rig)
    rig.finish("a")
    assert seen == [rig.contexts["a"]]
