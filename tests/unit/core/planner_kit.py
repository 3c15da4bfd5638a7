"""A manager that accepts everything, and a scheduler around a planner.

Covers: answers by key, room and taste of offers, a log; admit, step, acknowledge.
Does not cover: the real manager.
Who calls it: tests of the planner.
"""

from dataclasses import dataclass, field

import numpy as np

from shmoffload.core.interfaces import OffloadingManager
from shmoffload.core.planner import OffloadingConnectorScheduler
from shmoffload.core.planner_types import PlannerConfig, SchedulerOutput
from shmoffload.core.types import (
    LookupResult,
    OffloadPolicy,
    PrepareStoreOutput,
    RequestOffloadingContext,
    make_offload_key,
)

HIT, MISS = LookupResult.HIT, LookupResult.MISS
PENDING, RETRY = LookupResult.HIT_PENDING, LookupResult.RETRY


class AcceptAll(OffloadingManager):
    """Says what it is told to say, takes what is offered, keeps a log."""

    def __init__(self, policy=OffloadPolicy.BLOCK_LEVEL):
        self.policy = policy
        self.answers = {}  # key -> LookupResult
        self.has = set()
        self.room = None  # keys that one offer may have, None = any
        self.takes = None  # a filter of keys
        self.log = []

    def on_new_request(self, ctx):
        self.log.append(("new", ctx.req_id))
        return RequestOffloadingContext(self.policy)

    def lookup(self, key, ctx):
        assert key in ctx.key_positions
        self.log.append(("lookup", key))
        return self.answers.get(key, MISS)

    def prepare_load(self, keys, ctx):
        self.log.append(("prepare_load", tuple(keys)))
        return np.arange(len(keys), dtype=np.int32)

    def complete_load(self, keys, ctx):
        self.log.append(("complete_load", tuple(keys)))

    def prepare_store(self, keys, ctx):
        assert all(key in ctx.key_positions for key in keys)
        self.log.append(("prepare_store", tuple(keys)))
        if self.room is not None and len(keys) > self.room:
            return None
        new = [
            k for k in keys if k not in self.has and (not self.takes or self.takes(k))
        ]
        self.has.update(new)
        return PrepareStoreOutput(new, np.arange(len(new), dtype=np.int32), ())

    def complete_store(self, keys, ctx, success=True):
        self.log.append(("complete_store", tuple(keys)))

    def on_request_finished(self, ctx):
        self.log.append(("finished", ctx.req_id))

    def on_schedule_end(self, ctx):
        self.log.append(("step_end", tuple(ctx.new_req_ids)))

    def reset_cache(self):
        self.log.append(("reset",))
        self.has.clear()

    def named(self, *names):
        return [entry for entry in self.log if entry[0] in names]


@dataclass
class FakeRequest:
    req_id: str
    num_prompt_tokens: int
    num_tokens: int = 0
    num_computed_tokens: int = 0
    block_hashes: list = field(default_factory=list)
    kv_transfer_params: dict | None = None
    skip_reading_prefix_cache: bool = False


class Rig:
    """One planner, and a scheduler that admits, schedules and acknowledges."""

    def __init__(self, *, tokens=12, per_block=1, manager=None, **config):
        policy = config.pop("policy", OffloadPolicy.BLOCK_LEVEL)
        self.manager = manager or AcceptAll(policy)
        self.tokens = tokens
        self.planner = OffloadingConnectorScheduler(
            self.manager,
            PlannerConfig(
                tokens_per_gpu_block=tokens, gpu_blocks_per_block=per_block, **config
            ),
        )
        self.next_gpu_block = 1

    def request(self, req_id, prompt, **more):
        request = FakeRequest(req_id, prompt, num_tokens=prompt, **more)
        self.hash(request)
        self.planner.on_new_request(request)
        return request

    def hash(self, request):
        for i in range(len(request.block_hashes), request.num_tokens // self.tokens):
            request.block_hashes.append(b"%s:%d" % (request.req_id.encode(), i))

    def key(self, request, i, per_block=1):
        return make_offload_key(request.block_hashes[(i + 1) * per_block - 1])

    def admit(self, request, *, local=0, blocks=None):
        """Match and allocate the whole prompt; returns tokens to load."""
        num, _ = self.planner.get_num_new_matched_tokens(request, local)
        if num is None:
            return None
        if blocks is None:
            count = -(-request.num_tokens // self.tokens)
            blocks = range(self.next_gpu_block, self.next_gpu_block + count)
            self.next_gpu_block += count
        self.planner.update_state_after_alloc(request, list(blocks), num)
        request.num_computed_tokens = local + num
        return num

    def step(self, *, tokens=None, **more):
        """Schedule ``{request: tokens}``, then let them count as computed."""
        tokens = tokens or []
        meta = self.planner.build_connector_meta(
            SchedulerOutput(
                num_scheduled_tokens={r.req_id: n for r, n in tokens}, **more
            )
        )
        for request, num in tokens:
            request.num_computed_tokens += num
        return meta

    def ack(self, meta):
        ids = [job.job_id for job in (*meta.stores, *meta.loads)]
        self.planner.update_connector_output(ids)
