"""What tiers get: admission, credit, shares; and prefixes of offers that fit."""

import pytest
from manager_kit import HIT, Rig, key, keys, numbers

from shmoffload.core.admission import Gate
from shmoffload.core.mailbox import MailboxTier
from shmoffload.core.types import (
    WITHHOLD_ALL,
    AnnounceRequest,
    FinishRequest,
    JobMetadata,
    JobReply,
    OffloadPolicy,
    RequestIncomplete,
    TierTraits,
    TierUp,
    parse_admit,
)
from shmoffload.engine.core_settings import core_settings
from shmoffload.errors import ConfigError
from shmoffload.wire.config import from_dict

REQUEST = OffloadPolicy.REQUEST_LEVEL
SECOND = [TierTraits(withheld=WITHHOLD_ALL)]


def tail(num):
    return [TierTraits(withheld=num)]


@pytest.mark.parametrize(
    ("text", "withheld"), [("all", 0), ("second", -1), ("tail:0", 0), ("tail:12", 12)]
)
def test_admit_is_read(text, withheld):
    assert parse_admit(text) == withheld


@pytest.mark.parametrize(
    "text", ["", "none", "tail", "tail:", "tail:-1", "tail:x", "tail:²", "tail:9" * 9]
)
def test_a_wrong_admit_says_what_to_give(text):
    with pytest.raises(ValueError, match="give all, second or tail:N"):
        parse_admit(text)


def configured(**tier):
    raw = {
        "primary": {"block_bytes": 64, "slots": 4, "accept_prefix": True},
        "tier": [{"type": "memory", "name": "t", **tier}],
        "limits": {"max_cascade_share": 0.5},
    }
    return core_settings(from_dict(raw))


def test_the_configuration_reaches_the_core():
    settings = configured(admit="tail:3", policy="request_level", locality="REMOTE")
    traits = TierTraits("CPU", "REMOTE", REQUEST, withheld=3)
    assert settings["traits"] == [traits]
    assert settings["accept_prefix"]
    assert settings["max_cascade_share"] == 0.5
    (slab,) = configured(type="slab", path="/x")["traits"]
    assert (slab.medium, slab.locality) == ("STORAGE", "LOCAL")
    (plug_in,) = configured(type="mine", medium="STORAGE")["traits"]
    assert (plug_in.medium, plug_in.locality) == ("STORAGE", None)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"tier": [{"type": "memory", "admit": "third"}]}, "all, second or tail:N"),
        ({"tier": [{"type": "memory", "medium": "TAPE"}]}, "medium"),
        ({"limits": {"max_cascade_share": 1.5}}, "give at most 1"),
    ],
)
def test_a_wrong_configuration_is_refused_in_a_sentence(raw, words):
    with pytest.raises(ConfigError, match=words):
        from_dict({"primary": {"block_bytes": 64, "slots": 4}, **raw})


# second, tail -------------------------------------------------------------------


def test_second_sends_a_block_when_another_request_loads_it():
    rig = Rig(6, traits=SECOND)
    rig.new("a", 1, 2)
    rig.store("a", 1, 2)
    assert rig.tiers[0].said("store") == []
    assert rig.counters.cascade_blocks_withheld == [2]
    rig.new("b", 1)
    assert rig.look("b", 1) == [HIT]
    rig.load("b", 1)
    assert rig.tiers[0].said("store") == [["b", 1]]
    rig.loaded("b", 1)
    rig.load("b", 1)  # a third use
    rig.new("c", 1)
    rig.offer("c", 1)
    assert rig.tiers[0].said("store") == [["b", 1]]
    rig.manager.check_integrity()


def test_second_sends_a_block_when_another_request_offers_it():
    rig = Rig(6, traits=SECOND)
    rig.new("a", 1, 2)
    rig.store("a", 1, 2)
    rig.offer("a", 1)  # the same request again is no second use
    assert rig.tiers[0].said("store") == []
    rig.new("b", 1, 2, 3)
    rig.store("b", 1, 2, 3)
    assert rig.tiers[0].said("store") == [["b", 1, 2]]


def test_second_sends_a_block_that_is_stored_again():
    rig = Rig(2, traits=SECOND)
    rig.new("a", 1, 2)
    rig.store("a", 1, 2)
    rig.finish("a")
    rig.new("b", 3, 4)
    rig.store("b", 3, 4)
    rig.finish("b")
    rig.new("c", 1, 5)
    rig.store("c", 1, 5)
    assert rig.tiers[0].said("store") == [["c", 1]]


