"""Garbage into the engine's end of a queue: each job is answered once, or not yet."""

import os
import time

import numpy as np

from shmoffload.core.mailbox import MailboxTier
from shmoffload.core.types import (
    GROUP_BYTES,
    MAX_KEY_BYTES,
    JobMetadata,
    OffloadPolicy,
    ReqContext,
    Residency,
    TierDown,
    TierUp,
)
from shmoffload.engine.tier_link import TierLink
from shmoffload.testing.frames import FrameFuzzer, budget_s, seed
from shmoffload.testing.tier_tests import key_of
from shmoffload.wire.channel import channel_pair
from shmoffload.wire.messages import Hello, JobDone, Resident, encode_frame

EPOCHS = (1, 3)
NUM_JOBS, NUM_KEYS = 200, 4


def tier_with_jobs():
    """A tier that is up, with jobs that nobody has answered."""
    tier = MailboxTier(
        "t",
        policy=OffloadPolicy.BLOCK_LEVEL,
        credit_bytes=1 << 40,
        block_bytes=1,
        engine_epoch=EPOCHS[0],
        max_outbox=10 * NUM_JOBS,
    )
    tier.feed([Residency(EPOCHS[1], added=[], removed=[]), TierUp(EPOCHS[1], 0)])
    for job_id in range(NUM_JOBS):
        keys = [key_of(job_id * NUM_KEYS + i) for i in range(NUM_KEYS)]
        slots = np.arange(NUM_KEYS, dtype=np.int32)
        job = JobMetadata(job_id, keys, slots, job_id % 2 == 0, ReqContext("r"))
        (tier.submit_load if job.is_promotion else tier.submit_store)(job)
    return tier


def honest(fuzzer):
    job_id = fuzzer.rng.randrange(NUM_JOBS)
    return encode_frame(
        [
            JobDone(*EPOCHS, job_id, b"\1\0\0\0", [key_of(job_id)], "failed"),
            Resident(EPOCHS[1], [key_of(0)]),
            Hello(EPOCHS[1], limits="10 blocks"),
        ]
    )


def test_every_job_is_answered_once_whatever_comes():
    fuzzer = FrameFuzzer(seed())
    tier = tier_with_jobs()
    link = TierLink(engine_epoch=EPOCHS[0])
    ours, theirs = channel_pair()
    link.connect(ours, os.pidfd_open(os.getpid()), worker_epoch=EPOCHS[1])
    answered = {}
    until = time.monotonic() + budget_s(3)
    num_sent = 0
    while time.monotonic() < until:
        for _ in range(50):
            frame = fuzzer.any_of(
                lambda: honest(fuzzer),
                lambda: fuzzer.from_worker(EPOCHS, range(NUM_JOBS)),
            )
            num_sent += theirs.send(frame)
        for item in (inputs := link.receive()):
            assert not isinstance(item, TierDown), "a living worker is not down"
            for key in [*getattr(item, "added", ()), *getattr(item, "removed", ())]:
                assert GROUP_BYTES < len(key) <= MAX_KEY_BYTES
        tier.feed(inputs)
        assert tier.is_up
        assert tier.worker_epoch == EPOCHS[1]
        for result in tier.get_finished_jobs():
            assert result.job_id not in answered, "answered twice"
            answered[result.job_id] = result
    assert link.garbage_frames > num_sent // 10
    assert min(tier.late_replies, tier.bad_replies, len(answered)) > 0
    # What is still open fails with the proven death, and nothing is counted twice.
    tier.feed([TierDown(EPOCHS[1], dead=True)])
    for result in tier.get_finished_jobs():
        assert result.job_id not in answered
        answered[result.job_id] = result
    assert sorted(answered) == list(range(NUM_JOBS))
    counts = (tier.num_open_loads, tier.open_load_blocks, tier.open_store_bytes)
    assert counts == (0, 0, 0)
    link.close()
    theirs.close()


def test_a_worker_that_talks_without_end_does_not_hold_a_step():
    link = TierLink(engine_epoch=EPOCHS[0])
    ours, theirs = channel_pair()

    class Endless:
        """Its peer has always written the next frame."""

        num = 0

        def receive(self):
            self.num += 1
            assert self.num < 100_000
            return encode_frame([Resident(EPOCHS[1], [key_of(1)])])

        def close(self):
            ours.close()

    link.connect(Endless(), os.pidfd_open(os.getpid()), worker_epoch=EPOCHS[1])
    assert 0 < len(link.receive()) < 10_000
    link.close()
    theirs.close()


def test_a_cut_list_of_failures_is_no_success():
    """Three bytes of a position once read as "nothing failed"."""
    tier = tier_with_jobs()
    link = TierLink(engine_epoch=EPOCHS[0])
    ours, theirs = channel_pair()
    link.connect(ours, os.pidfd_open(os.getpid()), worker_epoch=EPOCHS[1])
    theirs.send(encode_frame([JobDone(*EPOCHS, 0, b"\0\0\0")]))
    tier.feed(link.receive())
    (result,) = tier.get_finished_jobs()
    assert (result.success, result.successful_keys) == (False, [])
    link.close()
    theirs.close()
