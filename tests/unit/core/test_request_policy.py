"""A request's own words: what is read, what is obeyed, what never hurts."""

import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manager_kit import HIT, MISS, PENDING, ManualTier, Rig, key, keys, numbers

from shmoffload.core.request_policy import (
    DEFAULT_POLICY,
    MAX_TTL_S,
    RequestPolicy,
    TierMatcher,
    Verdict,
)
from shmoffload.core.types import OffloadPolicy, TierTraits
from shmoffload.engine.trace import RequestTrace

BLOCK, REQUEST = OffloadPolicy.BLOCK_LEVEL, OffloadPolicy.REQUEST_LEVEL


def parse(params):
    policy, notes = RequestPolicy.parse(params)
    return policy, {note.key: note for note in notes}


def ours(**words):
    return {"shmoffload": words}


# Reading ----------------------------------------------------------------------


def test_all_words_are_read():
    policy, notes = parse(
        {
            "max_offload_tokens": 12,
            "max_load_tokens": 0,
            "kv_load_tiers": [{"medium": "storage"}, {"locality": "LOCAL"}],
            "remote_host": "not ours",
            **ours(
                store_tiers=["a"],
                load_tiers=[],
                policy={"a": "request_level", "*": "block_level"},
                ttl_s=60,
                pin=True,
                priority=2,
                tenant="x",
            ),
        }
    )
    assert policy == RequestPolicy(
        max_offload_tokens=12,
        max_load_tokens=0,
        kv_load_tiers=(TierMatcher("STORAGE"), TierMatcher(None, "LOCAL")),
        store_tiers=frozenset({"a"}),
        load_tiers=frozenset(),
        levels={"a": REQUEST, "*": BLOCK},
        ttl_s=60.0,
        pin=True,
        priority=2,
        tenant="x",
    )
    assert len(notes) == 10
    assert {note.verdict for note in notes.values()} == {Verdict.ACCEPTED}
    assert policy.level_for("a") is REQUEST
    assert policy.level_for("b") is BLOCK


BAD = [
    *[("max_offload_tokens", value) for value in (True, -1, "12", 1.5, [])],
    *[("max_load_tokens", value) for value in (False, -1, "12", 1.5)],
    *[("kv_load_tiers", value) for value in ("x", {}, [{"medium": "TAPE"}], [7])],
    *[("store_tiers", value) for value in ("slab", [1], {"slab": 1})],
    *[("load_tiers", value) for value in (True, [None])],
    *[("policy", value) for value in ("all", {"a": "x"}, {1: "block_level"}, 3, [])],
    *[("ttl_s", value) for value in (0, -1, "5", True, math.nan)],
    *[("pin", value) for value in (1, "yes", [])],
    *[("priority", value) for value in (True, "high", 1.0)],
    *[("tenant", value) for value in ("", 3, "x" * 65)],
]


@pytest.mark.parametrize(("word", "value"), BAD)
def test_a_bad_value_is_ignored_and_noted(word, value):
    is_vllms = word.startswith(("max_", "kv_"))
    params = {word: value} if is_vllms else ours(**{word: value})
    policy, notes = parse({**params})
    assert policy == DEFAULT_POLICY
    (note,) = notes.values()
    assert note.key == (word if is_vllms else f"shmoffload.{word}")
    assert note.verdict is Verdict.REJECTED
    assert note.why


def test_values_out_of_bounds_are_clipped():
    policy, notes = parse(ours(ttl_s=math.inf, priority=99))
    assert (policy.ttl_s, policy.priority) == (MAX_TTL_S, 3)
    assert parse(ours(priority=-5))[0].priority == 0
    assert {note.verdict for note in notes.values()} == {Verdict.CLIPPED}
    policy, notes = parse({"kv_load_tiers": [{"medium": "CPU"}, {"medium": "TAPE"}]})
    assert policy.kv_load_tiers == (TierMatcher("CPU"),)
    assert notes["kv_load_tiers"].verdict is Verdict.CLIPPED


def test_an_unknown_word_of_ours_is_named_and_others_are_left_alone():
    _, notes = parse(ours(priorty=3))
    assert notes["shmoffload"].verdict is Verdict.REJECTED
    assert "'priorty'" in notes["shmoffload"].why
    assert "priority" in notes["shmoffload"].why
    assert parse({"remote_block_ids": [1], "do_remote_decode": True})[1] == {}


WORDS = ["max_offload_tokens", "kv_load_tiers", "shmoffload", "policy", "store_tiers"]
WORDS += ["load_tiers", "ttl_s", "pin", "priority", "tenant", "medium", "locality"]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=3), inner)
    ),
    max_leaves=12,
)


@given(ANYTHING)
def test_nothing_that_a_request_says_can_raise(params):
    """Whatever it is, the request is announced, stored and found as ever."""
    rig = Rig(4, 2)
    rig.new("a", 1, 2, params=params)
    answer = rig.manager.request_answer("a")
    notes = answer.notes.values()
    assert all(note.why or note.verdict is Verdict.ACCEPTED for note in notes)
    rig.store("a", 1, 2)
    assert rig.look("a", 1, 2) == [HIT, HIT]
    rig.finish("a")
    rig.settle()
    rig.check_quiescent()


def test_a_huge_number_can_be_shown():
    _, notes = parse(ours(pin=10**5000))
    assert "huge" in notes["shmoffload.pin"].why


# Tiers ------------------------------------------------------------------------


