"""An engine in one process: the real core, a dictionary as a tier."""

from types import SimpleNamespace

from shmoffload.core.interfaces import OffloadingManager, SecondaryTierManager
from shmoffload.core.manager import TieringOffloadingManager
from shmoffload.core.types import JobResult, LookupResult, RequestOffloadingContext
from shmoffload.wire.session import TierWord


class DictTier(SecondaryTierManager):
    """Copies at submission, answers when asked next."""

    def __init__(self, name):
        super().__init__(name)
        self.blocks = {}
        self.slot_view = None
        self.done = []
        self.words = dict.fromkeys(TierWord, 0)

    def on_new_request(self, ctx):
        return RequestOffloadingContext()

    def lookup(self, key, ctx):
        return LookupResult.HIT if key in self.blocks else LookupResult.MISS

    def submit_store(self, job):
        for key, slot in zip(job.keys, job.slots.tolist(), strict=True):
            if key not in self.blocks:
                self.blocks[key] = bytes(self.slot_view(slot))
                self.words[TierWord.BLOCKS_WRITTEN] += 1
        self.done.append(JobResult(job.job_id, True))

    def submit_load(self, job):
        for key, slot in zip(job.keys, job.slots.tolist(), strict=True):
            self.slot_view(slot)[:] = self.blocks[key]
            self.words[TierWord.BYTES_READ] += len(self.blocks[key])
        self.done.append(JobResult(job.job_id, True))

    def get_finished_jobs(self):
        done, self.done = self.done, []
        return done


class FakeEngine(OffloadingManager):
    """As much of ``Engine`` as a replay uses."""

    def __init__(self, *, slots, block_bytes=64, tiers=("dict",)):
        self.region = bytearray(slots * block_bytes)
        self.tiers = [DictTier(name) for name in tiers]
        for tier in self.tiers:
            tier.slot_view = self.slot_view
        self.config = SimpleNamespace(
            block_bytes=block_bytes, tier=[SimpleNamespace(name=n) for n in tiers]
        )
        self.page = SimpleNamespace(
            num_tiers=len(tiers), get_tier=lambda i, word: self.tiers[i].words[word]
        )
        self.manager = TieringOffloadingManager(
            slots, self.tiers, block_bytes=block_bytes
        )
        self.is_broken = False
        self.now_s = 0.0

    def slot_view(self, slot):
        size = self.config.block_bytes
        return memoryview(self.region)[slot * size : (slot + 1) * size]

    def step_begin(self):
        self.now_s += 0.005
        self.manager.advance(self.now_s)

    def wait_idle(self, timeout_s):
        self.step_begin()
        return True

    def on_new_request(self, ctx):
        return self.manager.on_new_request(ctx)

    def lookup(self, key, ctx):
        return self.manager.lookup(key, ctx)

    def prepare_load(self, keys, ctx):
        return self.manager.prepare_load(keys, ctx)

    def complete_load(self, keys, ctx):
        self.manager.complete_load(keys, ctx)

    def prepare_store(self, keys, ctx):
        return self.manager.prepare_store(keys, ctx)

    def complete_store(self, keys, ctx, success=True):
        self.manager.complete_store(keys, ctx, success)

    def on_request_finished(self, ctx):
        self.manager.on_request_finished(ctx)

    def on_schedule_end(self, ctx):
        self.manager.on_schedule_end(ctx)

    def has_pending_work(self):
        return self.manager.has_pending_work()
