"""The soak's plan, its requests, the lanes that try faults; no process is harmed."""

import random
from collections import Counter

import pytest

from shmoffload.replay.generate import MultiTurn
from shmoffload.testing.soak import lane as lane_module
from shmoffload.testing.soak.lane import Lane
from shmoffload.testing.soak.plan import LIVE, SECOND, Deck, Fault, Stage, faults_of
from shmoffload.testing.soak.strikes import strike_of
from shmoffload.testing.soak.target import Gate, TryLaterError
from shmoffload.testing.soak.workload import make_piece, make_trace

LOAD = Fault("call slow", Stage.LOAD)
STORE = Fault("call slow", Stage.STORE)
SHAPE = MultiTurn(num_conversations=6, num_turns=3, spread_s=0.5)


def draw(deck, count):
    return [deck.draw() for _ in range(count)]


def test_the_seed_alone_decides_the_order():
    faults = faults_of(LIVE)
    one, same, other = (Deck(faults, seed) for seed in ("1", "1", "2"))
    assert draw(one, 200) == draw(same, 200)
    assert draw(one, 60) != draw(other, 60)


def test_every_fault_comes_once_in_each_round():
    faults = faults_of(LIVE)
    deck = Deck(faults, "1")
    for _ in range(3):
        assert Counter(draw(deck, len(faults))) == Counter(faults)


def test_two_decks_half_a_round_apart_try_all_in_half_a_round():
    faults = faults_of(LIVE)
    half = -(-len(faults) // 2)
    tried = draw(Deck(faults, "1"), half) + draw(Deck(faults, "1", offset=0.5), half)
    assert set(tried) == set(faults)


def test_what_is_put_back_comes_soon():
    deck = Deck(faults_of(LIVE), "1")
    fault = deck.draw()
    deck.put_back(fault)
    assert fault in draw(deck, 3)
    single = Deck([LOAD], "1")
    single.put_back(single.draw())
    assert single.draw() == LOAD


def test_kinds_can_be_chosen():
    assert faults_of(LIVE, ["call slow"]) == [LOAD, STORE]
    assert not Deck(faults_of(SECOND, ["call slow"]), "1")


@pytest.mark.parametrize("fault", faults_of(LIVE), ids=str)
def test_every_live_fault_can_be_begun(fault):
    strike_of(target=None, fault=fault).close()


def test_pieces_are_alike_but_for_their_new_blocks():
    trace = make_trace(SHAPE)
    one, two = make_piece(trace, 1), make_piece(trace, 2)
    for first, second in zip(one.requests, two.requests, strict=True):
        assert first.arrival_s == second.arrival_s
        assert first.num_input_tokens == second.num_input_tokens
        assert first.req_id != second.req_id
    blocks = [{h for r in piece.requests for h in r.hashes} for piece in (one, two)]
    assert blocks[0] & blocks[1] == trace.known
    assert 0 < len(trace.known) < one.num_distinct == two.num_distinct
    assert one.attainable_hits() == two.attainable_hits()


# Lanes --------------------------------------------------------------------------------


def script(*words):
    """A fault that yields so; an exception among the words is raised."""

    def make(_):
        for word in words:
            if isinstance(word, BaseException):
                raise word
            yield word

    return make


def turn(lane, times, *, may_begin=True):
    for _ in range(times):
        lane.turn(may_begin=may_begin)


def test_a_fault_counts_when_it_strikes_and_ends_when_all_is_well():
    lane = Lane(Deck([LOAD], "1"), script(False, True, False))
    turn(lane, 2)
    assert not lane.struck
    turn(lane, 1)
    assert lane.struck == {LOAD: 1}
    assert not lane.is_idle
    turn(lane, 2, may_begin=False)
    assert lane.is_idle
    turn(lane, 5, may_begin=False)
    assert lane.is_idle
    assert not lane.missed


def test_a_fault_that_finds_no_open_job_is_tried_again(monkeypatch):
    monkeypatch.setattr(lane_module, "PATIENCE_S", -1)
    lane = Lane(Deck([LOAD], "1"), script(False, False, True))
    turn(lane, 2)
    assert lane.is_idle
    assert lane.missed == {LOAD: 1}
    assert not lane.struck
    assert not lane.problems


def test_a_target_that_went_away_is_tried_again():
    lane = Lane(Deck([LOAD], "1"), script(False, TryLaterError()))
    turn(lane, 3)
    assert lane.is_idle
    assert lane.missed == {LOAD: 1}


def test_a_target_that_does_not_recover_is_a_problem(monkeypatch):
    monkeypatch.setattr(lane_module, "RECOVERY_S", -1)
    lane = Lane(Deck([LOAD], "1"), script(True, False))
    turn(lane, 2)
    assert lane.struck == {LOAD: 1}
    assert lane.problems == ["call slow, mid-load: not well again after -1 s"]


def test_waiting_is_given_up_but_recovery_is_not():
    waiting = Lane(Deck([LOAD], "1"), script(False, False))
    turn(waiting, 1)
    waiting.give_up_waiting()
    assert waiting.is_idle
    struck = Lane(Deck([LOAD], "1"), script(True, False))
    turn(struck, 2)
    struck.give_up_waiting()
    assert not struck.is_idle


def test_a_fault_that_is_closed_takes_its_orders_back():
    undone = []

    def make(_):
        try:
            yield False
        finally:
            undone.append(True)

    lane = Lane(Deck([LOAD], "1"), make)
    turn(lane, 2)
    lane.close()
    lane.close()
    assert undone == [True]


def test_lanes_respect_who_strikes_alone():
    gate = Gate()
    assert gate.enter(0)
    assert gate.enter(1)
    assert not gate.ask_alone(0)  # 1 is still busy
    with pytest.raises(TryLaterError):
        gate.ask_alone(1)  # else both would wait for each other
    gate.leave(1)
    assert not gate.enter(1)
    assert gate.ask_alone(0)
    gate.leave(0)
    assert gate.enter(1)


def test_any_order_of_lanes_ends(monkeypatch):
    """Random turns of three lanes that all want to be alone now and then."""
    monkeypatch.setattr(lane_module, "PATIENCE_S", 1e9)
    rng = random.Random(1)
    gate = Gate()
    struck_alone = []

    def make(idx):
        def begin(fault):
            while fault is STORE and not gate.ask_alone(idx):
                yield False
            struck_alone.append(fault is STORE)
            yield True

        return begin

    lanes = [
        Lane(
            Deck([LOAD, STORE], str(idx)),
            make(idx),
            enter=lambda idx=idx: gate.enter(idx),
            leave=lambda idx=idx: gate.leave(idx),
        )
        for idx in range(3)
    ]
    for _ in range(20_000):
        rng.choice(lanes).turn(may_begin=True)
    for _ in range(10):
        for lane in lanes:
            lane.turn(may_begin=False)
    assert all(lane.is_idle for lane in lanes)
    assert all(lane.struck[LOAD] > 100 for lane in lanes)
    assert struck_alone.count(True) > 300