def test_store_tiers_and_load_tiers_restrict_and_the_primary_is_always_searched():
    rig = Rig(6, 2)
    rig.new("a", 1, params=ours(store_tiers=["t1"]))
    rig.store("a", 1)
    assert [tier.said("store") for tier in rig.tiers] == [[], [["a", 1]]]
    for tier in rig.tiers:
        tier.have.update(keys(8, 9))
    rig.new("b", 8, params=ours(load_tiers=["t1"]))
    assert rig.look("b", 8, 1) == [PENDING, HIT]
    rig.step()
    assert [tier.said("load") for tier in rig.tiers] == [[], [["b", 8]]]
    rig.new("c", 9, params=ours(load_tiers=[]))
    assert rig.look("c", 9, 1) == [MISS, HIT]


def test_both_words_about_loads_have_to_allow_a_tier():
    traits = [TierTraits(medium="CPU"), TierTraits(medium="STORAGE")]
    rig = Rig(4, 2, traits=traits)
    rig.tiers[0].have.add(key(1))
    rig.tiers[1].have.add(key(1))
    for i, (medium, answer) in enumerate((("STORAGE", MISS), ("CPU", PENDING))):
        params = {"kv_load_tiers": [{"medium": medium}], **ours(load_tiers=["t0"])}
        rig.new(f"r{i}", 1, params=params)
        assert rig.look(f"r{i}", 1) == [answer]


def test_unknown_tiers_are_noted_and_a_word_of_unknown_ones_only_is_ignored():
    rig = Rig(4, 2)
    words = ours(store_tiers=["t1", "tape"], load_tiers=["tape"], policy={"x": "x"})
    rig.new("a", 1, params=words)
    notes = rig.manager.request_answer("a").notes
    assert notes["shmoffload.store_tiers"].verdict is Verdict.CLIPPED
    assert "there are: t0, t1" in notes["shmoffload.store_tiers"].why
    assert notes["shmoffload.load_tiers"].verdict is Verdict.REJECTED
    rig.tiers[0].have.add(key(1))
    assert rig.look("a", 1) == [PENDING]


@pytest.mark.parametrize(
    ("code", "configured", "said", "effective"),
    [
        (BLOCK, None, None, BLOCK),
        (REQUEST, None, None, REQUEST),
        (BLOCK, REQUEST, None, REQUEST),
        (REQUEST, BLOCK, None, BLOCK),
        (BLOCK, BLOCK, "request_level", REQUEST),
        (REQUEST, REQUEST, "block_level", BLOCK),
        (BLOCK, REQUEST, {"other": "block_level"}, REQUEST),
        (BLOCK, REQUEST, {"t": "block_level", "*": "request_level"}, BLOCK),
    ],
)
def test_the_request_counts_before_the_configuration_before_the_code(
    code, configured, said, effective
):
    tier = ManualTier("t", code)
    rig = Rig(4, tiers=[tier], traits=[TierTraits(level=configured)])
    params = None if said is None else ours(policy=said)
    assert rig.new("a", 1, params=params) is effective
    assert (rig.manager._request_level_tiers == {"a": [tier]}) == (effective is REQUEST)


def test_a_queued_promotion_is_not_handed_to_a_request_that_forbids_its_tier():
    rig = Rig(4)
    rig.tiers[0].have.add(key(1))
    rig.new("a", 1)
    rig.new("b", 1, params=ours(load_tiers=[]))
    assert rig.look("a", 1) == rig.look("b", 1) == [PENDING]
    rig.finish("a")
    rig.step()
    assert rig.tiers[0].said("load") == []


# The answer -------------------------------------------------------------------


def test_the_answer_lives_as_long_as_the_request_has_work():
    rig = Rig(4)
    rig.new("a", 1, params=ours(priority=7))
    rig.new("plain", 2)
    assert rig.manager.request_answer("plain").notes == {}
    assert rig.manager.request_answer("nobody") is None
    granted = rig.offer("a", 1)
    rig.finish("a")
    assert rig.manager.request_answer("a").policy.priority == 3
    rig.stored("a", *numbers(granted.keys_to_store))
    assert rig.manager.request_answer("a") is None


def test_the_log_warns_once_per_kind_and_traces_every_answer(caplog):
    caplog.set_level(logging.DEBUG, logger="shmoffload")
    log, rig = RequestTrace(), Rig(4)
    for i in range(3):
        rig.new(f"r{i}", i, params=ours(pin="yes", priority=i + 2))
        log.note(f"r{i}", rig.manager.request_answer(f"r{i}"))
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warned) == 2
    assert "shmoffload.pin was rejected ('yes': give true or false)" in warned[0]
    assert "shmoffload.priority was clipped (0 to 3)" in warned[1]
    traced = [r.getMessage() for r in caplog.records if r.name == "shmoffload.trace"]
    assert len(traced) == 3
    assert traced[0].endswith("shmoffload.priority accepted")
    assert traced[2].startswith("request r2: shmoffload.pin rejected (")


def test_tenants_are_counted_and_bounded():
    rig = Rig(8)
    rig.new("a", 1, 2, params=ours(tenant="x"))
    rig.store("a", 1, 2)
    rig.new("b", 1, params=ours(tenant="y"))
    assert rig.look("b", 1) == [HIT]
    rig.load("b", 1)
    x, y = rig.counters.tenants["x"], rig.counters.tenants["y"]
    assert (x.requests, x.stores_prepared, x.loads) == (1, 2, 0)
    assert (y.requests, y.stores_prepared, y.loads) == (1, 0, 1)
    for i in range(100):
        rig.new(f"r{i}", params=ours(tenant=f"tenant-{i}"))
    assert len(rig.counters.tenants) == 65
    assert rig.counters.tenants["other"].requests == 38
