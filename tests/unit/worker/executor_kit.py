"""Queues, threads and the engine's end around one tier, in one process."""

import array
import contextlib

from shmoffload.testing.poll import wait_until
from shmoffload.testing.tier_tests import deadline
from shmoffload.wire.channel import ChannelClosedError, channel_pair
from shmoffload.wire.config import TierConfig
from shmoffload.wire.messages import JobDone, decode_from_worker
from shmoffload.worker.executor import Executor
from shmoffload.worker.intake import Job
from shmoffload.worker.jobs import JobQueues
from shmoffload.worker.replies import Counters, Replies
from shmoffload.worker.seal import Sealer

TIMEOUT_S = 30


class HeapPage:
    """The words of one tier, in anonymous memory."""

    def __init__(self):
        self.words = memoryview(bytearray(1024)).cast("Q")

    def tier_base(self, tier_idx):
        return 0

    def set_tier_error(self, tier_idx, text):
        self.error = text


class Rig:
    """Queues, threads and the engine's end around one tier."""

    def __init__(
        self, tier, region, *, threads=1, max_blocks=16, path=None, sealer=None
    ):
        self.region = region
        self.sealer = sealer or Sealer(region)
        self.tier = tier
        self.config = TierConfig(
            type="any",
            name="t",
            path=path and str(path),
            max_bytes=max_blocks * region.stride,
            min_free=0,
        )
        tier.open(self.config, self.sealer.region, self.sealer.region.namespace)
        self.engine, worker = channel_pair()
        self.page = HeapPage()
        counters = Counters(self.page, 0)
        self.replies = Replies(worker, counters, epochs=(1, 2))
        self.queues = JobQueues()
        self.executor = Executor(
            tier, region, self.queues, self.replies, counters, self.sealer
        )
        self.worker = worker
        self.threads = threads
        self.next_id = 0
        self.heard = []

    def __enter__(self):
        self.executor.start(num_load_threads=self.threads)
        return self

    def __exit__(self, *_):
        self.queues.stop(abandon=True)
        assert self.executor.join(timeout_s=TIMEOUT_S)
        self.tier.close()
        self.engine.close()
        self.worker.close()

    def job(self, keys, slots, *, load=False, deadline_s=None):
        self.next_id += 1
        due = deadline() if deadline_s is None else deadline_s
        return Job(self.next_id, load, due, list(keys), list(slots), len(keys))

    def submit(self, *args, **kwargs):
        job = self.job(*args, **kwargs)
        assert self.queues.put(job)
        return job.job_id

    def receive(self):
        with contextlib.suppress(ChannelClosedError):
            while frame := self.engine.receive():
                self.heard += decode_from_worker(frame)
        return self.heard

    def answer(self, job_id):
        def find():
            done = [m for m in self.receive() if isinstance(m, JobDone)]
            return [m for m in done if m.job_id == job_id]

        found = wait_until(find, timeout_s=TIMEOUT_S, what=f"the answer to {job_id}")
        assert len(found) == 1
        return found[0]

    def run(self, keys, slots, **kwargs):
        """Run one job; return failed positions, removed keys, error."""
        done = self.answer(self.submit(keys, slots, **kwargs))
        return list(array.array("i", done.failed_idx)), done.removed, done.error

    def fill(self, keys, slots=None):
        for slot, key in zip(slots or range(len(keys)), keys, strict=False):
            self.region.fill(slot, key)
            self.region.header_view(slot)[:] = b"\0" * len(
                self.region.header_view(slot)
            )

    def word(self, word):
        return self.page.words[word]

    def wait_for(self, word, value):
        """Wait for a word that changes after its datagram was sent."""
        wait_until(
            lambda: self.word(word) == value, timeout_s=TIMEOUT_S, what=word.name
        )
