"""Garbage into a worker's decoder and executor, in process, beside guard slots.

The region here checks nothing: only what the intake lets pass decides which bytes
are touched. Slots before and after it are canaries.
"""

import time

import msgspec
from executor_kit import Rig

from shmoffload.core.types import GROUP_BYTES, MAX_KEY_BYTES
from shmoffload.testing.frames import FrameFuzzer, budget_s, seed
from shmoffload.testing.tier_tests import HeapRegion, key_of
from shmoffload.wire.messages import (
    Incomplete,
    JobPart,
    decode_to_worker,
    encode_frame,
)
from shmoffload.worker.intake import BadPartError, Intake
from shmoffload.worker.tiers.memory import MemoryTier

NUM_GUARDS, NUM_SLOTS = 8, 16
EPOCHS = (1, 2)
CANARY = 0xA5


class UncheckedRegion(HeapRegion):
    """Any slot number leads somewhere, like a pointer."""

    def __init__(self):
        super().__init__(NUM_SLOTS + 2 * NUM_GUARDS)
        self._view[:] = bytes([CANARY]) * len(self._view)
        self.num_slots = NUM_SLOTS

    def stride_view(self, slot):
        start = (slot + NUM_GUARDS) * self.stride
        return self._view[start : start + self.stride]

    def guards(self):
        size = NUM_GUARDS * self.stride
        return bytes(self._view[:size]) + bytes(self._view[-size:])


def honest(fuzzer):
    part = JobPart(
        *EPOCHS, 1, True, "r", time.monotonic() + 9, [key_of(1), key_of(2)], b"", 0
    )
    part = msgspec.structs.replace(part, slots=fuzzer.slots(2, NUM_SLOTS))
    return encode_frame([part, Incomplete("r", [key_of(3)])])


def jobs_of(intake, frame):
    """What the worker's main thread does with a frame."""
    try:
        messages = decode_to_worker(frame)
    except msgspec.DecodeError:
        return
    for message in messages:
        try:
            if isinstance(message, JobPart):
                yield intake.add(message)
            elif isinstance(message, Incomplete):
                intake.note(message)
        except BadPartError:
            continue


def test_nothing_outside_the_region_is_touched_whatever_comes():
    fuzzer = FrameFuzzer(seed())
    region = UncheckedRegion()
    guards = region.guards()
    intake = Intake(num_slots=NUM_SLOTS, engine_epoch=1, worker_epoch=2)
    num_run = num_refused = 0
    with Rig(MemoryTier(), region, threads=2) as rig:
        until = time.monotonic() + budget_s(3)
        while time.monotonic() < until:
            frame = fuzzer.any_of(
                lambda: honest(fuzzer),
                lambda: fuzzer.to_worker(EPOCHS, NUM_SLOTS, time.monotonic()),
            )
            for job in filter(None, jobs_of(intake, frame)):
                if job.error:
                    num_refused += 1
                    continue
                num_run += 1
                sizes = {len(key) for key in job.keys}
                assert all(GROUP_BYTES < size <= MAX_KEY_BYTES for size in sizes)
                while not rig.queues.put(job):
                    rig.receive()
            rig.receive()
            rig.heard.clear()
        assert region.guards() == guards
        rig.next_id = 10**6  # no id of the series
        region.fill(3, key_of(7))
        assert rig.run([key_of(7)], [3])[::2] == ([], "")
        assert rig.run([key_of(7)], [4], load=True) == ([], [], "")
        assert region.holds(4, key_of(7))
    assert min(num_run, num_refused) > 100
    assert region.guards() == guards