def test_a_use_without_credit_is_made_good_by_the_next():
    rig = Rig(6, traits=SECOND)
    rig.new("a", 1)
    rig.store("a", 1)
    rig.tiers[0].credit = False
    rig.new("b", 1)
    rig.offer("b", 1)
    rig.tiers[0].credit = True
    rig.new("c", 1)
    rig.offer("c", 1)
    assert rig.tiers[0].said("store") == [["c", 1]]


def test_tail_withholds_the_end_of_the_request_and_not_of_a_chunk():
    rig = Rig(8, traits=tail(2))
    rig.new("a", 1, 2, 3, 4, 5)
    rig.store("a", 1, 2)
    rig.store("a", 3, 4, 5)
    assert rig.tiers[0].said("store") == [["a", 1, 2], ["a", 3]]
    rig.new("b", 1, 2, 3, 4)
    rig.offer("b", 1, 2, 3, 4)
    assert rig.tiers[0].said("store")[2:] == [["b", 4]]


def test_tail_without_positions_is_the_end_of_the_call():
    rig = Rig(8, traits=tail(1))
    rig.new("a")
    rig.store("a", 1, 2, 3)
    assert rig.tiers[0].said("store") == [["a", 1, 2]]


@pytest.mark.parametrize("traits", [SECOND, tail(3)])
def test_nothing_is_withheld_from_a_tier_that_gets_the_whole_request(traits):
    rig = Rig(6, traits=traits)
    words = {"shmoffload": {"policy": "request_level"}}
    assert rig.new("a", 1, 2, params=words) is REQUEST
    rig.store("a", 1, 2)
    assert rig.tiers[0].said("store") == [["a", 1, 2]]


def test_admission_remembers_a_bounded_number_of_names():
    rig = Rig(4, traits=SECOND)
    gate = Gate(WITHHOLD_ALL, max_keys=3)
    rig.new("a", *range(4))
    rig.offer("a", *range(4))
    blocks = [rig.manager.table.blocks[key(n)] for n in range(4)]
    request = rig.manager._requests["a"]
    assert gate.stored(request, blocks) == []
    assert gate.num_keys == 3
    rig.new("b")
    other = rig.manager._requests["b"]
    assert gate.used(other, blocks) == blocks[1:]
    gate.sent(blocks[2:])
    assert gate.used(other, blocks) == blocks[1:2]


# Credit -------------------------------------------------------------------------


class Shop:
    """A manager with one mailbox of ``credit`` blocks, requests, what was sent."""

    def __init__(self, num_slots, credit, **settings):
        self.tier = MailboxTier(
            "t",
            policy=OffloadPolicy.BLOCK_LEVEL,
            credit_bytes=credit * 64,
            block_bytes=64,
            engine_epoch=1,
            max_outbox=100,
        )
        self.tier.feed([TierUp(1)])
        self.rig = Rig(num_slots, tiers=[self.tier], **settings)

    def take(self):
        """Drain the outbox: (request, numbers) of its jobs."""
        self.jobs = [j for j in self.tier.take_outbox() if isinstance(j, JobMetadata)]
        return [(job.req_context.req_id, numbers(job.keys)) for job in self.jobs]

    def answer(self):
        self.tier.feed([JobReply(1, 1, job.job_id) for job in self.jobs])
        self.rig.advance()


def test_without_credit_for_all_the_head_goes_and_the_tail_is_counted():
    shop = Shop(8, credit=3)
    shop.rig.new("a", 1, 2, 3, 4, 5)
    shop.rig.offer("a", 1, 2, 3, 4, 5)
    shop.rig.stored("a", 5, 3, 1, 4, 2)  # a head, in whatever order copies end
    shop.rig.manager.check_integrity()
    assert shop.take() == [("a", [1, 2, 3])]
    assert shop.rig.counters.cascade_blocks_dropped == [2]
    assert shop.rig.counters.cascade_jobs_dropped == [0]
    assert shop.rig.pins(1, 2, 3, 4, 5) == [1, 1, 1, 0, 0]
    shop.answer()
    assert shop.tier.open_store_bytes == 0


