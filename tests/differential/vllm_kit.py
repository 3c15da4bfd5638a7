"""vLLM's tiering manager without a server, and a tier that answers when told.

Covers: importing vLLM where it is installed, keys by number, the same hand-driven
tier for both managers, what each manager holds.
Does not cover: what has to be equal (``twins``).
Who calls it: the differential tests.
"""

import copy
import importlib
import os
import warnings
from types import SimpleNamespace

import pytest

from shmoffload.core.interfaces import SecondaryTierManager
from shmoffload.core.types import (
    JobResult,
    LookupResult,
    OffloadPolicy,
    RequestOffloadingContext,
    make_offload_key,
)

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: tools/vllm_env.sh", allow_module_level=True)

ROW_BYTES = 16


def _load():
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SimpleNamespace(
            base=importlib.import_module("vllm.v1.kv_offload.base"),
            tier=importlib.import_module("vllm.v1.kv_offload.tiering.base"),
            manager=importlib.import_module("vllm.v1.kv_offload.tiering.manager"),
            primary=importlib.import_module("vllm.v1.kv_offload.cpu.manager"),
        )


VLLM = _load()
HAS_PROVISIONAL_RANKS = hasattr(VLLM.manager, "DEFAULT_TIER_POLL_INTERVAL_S")
"""0.33: blocks of an active request are ranked by position at once."""


def key(number):
    return make_offload_key(b"block-%04d" % number)


def keys(numbers):
    return [key(number) for number in numbers]


def number(of_key):
    return int(of_key[6:10])


def numbers(of_keys):
    return [number(k) for k in of_keys]


_NOTED = (
    "key_groups",
    "seen_keys",
    "inserted_keys",
    "reused_keys",
)


class _Hands:
    """The half of a tier that both kinds share: by number, answered when told."""

    def set_up(self, wants_all):
        self.wants_all = wants_all
        self.have = set()
        self.unknown = set()
        self.jobs = {}
        self.fresh = []  # jobs submitted since somebody looked
        self.done = []
        self.told = []  # (word, request)

    def verdict(self, of_key):
        if number(of_key) in self.unknown:
            return "RETRY"
        return "HIT" if number(of_key) in self.have else "MISS"

    def take_in(self, job, *, is_promotion):
        self.told.append(("job", job.req_context.req_id))
        self.jobs[job.job_id] = job
        # Keys of a load go in the order of the lookups; of a store in any order.
        nums = numbers(job.keys) if is_promotion else sorted(numbers(job.keys))
        seen = (is_promotion, job.req_context.req_id, tuple(nums))
        self.fresh.append((seen, job.job_id))

    def get_finished_jobs(self):
        done, self.done = self.done, []
        return done

    def on_request_finished(self, ctx):
        self.told.append(("finished", ctx.req_id))

    def drain_jobs(self):
        assert not self.jobs


class OurTier(_Hands, SecondaryTierManager):
    def __init__(self, wants_all):
        SecondaryTierManager.__init__(self, "hands")
        self.set_up(wants_all)

    def on_new_request(self, ctx):
        return RequestOffloadingContext(
            OffloadPolicy.REQUEST_LEVEL if self.wants_all else OffloadPolicy.BLOCK_LEVEL
        )

    def lookup(self, k, ctx):
        return LookupResult[self.verdict(k)]

    def submit_store(self, job):
        self.take_in(job, is_promotion=False)

    def submit_load(self, job):
        self.take_in(job, is_promotion=True)

    def finish(self, job_id, ok, arrived):
        del self.jobs[job_id]
        self.done.append(JobResult(job_id, ok, arrived))


class TheirTier(_Hands, VLLM.tier.SecondaryTierManager):
    def __init__(self, rows, wants_all):
        VLLM.tier.SecondaryTierManager.__init__(self, SimpleNamespace(), rows, "hands")
        self.set_up(wants_all)

    def on_new_request(self, ctx):
        policy = VLLM.base.OffloadPolicy
        wanted = policy.REQUEST_LEVEL if self.wants_all else policy.CHUNK_LEVEL
        return VLLM.base.RequestOffloadingContext(wanted)

    def lookup(self, k, ctx):
        return VLLM.base.LookupResult[self.verdict(k)]

    def submit_store(self, job):
        self.take_in(job, is_promotion=False)

    def submit_load(self, job):
        self.take_in(job, is_promotion=True)

    def finish(self, job_id, ok, arrived):
        del self.jobs[job_id]
        self.done.append(VLLM.tier.JobResult(job_id, ok, arrived))


def make_theirs(num_slots, wants_all, policy):
    """Build vLLM's manager; its rows are never touched."""
    rows = memoryview(bytearray(num_slots * ROW_BYTES))
    rows = rows.cast("B", [num_slots, ROW_BYTES])
    primary = VLLM.manager.CPUPrimaryTierOffloadingManager(
        num_chunks=num_slots,
        mmap_region=SimpleNamespace(create_kv_memoryview=lambda: rows),
        cache_policy=policy,
    )
    tiers = [TheirTier(rows, wants) for wants in wants_all]
    return VLLM.manager.TieringOffloadingManager(primary, tiers), tiers


def held_by_theirs(manager):
    """Return number -> "pending" or its pins."""
    policy = manager.primary_tier._policy
    chunks = {
        k: chunk
        for name in ("chunks", "t1", "t2")
        for k, chunk in getattr(policy, name, {}).items()
    }
    return {
        number(k): "pending" if chunk.ref_cnt < 0 else chunk.ref_cnt
        for k, chunk in chunks.items()
    }


def would_evict(manager, ctx, num, offer):
    """Return whom vLLM would evict for an offer, not doing it; None: it refuses."""
    policy = copy.copy(manager.primary_tier._policy)
    for name, value in vars(policy).items():
        if isinstance(value, (dict, set, list)):
            setattr(policy, name, value.copy())
    access = ctx._state.get(VLLM.primary._RequestCacheAccess)
    heard = access.store_miss_keys if access else ()
    policy.on_store_miss(
        [k for k in offer if policy.get(k) is None and k not in heard], ctx
    )
    evicted = policy.evict(num, set(offer))
    return None if evicted is None else [number(k) for k, _ in evicted]


class Observations:
    """What vLLM notes of a call that it then refuses; ``forget`` takes it back."""

    def __init__(self, manager, ctx):
        self._policy = manager.primary_tier._policy
        self._of_policy = {
            name: copy.copy(value) for name, value in vars(self._policy).items()
        }
        self._ctx = ctx
        self._ranks = dict(ctx._state)
        access = ctx._state.get(VLLM.primary._RequestCacheAccess)
        self._access = access and {
            name: copy.deepcopy(getattr(access, name)) for name in _NOTED
        }

    def forget(self):
        """Take back the uses; that ARC has heard of absent keys stays, as in ours."""
        kind = VLLM.primary._RequestCacheAccess
        access = self._ctx._state.get(kind)
        if access is not None:
            is_new = access is not self._ranks.get(kind)
            for name in _NOTED:
                if is_new:
                    getattr(access, name).clear()
                else:
                    setattr(access, name, self._access[name])
        if not hasattr(self._policy, "b1"):
            vars(self._policy).update(self._of_policy)
        for other in set(self._ctx._state) - {kind}:
            if other in self._ranks:
                self._ctx._state[other] = self._ranks[other]
            else:
                del self._ctx._state[other]
