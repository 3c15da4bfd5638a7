"""vLLM's own tiering manager over ``ShmTier``, without a server or a GPU.

Covers: a primary in plain memory, playing the scheduler, bytes that tell their key, a
tier that notes which jobs it was given and which it has answered.
Does not cover: a real server (``cpu_tiering_spec``), the cases (``test_shm_tier``).
Who calls it: tests of ``ShmTier``.
"""

import contextlib
import hashlib
import importlib
import os
import warnings
from collections import Counter
from types import SimpleNamespace

from shmoffload.core.types import make_offload_key
from shmoffload.testing.poll import wait_until
from shmoffload.wire.session import TierWord

ROW_BYTES = 16 * 1024
WAIT_S = 45.0


def _load():
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SimpleNamespace(
            base=importlib.import_module("vllm.v1.kv_offload.base"),
            config=importlib.import_module("vllm.v1.kv_offload.config"),
            tiering=importlib.import_module("vllm.v1.kv_offload.tiering.manager"),
            factory=importlib.import_module("vllm.v1.kv_offload.tiering.factory"),
            tier=importlib.import_module("shmoffload.vllm.tier"),
        )


VLLM = _load()
HIT = VLLM.base.LookupResult.HIT
MISS = VLLM.base.LookupResult.MISS
STEP = VLLM.base.ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


def keys_of(start, count):
    return [
        make_offload_key(hashlib.sha256(b"%d" % i).digest())
        for i in range(start, start + count)
    ]


def bytes_of(key):
    return hashlib.shake_128(key).digest(ROW_BYTES)


def offloading_config(**changes):
    """vLLM's configuration of a server with one GPU and a model without files."""
    config = VLLM.config
    parts = {
        "groups": (config.OffloadingGroupConfig(32, ("layer.0", "layer.1"), 0),),
        "worker_kv_bytes_per_block": ROW_BYTES,
        "enable_kv_cache_events": False,
        "extra_config": {},
        "engine_id": "shm-tier-tests",
        "model": config.OffloadingModelConfig("/nowhere/a-model", "float32"),
        "cache": config.OffloadingCacheConfig(32, 1),
        "parallel": config.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        "kv_cache_layout": "LBHNC",
    }
    return config.OffloadingConfig(**parts | changes)


class PlainRegion:
    """vLLM's shared region, in the memory of this process."""

    def __init__(self, num_rows):
        self._memory = bytearray(num_rows * ROW_BYTES)
        self._view = memoryview(self._memory).cast("B", (num_rows, ROW_BYTES))

    def create_kv_memoryview(self):
        return self._view

    def cleanup(self):
        self._memory.clear()  # raises while anybody holds a view


def noting(tier):
    """Note the jobs that ``tier`` is given and those that it answers."""
    tier.given, tier.answered = {}, Counter()
    store, load, take = tier.submit_store, tier.submit_load, tier.get_finished_jobs

    def submit_store(job):
        tier.given[job.job_id] = "store"
        store(job)

    def submit_load(job):
        tier.given[job.job_id] = "load"
        load(job)

    def get_finished_jobs():
        results = list(take())
        tier.answered.update(result.job_id for result in results)
        tier.results += results
        return results

    tier.results = []
    tier.submit_store, tier.submit_load = submit_store, submit_load
    tier.get_finished_jobs = get_finished_jobs
    return tier


