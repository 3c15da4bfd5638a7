"""Events: bounded by keys, of the primary first, of each tier by its index."""

from manager_kit import ManualTier, key, keys, make_mailbox, numbers, reply

from shmoffload.core.events import MAX_KEYS_PER_EVENT, EventLog, OffloadingEvent
from shmoffload.core.interfaces import NullSink
from shmoffload.core.manager import TieringOffloadingManager
from shmoffload.core.tier_events import MAX_KEYS_PER_TAKE
from shmoffload.core.types import ReqContext, Residency, SlotState, TierDown, TierUp

A = ReqContext("a")


def told(source):
    return [
        (
            event.tier,
            "gone" if event.is_removed else "here",
            sorted(numbers(event.keys)),
        )
        for event in source.take_events()
    ]


def publish(log, *slots):
    for slot in slots:
        log.hand_out(slot, 1, key(slot), 64)
        log.publish(slot, 1)


def test_one_event_has_a_bounded_number_of_keys():
    log = EventLog(NullSink())
    publish(log, *range(2 * MAX_KEYS_PER_EVENT + 1))
    sizes = [len(event.keys) for event in log.take()]
    assert sizes == [MAX_KEYS_PER_EVENT, MAX_KEYS_PER_EVENT, 1]
    assert log.num_lost == 0


def test_what_nobody_takes_is_bounded_by_keys_and_the_oldest_goes():
    log = EventLog(NullSink(), max_keys=4)
    publish(log, 0, 1, 2, 3)
    log.set_state(0, 1, SlotState.FREE)
    assert log.num_lost == 4  # one event of one kind had them all
    publish(log, 5, 6)
    log.set_state(5, 1, SlotState.FREE)
    assert log.num_lost == 4
    log.set_state(6, 1, SlotState.FREE)
    assert log.num_lost == 5
    events = log.take()
    assert [(numbers(e.keys), e.is_removed) for e in events] == [
        ([5, 6], False),
        ([5, 6], True),
    ]
    publish(log, 7, 8, 9, 10)
    assert log.num_lost == 5  # a take makes room


def test_a_write_that_fails_again_and_again_counts_once():
    log = EventLog(NullSink(), max_keys=4)
    for _ in range(10):
        log.hand_out(1, 1, key(1), 64)
        log.set_state(1, 1, SlotState.FREE)
    assert log.take() == [OffloadingEvent(keys(1), True, metadata_only=True)]
    assert log.num_lost == 0


def test_a_failed_write_is_forgotten_when_its_key_is_written_again():
    log = EventLog(NullSink(), max_keys=4)
    for slot in (1, 2):
        log.hand_out(slot, 1, key(slot), 64)
        log.set_state(slot, 1, SlotState.FREE)
    log.hand_out(3, 1, key(1), 64)
    assert log.take() == [OffloadingEvent(keys(2), True, metadata_only=True)]
    publish(log, *range(4, 9))  # the bound is exact although a key was taken back
    assert log.num_lost == 5 - len([k for e in log.take() for k in e.keys])


def make(*tiers):
    manager = TieringOffloadingManager(4, tiers, block_bytes=64, events=True)
    manager.on_new_request(A)
    return manager


def store(manager, *of_keys):
    output = manager.prepare_store(keys(*of_keys), A)
    manager.complete_store(output.keys_to_store, A)


def mailbox():
    return make_mailbox(events=True)


def test_primary_first_then_tiers_by_index():
    first, second = mailbox(), mailbox()
    manager = make(first, second)
    store(manager, 1, 2)
    assert told(manager) == [(None, "here", [1, 2])]  # a tier has nothing yet
    for tier, failed in ((second, (0,)), (first, ())):
        job_id = next(iter(tier._open))
        tier.feed([reply(job_id, failed_idx=failed)])
    store(manager, 3)
    assert told(manager) == [
        (None, "here", [3]),
        (0, "here", [1, 2]),
        (1, "here", [2]),
    ]
    assert told(manager) == []


def test_what_a_tier_pushes_out_or_cannot_read_is_gone():
    tier = mailbox()
    tier.feed([Residency(1, added=keys(1, 2, 3))])
    assert told(tier) == [(None, "here", [1, 2, 3])]
    manager = make(tier)
    store(manager, 4)
    tier.feed([reply(next(iter(tier._open)), removed=keys(1))])
    assert told(manager) == [(None, "here", [4]), (0, "gone", [1]), (0, "here", [4])]
    manager.lookup(key(2), A)
    manager.on_schedule_end(None)
    tier.feed([reply(next(iter(tier._open)), failed_idx=(0,))])
    manager.advance(1.0)
    assert told(manager)[-1] == (0, "gone", [2])
    tier.feed([Residency(1, removed=keys(3))])
    assert told(manager) == [(0, "gone", [3])]


def test_a_tier_that_dies_has_nothing_and_comes_back_with_its_index():
    tier = mailbox()
    tier.feed([Residency(1, added=keys(1, 2))])
    manager = make(tier)
    assert told(manager) == [(0, "here", [1, 2])]
    tier.feed([TierDown(1, dead=False)])
    assert told(manager) == [(0, "gone", [1, 2])]
    tier.feed([TierDown(1, dead=True), Residency(2, added=keys(2, 3))])
    assert told(manager) == []  # not up: it answers MISS
    tier.feed([TierUp(2)])
    assert told(manager) == [(0, "here", [2, 3])]


def test_a_worker_that_comes_back_unnoticed_tells_the_difference():
    tier = mailbox()
    tier.feed([Residency(1, added=keys(1, 2))])
    assert told(tier) == [(None, "here", [1, 2])]
    tier.feed([TierDown(1, dead=True), Residency(2, added=keys(2, 3)), TierUp(2)])
    assert told(tier) == [(None, "gone", [1]), (None, "here", [3])]


def test_a_reset_forgets_the_primary_and_tells_the_tiers_anew():
    tier = mailbox()
    tier.feed([Residency(1, added=keys(1, 2))])
    manager = make(tier)
    store(manager, 4)
    assert told(manager) == [(None, "here", [4]), (0, "here", [1, 2])]
    store(manager, 5)
    tier.feed([Residency(1, removed=keys(1))])
    manager.reset_cache()
    assert told(manager) == [(0, "here", [2])]


def test_a_large_index_comes_in_pieces():
    tier = mailbox()
    index = keys(*range(MAX_KEYS_PER_TAKE + 5))
    tier.feed([Residency(1, added=index)])
    sizes = [len(event.keys) for _ in range(3) for event in tier.take_events()]
    assert sizes == [MAX_KEYS_PER_TAKE, 5]


def test_a_tier_that_raises_is_counted_and_the_others_are_heard():
    class Raising(ManualTier):
        def take_events(self):
            raise OSError("broken")

        on_mirrors_cleared = take_events

    good = mailbox()
    good.feed([Residency(1, added=keys(1))])
    manager = make(Raising(), good)
    assert told(manager) == [(1, "here", [1])]
    manager.reset_cache()
    assert told(manager) == [(1, "here", [1])]
    assert manager.counters.tier_errors == 3


def test_without_events_nothing_is_kept():
    tier = make_mailbox()
    manager = TieringOffloadingManager(4, [tier], block_bytes=64)
    tier.feed([Residency(1, added=keys(1))])
    manager.reset_cache()
    assert list(manager.take_events()) == list(tier.take_events()) == []
    assert tier._log is None
