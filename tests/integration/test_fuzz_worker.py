"""Garbage into the queue of a real worker: it counts, lives, and touches nothing else.

Every payload in the region is one of the patterns that the test put there, since
blocks move whole; nothing else is in a slot than what a seal writes.
"""

import time

import msgspec
from worker_kit import ENGINE_EPOCH, WORKER_EPOCH, WorkerRig

from shmoffload.testing.frames import FrameFuzzer, budget_s, seed
from shmoffload.testing.tier_tests import key_of
from shmoffload.wire.layout import HEADER_BYTES
from shmoffload.wire.messages import JobPart, decode_to_worker, encode_frame
from shmoffload.wire.session import TierWord

NUM_SLOTS, PROBES = 64, (62, 63)
EPOCHS = (ENGINE_EPOCH, WORKER_EPOCH)
WORKERS_WORDS = range(TierWord.HEARTBEAT_NS, TierWord.HITS)
PATTERN_BYTES = 64


def pattern(slot):
    return b"slot%04d" % slot * 8


def prepare(region):
    """Fill the slots; return all bytes before them, and of each its rest."""
    for slot in range(NUM_SLOTS):
        view = region.slot_view(slot)
        view[:] = pattern(slot) * (len(view) // PATTERN_BYTES)
        region.header_view(slot)[HEADER_BYTES:] = b"\xa5" * (4096 - HEADER_BYTES)
    return bytes(region._bytes[: region._slots_offset])


def faults(region, table):
    """What has changed that no job may change."""
    known = {bytes(pattern(s) * (region.block_bytes // 64)) for s in range(NUM_SLOTS)}
    if bytes(region._bytes[: region._slots_offset]) != table:
        yield "the slot table"
    for slot in range(NUM_SLOTS):
        if bytes(region.slot_view(slot)) not in known:
            yield f"payload of slot {slot}"
        rest = set(region.header_view(slot)[HEADER_BYTES:])
        if rest not in ({0xA5}, {0}):  # what we put there, what a seal puts there
            yield f"the page behind the header of slot {slot}"


def touches_probes(frame):
    """A job that is in order may write any slot; those of the probe are ours."""
    try:
        messages = decode_to_worker(frame)
    except msgspec.DecodeError:
        return False
    return any(
        slot.to_bytes(4, "little") in message.slots or message.job_id > 10**6
        for message in messages
        if isinstance(message, JobPart)
        for slot in PROBES
    )


def others_words(page):
    """All of the page but what this worker writes."""
    base = page.tier_base(0)
    ours = {base + word for word in WORKERS_WORDS}
    return [word for i, word in enumerate(page.words) if i not in ours]


def test_garbage_changes_counters_and_nothing_else(session_name):
    fuzzer = FrameFuzzer(seed())
    with WorkerRig(session_name, slots=NUM_SLOTS, type="memory") as rig:
        rig.ready()
        table, words = prepare(rig.region), others_words(rig.page)
        honest = JobPart(
            *EPOCHS, 1, True, "r", time.monotonic() + 60, [key_of(1)], b"\1\0\0\0", 0
        )
        before, num_sent = rig.word(TierWord.GARBAGE_FRAMES), 0
        rig.next_id = 10**6
        until = time.monotonic() + budget_s(6)
        while time.monotonic() < until:
            for _ in range(200):
                frame = fuzzer.any_of(
                    lambda: encode_frame([honest]),
                    lambda: fuzzer.to_worker(EPOCHS, NUM_SLOTS, time.monotonic()),
                )
                if frame and not touches_probes(frame):
                    rig.channel.send(frame)  # a full queue refuses it: as well
                    num_sent += 1
                rig.receive()
            rig.heard.clear()
            store, load = PROBES
            key = key_of(num_sent, "probe")
            rig.region.slot_view(store)[:] = rig.region.slot_view(num_sent % 60)
            assert rig.run([key], [store]) == ([], "")
            assert rig.run([key], [load], load=True) == ([], "")
            assert rig.region.slot_view(load) == rig.region.slot_view(store)
        assert rig.process.poll() is None
        assert num_sent > 500
        assert rig.word(TierWord.GARBAGE_FRAMES) - before > num_sent // 10
        assert list(faults(rig.region, table)) == []
        assert others_words(rig.page) == words
        rig.channel.close()
        assert rig.exit_code() == 0
