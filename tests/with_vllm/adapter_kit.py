"""A manager of ours over a real engine, driven as vLLM's scheduler drives it.

Covers: settings, keys, a request's stores and loads, what a GPU worker would do.
Does not cover: vLLM's scheduler itself (``sched_loop``).
Who calls it: tests of ``shmoffload.vllm.manager``, ``report``.
"""

import contextlib
import hashlib
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch and vLLM warn of at import
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import (  # noqa: F401
        scheduler,
    )
    from vllm.v1.kv_offload import base as vllm_base

from shmoffload.engine import Engine
from shmoffload.testing.poll import wait_until
from shmoffload.vllm.copies.fence import CopyKind, TicketLog
from shmoffload.vllm.manager import ShmOffloadingManager
from shmoffload.vllm.setup.settings import Settings
from shmoffload.wire import config as wire_config
from shmoffload.wire.session import TierWord

BLOCK_BYTES = 16 * 1024
END = vllm_base.ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
HIT = vllm_base.LookupResult.HIT
MISS = vllm_base.LookupResult.MISS
HIT_PENDING = vllm_base.LookupResult.HIT_PENDING


def settings_of(session, tiers=(), *, slots=32, events=True, num_ranks=1, **limits):
    """Return what the spec would have read."""
    config = wire_config.from_dict(
        {
            "session": {"name": session, "namespace": "test"},
            "primary": {
                "block_bytes": BLOCK_BYTES * num_ranks,
                "slots": slots,
                "policy": "lru",
            },
            "tier": list(tiers),
            "limits": {"close_timeout_s": 10.0, **limits},
        }
    )
    return Settings(
        config=config,
        num_ranks=num_ranks,
        rank=0,
        is_replicated=False,
        part_bytes=BLOCK_BYTES,
        blocks_per_chunk=1,
        has_events=events,
        tier_events=tuple(events for _ in config.tier),
        notes=(),
    )


def slab(path, **more):
    """Return a slab tier's section."""
    return {"type": "slab", "path": str(path), "max_bytes": "8MiB", **more}


def keys_of(start, count, group_idx=0):
    """Return keys as vLLM makes them."""
    return [
        vllm_base.make_offload_key(hashlib.sha256(b"%d" % i).digest(), group_idx)
        for i in range(start, start + count)
    ]


def bytes_of(key):
    """Return what a block has to hold."""
    return hashlib.shake_128(key).digest(BLOCK_BYTES)


class Server:
    """Scheduler and GPU worker in one.

    Attributes:
        manager: under test.
        engine: below it.
        log: the GPU worker's tickets.
    """

    def __init__(self, settings):
        self.engine = Engine(settings.config, events=settings.has_events)
        try:
            self.manager = ShmOffloadingManager(self.engine, settings)
            self.log = TicketLog(self.engine.region, settings.rank)
        except BaseException:
            self.engine.close()
            raise

    def request(self, req_id, **params):
        """Announce a request; return vLLM's context of it."""
        ctx = vllm_base.ReqContext(req_id, kv_transfer_params=params or None)
        self.manager.on_new_request(ctx)
        return ctx

    def offer(self, ctx, keys):
        """Offer blocks and copy what is wanted; return it, or None if refused."""
        output = self.manager.prepare_store(keys, ctx)
        if output is None:
            return None
        slots = output.store_spec.block_ids.tolist()
        for key, slot in zip(output.keys_to_store, slots, strict=True):
            self.engine.slot_view(slot)[:BLOCK_BYTES] = bytes_of(key)
        if slots:
            self.log.done(CopyKind.STORE, output.store_spec.ticket)
        return output

    def store(self, ctx, keys):
        """Offer, copy and complete; return what was stored."""
        output = self.offer(ctx, keys)
        assert output is not None, "the primary has no room"
        self.manager.complete_store(set(output.keys_to_store), ctx)
        return output.keys_to_store

    def scan(self, ctx, keys):
        """Look blocks up in one step, to the first miss; return the answers."""
        answers = []
        for key in keys:
            answers.append(self.manager.lookup(key, ctx))
            if answers[-1] is MISS:
                break
        return answers

    def scan_to_end(self, ctx, keys, *, timeout_s=30.0):
        """Scan step after step until every answer is definite, and stay in the step."""
        answers = []

        def is_definite():
            answers[:] = self.scan(ctx, keys)
            if set(answers) <= {HIT, MISS}:
                return True
            self.manager.on_schedule_end(END)
            return False

        wait_until(is_definite, timeout_s=timeout_s, what="a definite scan")
        return answers

    def load(self, ctx, keys):
        """Scan, load and check all of ``keys``; return where they came from."""
        answers = self.scan_to_end(ctx, keys)
        assert answers == [HIT] * len(keys)
        spec = self.manager.prepare_load(keys, ctx)
        # vLLM asks where they came from after it has prepared the load.
        sources = [self.manager.get_load_source(key, ctx) for key in keys]
        self.manager.on_schedule_end(END)
        for key, slot in zip(keys, spec.block_ids.tolist(), strict=True):
            assert bytes(self.engine.slot_view(slot)) == bytes_of(key), "wrong bytes"
        self.log.done(CopyKind.LOAD, spec.ticket)
        self.manager.complete_load(set(keys), ctx)
        return sources

    def drop_primary(self):
        """Forget the primary, as a reset with nothing in flight does."""
        self.manager.reset_cache()
        self.manager.on_schedule_end(END)

    def tier_word(self, word, tier_idx=0):
        """Read a word of a tier's worker."""
        return self.engine.page.get_tier(tier_idx, word)

    def await_written(self, count, tier_idx=0):
        """Wait, without any call of the manager, until a tier has written blocks.

        And has said so: between the write and the answer a lookup is still a miss.
        """
        sent = self.engine.manager.counters.cascade_jobs
        wait_until(
            lambda: (
                self.tier_word(TierWord.BLOCKS_WRITTEN, tier_idx) == count
                and self.tier_word(TierWord.JOBS_DONE, tier_idx) >= sent[tier_idx]
            ),
            timeout_s=30.0,
            what=f"{count} blocks in the tier",
        )


@contextlib.contextmanager
def server(settings):
    """Start a server, and shut it down."""
    started = Server(settings)
    try:
        yield started
    finally:
        started.manager.shutdown()