class Server:
    """vLLM's manager with one ``ShmTier``, and the scheduler around it.

    Args:
        session: name of the tier's session.
        num_rows: blocks of vLLM's primary.
        options: of the tier.
    """

    def __init__(self, session, *, num_rows=16, config=None, **options):
        region = PlainRegion(num_rows)
        primary = VLLM.tiering.CPUPrimaryTierOffloadingManager(
            num_chunks=num_rows, mmap_region=region
        )
        self.view = primary.get_kv_memoryview()
        spec = SimpleNamespace(
            config=config or offloading_config(), replicated_layout=False
        )
        entry = {
            "type": "ShmTier",
            "module_path": "shmoffload.vllm.tier",
            "session": session,
            "staging_bytes": "640KiB",
            **options,
        }
        self.tier = noting(
            VLLM.factory.SecondaryTierFactory.create_secondary_tier(
                entry, self.view, spec
            )
        )
        self.manager = VLLM.tiering.TieringOffloadingManager(primary, [self.tier])
        self.region = region
        self.num_requests = 0

    def request(self, name=None):
        self.num_requests += 1
        ctx = VLLM.base.ReqContext(name or f"r{self.num_requests}")
        self.policy = self.manager.on_new_request(ctx).policy
        return ctx

    def finish(self, ctx):
        self.manager.on_request_finished(ctx)

    def step(self):
        self.manager.on_schedule_end(STEP)

    def settle(self):
        """Step until vLLM has no open job."""

        def is_settled():
            self.step()
            return not self.manager.has_pending_work()

        wait_until(is_settled, timeout_s=WAIT_S, what="the end of vLLM's jobs")

    def store(self, keys, ctx=None):
        """Offer keys; returns those that were written, None if there was no room."""
        own = ctx is None
        ctx = self.request() if own else ctx
        output = self.manager.prepare_store(keys, ctx)
        stored = None
        if output is not None:
            stored = list(output.keys_to_store)
            rows = output.store_spec.chunk_ids.tolist()
            for key, row in zip(stored, rows, strict=True):
                self.view_of(row)[:] = bytes_of(key)
            if stored:
                self.manager.complete_store(stored, ctx)
        if own:
            self.finish(ctx)
        self.step()
        return stored

    def scan(self, keys, ctx):
        """One step's lookups: number of hits, or None to ask again."""
        results = []
        for key in keys:
            results.append(self.manager.lookup(key, ctx))
            if results[-1] is MISS:
                break
        if set(results) <= {HIT, MISS}:
            return results.count(HIT)
        self.step()
        return None

    def load(self, keys, *, timeout_s=WAIT_S):
        """Scan until definite, load and verify; returns the number of hits."""
        ctx = self.request()
        answer = []

        def is_definite():
            hits = self.scan(keys, ctx)
            answer.extend([] if hits is None else [hits])
            return hits is not None

        wait_until(is_definite, timeout_s=timeout_s, what="a definite scan")
        hits = keys[: answer[0]]
        rows = self.manager.prepare_load(hits, ctx).chunk_ids.tolist() if hits else []
        for key, row in zip(hits, rows, strict=True):
            assert bytes(self.view_of(row)) == bytes_of(key), "wrong bytes"
        self.manager.complete_load(hits, ctx)
        self.finish(ctx)
        self.step()
        return len(hits)

    def view_of(self, row):
        return self.view.cast("B")[row * ROW_BYTES : (row + 1) * ROW_BYTES]

    def drop_primary(self):
        self.manager.reset_cache()
        self.view.cast("B")[:] = bytes(self.view.nbytes)
        if hasattr(self.manager, "on_reset_flushed"):  # 0.33
            self.manager.on_reset_flushed()

    @property
    def engine(self):
        return self.tier._jobs._engine

    @property
    def worker_pid(self):
        page = self.engine.page
        return page.words[page.tier_base(0) + TierWord.WORKER_PID]

    @property
    def num_resident(self):
        return self.engine.tiers[0].num_resident

    def wait_resident(self, count):
        def is_there():
            self.step()
            return self.num_resident >= count

        wait_until(is_there, timeout_s=WAIT_S, what=f"{count} blocks in the tier")

    def check_answers(self):
        """Every job that vLLM gave was answered once."""
        assert self.tier.answered == Counter(list(self.tier.given))

    def close(self):
        self.manager.shutdown()


@contextlib.contextmanager
def serving(session, **options):
    server = Server(session, **options)
    try:
        yield server
        server.settle()
        server.check_answers()
    finally:
        server.close()