def test_what_follows_a_shed_part_is_not_sent_until_it_comes_again():
    shop = Shop(4, credit=2)
    shop.rig.new("a", 1, 2, 3, 4, 5)
    shop.rig.store("a", 1, 2, 3)
    assert shop.take() == [("a", [1, 2])]
    shop.answer()
    shop.rig.store("a", 4)  # there is credit, and no use: 3 is missing
    assert shop.take() == []
    assert shop.rig.counters.cascade_blocks_dropped == [2]
    assert shop.rig.counters.cascade_jobs_dropped == [1]
    shop.rig.new("b", 11, 12, 13, 14)
    shop.rig.store("b", 11, 12, 13, 14)  # evicts all of a
    shop.take()
    shop.answer()
    shop.rig.store("a", 3, 4)
    assert shop.take() == [("a", [3, 4])]
    shop.answer()
    shop.rig.store("a", 5)
    assert shop.take() == [("a", [5])]


def test_the_tail_of_the_longest_unsent_request_is_shed_first():
    shop = Shop(20, credit=9)
    rig = shop.rig
    rig.new("long", *range(10, 16))
    rig.new("longest", *range(20, 28))
    rig.new("short", 1, 2, 3)
    rig.store("long", 10, 11)
    rig.store("longest", 20, 21, 22, 23)
    rig.store("long", 12, 13)
    rig.store("longest", 24)
    rig.store("short", 1, 2, 3)
    rig.manager.check_integrity()
    sent = [("long", [10, 11]), ("longest", [20, 21]), ("long", [12, 13])]
    assert shop.take() == [*sent, ("short", [1, 2, 3])]
    assert rig.counters.cascade_blocks_dropped == [3]
    assert rig.pins(22, 23, 24) == [0, 0, 0]
    shop.answer()
    rig.store("longest", 25)  # its prefix has a hole
    assert shop.take() == []
    for req_id in ("long", "longest", "short"):
        rig.finish(req_id)
    rig.step()
    rig.check_quiescent()


def test_what_is_shed_of_a_whole_request_is_missing():
    shop = Shop(8, credit=3, traits=[TierTraits(level=REQUEST)])
    rig = shop.rig
    rig.new("long", 1, 2, 3)
    rig.new("short", 7)
    rig.store("long", 1, 2, 3)
    rig.store("short", 7)
    assert shop.take() == [("long", [1, 2]), ("short", [7])]
    for req_id in ("long", "short"):
        rig.finish(req_id)
    incomplete, *finished = shop.tier.take_outbox()
    assert incomplete == RequestIncomplete("long", keys(3))
    assert finished == [FinishRequest("long"), FinishRequest("short")]


def test_what_has_left_is_not_shed_and_the_equal_or_longer_loses_its_own_tail():
    shop = Shop(12, credit=3)
    shop.rig.new("a", 1, 2, 3)
    shop.rig.store("a", 1, 2)
    assert shop.take() == [("a", [1, 2])]  # sent
    shop.rig.new("b", 5)
    shop.rig.store("b", 5)
    shop.rig.new("c", 6)
    shop.rig.store("c", 6)
    assert shop.take() == [("b", [5])]
    shop.rig.manager.check_integrity()


def test_nothing_is_shed_for_a_tier_that_takes_nothing():
    shop = Shop(12, credit=100)
    shop.tier._max_outbox = 4
    for i, length in enumerate((3, 2)):
        shop.rig.new(f"r{i}", *range(10 * i, 10 * i + length))
        shop.rig.store(f"r{i}", *range(10 * i, 10 * i + length))
    shop.rig.new("x", 99)
    shop.rig.store("x", 99)  # the outbox is full
    assert shop.take() == [("r0", [0, 1, 2]), ("r1", [10, 11])]
    kinds = [type(m) for m in shop.tier.take_outbox()]
    assert AnnounceRequest not in kinds
    assert FinishRequest not in kinds


def test_a_tier_that_holds_all_pins_no_more_than_its_share():
    """The slow tier loses blocks, the fast one none, and the GPU goes on storing."""
    rig = Rig(8, 2, max_cascade_share=0.5)
    fast, slow = rig.tiers
    for i in range(20):
        rig.new(f"r{i}", 2 * i, 2 * i + 1)
        rig.store(f"r{i}", 2 * i, 2 * i + 1)
        rig.finish(f"r{i}")
        fast.answer()
        rig.advance()
        rig.step()
        assert sum(block.pins > 0 for block in rig.manager.table.blocks.values()) <= 4
    assert len(fast.have) == 40
    assert rig.counters.stores_refused == 0
    assert rig.counters.cascade_blocks_dropped == [0, 36]
    assert slow.said("store") == [["r0", 0, 1], ["r1", 2, 3]]
    rig.settle()
    rig.check_quiescent()
