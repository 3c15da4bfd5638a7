"""vLLM's own scheduler and offloading connector around our spec, without a server.

Covers: a vLLM configuration, the connector in both roles, a step as the engine core
and the model runner make it, what a step said (texts, hits by source, preemptions).
Does not cover: the model (``sched_kv``), what is asked of it (``sched_traffic``).
Who calls it: ``sched_traffic``, the scheduler-loop tests.

Scheduler, KV cache manager and both halves of the connector are vLLM's; manager,
worker, memory and tier processes are ours. Only the model is faked.
"""

import contextlib
import copy
import json
import time
from collections import Counter

from sched_kv import BLOCK_TOKENS, FakeKv
from vllm import SamplingParams
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)
from vllm.forward_context import ForwardContext
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

MAX_TOKENS = 1024
MAX_BATCHED_TOKENS = 256
MAX_REQUESTS = 8
_IDLE_STEP_S = 0.001
"""vLLM's engine core sleeps as long in a step that schedules nothing."""

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": MAX_TOKENS,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
"""vLLM wants a model's description; no weight of it is ever made."""


def make_model_dir(path):
    """Write a model folder that vLLM accepts as a configuration; return it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(_LLAMA))
    return path


def vllm_config(model_dir, extra_config, num_blocks, num_ranks=1, rank=0):
    """Return vLLM's configuration with our spec in it, as one rank has it."""
    cache = CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True)
    cache.kv_cache_layout = "LBNHC"
    cache.num_gpu_blocks = num_blocks
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=MAX_REQUESTS,
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_model_len=MAX_TOKENS,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        model_config=ModelConfig(
            model=str(model_dir), dtype="float32", seed=0, skip_tokenizer_init=True
        ),
        cache_config=cache,
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config=extra_config,
        ),
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(
            tensor_parallel_size=num_ranks,
            distributed_executor_backend="mp" if num_ranks > 1 else None,
        ),
        attention_config=AttentionConfig(backend=None),
    )
    config.scheduler_config.async_scheduling = False
    config.parallel_config.rank = rank
    return config


class _GpuWorker:
    """One rank: its KV and vLLM's connector over it; a step as the model runner's.

    Args:
        config: vLLM's, with the rank.
        kv: of this rank.
        wrap_worker: called with our worker; returns what the connector uses.
    """

    def __init__(self, config, kv, wrap_worker):
        self.kv = kv
        self._context = ForwardContext(
            no_compile_layers={}, attn_metadata={}, slot_mapping={}
        )
        self._connector = OffloadingConnector(config, KVConnectorRole.WORKER, kv.config)
        with set_current_vllm_config(config):
            self._connector.register_kv_caches(kv.caches)
        if wrap_worker is not None:
            half = self._connector.connector_worker
            half.worker = wrap_worker(half.worker, config.parallel_config.rank)

    def step(self, output, forward):
        """Run a step; ``forward(kv)`` returns request ids and their tokens."""
        # Each rank has its own, as from vLLM's message queue: ranks change it.
        meta = copy.deepcopy(output.kv_connector_metadata)
        connector = self._connector
        connector.handle_preemptions(meta)
        connector.bind_connector_metadata(meta)
        is_sync = getattr(output, "has_sync_kv_loads", False)
        if is_sync:
            connector.start_load_kv(self._context)
        ids, sampled = forward(self.kv)
        if not is_sync:
            connector.start_load_kv(self._context)
        connector.wait_for_save()
        sent, received = connector.get_finished(output.finished_req_ids)
        worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=KVConnectorOutput(
                finished_sending=sent,
                finished_recving=received,
                kv_connector_worker_meta=worker_meta,
            ),
        )

    def shutdown(self):
        self._connector.shutdown()


class SchedLoop:
    """One engine: scheduler, connector, GPU workers in lockstep, fake model.

    Attributes:
        kv: the fake model of rank 0 and what it found wrong.
        said: request id -> tokens so far.
        hits: loaded prompt tokens by source, as vLLM's own statistics count them.
        num_preempted: by want of GPU blocks; resets preempt too and do not count.
        num_steps: made.
        num_sync_steps: of them, those whose forward waited for a load (0.33).
        is_after_reset: no step has been made since the last reset.
        before_flush: called after a reset, before the GPU worker hears of transfers
            to be ended: in a real server it is busy, and may hear late.
    """

    def __init__(
        self,
        model_dir,
        extra_config,
        groups,
        num_blocks,
        wrap_worker=None,
        num_ranks=1,
    ):
        configs = [
            vllm_config(model_dir, extra_config, num_blocks, num_ranks, rank)
            for rank in range(num_ranks)
        ]
        kvs = [FakeKv(groups, num_blocks, rank) for rank in range(num_ranks)]
        self.kv = kvs[0]
        init_none_hash(sha256)
        sizes = resolve_kv_cache_block_sizes(self.kv.config, configs[0])
        self._hasher = get_request_block_hasher(sizes[1], sha256)
        self.said, self.hits = {}, Counter()
        self.num_preempted = self.num_steps = self._num_requests = 0
        self._num_reset = self.num_sync_steps = 0
        self.is_after_reset = False
        self.before_flush = lambda: None
        self._workers = []
        with contextlib.ExitStack() as undo:
            # GPU workers come first, as in a server.
            for config, kv in zip(configs, kvs, strict=True):
                worker = _GpuWorker(config, kv, wrap_worker)
                undo.callback(worker.shutdown)
                self._workers.append(worker)
            self.scheduler = Scheduler(
                vllm_config=configs[0],
                kv_cache_config=self.kv.config,
                log_stats=True,
                structured_output_manager=StructuredOutputManager(configs[0]),
                block_size=sizes[0],
                hash_block_size=sizes[1],
            )
            undo.callback(self.scheduler.shutdown)
            self._merged = KVOutputAggregator.from_connector(
                self.scheduler.connector, num_ranks
            )
            self._undo = undo.pop_all()

    @property
    def num_mismatches(self):
        """Reads of wrong bytes, of all ranks."""
        return sum(worker.kv.num_mismatches for worker in self._workers)

    @property
    def faults(self):
        """The first of them, one line each."""
        return [fault for worker in self._workers for fault in worker.kv.faults]

    @property
    def manager(self):
        """Our manager, inside vLLM's connector."""
        return self.scheduler.connector.connector_scheduler.manager

    @property
    def engine(self):
        """The engine inside our manager."""
        return self.manager._engine

    def add(self, prompt, max_tokens, kv_transfer_params=None):
        """Add a request; return its id."""
        req_id = f"r{self._num_requests}"
        self._num_requests += 1
        extra = {"kv_transfer_params": kv_transfer_params}
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=0,
            extra_args=extra if kv_transfer_params else None,
        )
        params.update_from_generation_config({}, 257)
        self.scheduler.add_request(
            Request(
                request_id=req_id,
                prompt_token_ids=list(prompt),
                sampling_params=params,
                pooling_params=None,
                block_hasher=self._hasher,
            )
        )
        self.said[req_id] = []
        return req_id

    def abort(self, req_id):
        """Abort a request, as a client that goes away does."""
        self.scheduler.finish_requests([req_id], RequestStatus.FINISHED_ABORTED)

    def reset(self, *, running, connector):
        """Reset the prefix cache; False if vLLM refuses since a load is in flight."""
        try:
            self.scheduler.reset_prefix_cache(
                reset_running_requests=running, reset_connector=connector
            )
        except RuntimeError as error:
            if "waiting for remote KV" not in str(error):
                raise
            return False
        finally:
            self.is_after_reset = True
            self._num_reset = len(self.scheduler.reset_preempted_req_ids)
        return True

    def step(self):
        """Make one engine step."""
        output = self.scheduler.schedule()
        self.num_steps += 1
        self.num_preempted += len(output.preempted_req_ids or ()) - self._num_reset
        self._num_reset = 0
        meta = output.kv_connector_metadata
        if self.is_after_reset and meta.jobs_to_flush:
            self.before_flush()
        self.is_after_reset = False
        self.num_sync_steps += getattr(output, "has_sync_kv_loads", False)
        outputs = [
            worker.step(output, lambda kv: self._forward(output, kv))
            for worker in self._workers
        ]
        merged = self._merged.aggregate(outputs)
        self._note(self.scheduler.update_from_output(output, merged))
        if not merged.req_ids:
            time.sleep(_IDLE_STEP_S)

    def _forward(self, output, kv):
        starts = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ids, sampled = [], []
        for req_id, num_new in output.num_scheduled_tokens.items():
            tokens = self.scheduler.requests[req_id].all_token_ids
            start = starts[req_id]
            blocks = self.scheduler.kv_cache_manager.get_block_ids(req_id)
            token = kv.forward(req_id, tokens, start, num_new, blocks)
            ids.append(req_id)
            sampled.append([token] if start + num_new >= len(tokens) else [])
        return ids, sampled

    def _note(self, outputs):
        for of_client in outputs.values():
            for one in of_client.outputs:
                self.said[one.request_id].extend(one.new_token_ids)
            stats = of_client.scheduler_stats
            ours = stats and stats.connector_prefix_cache_stats
            for source, num in ours.hits_by_source.items() if ours else ():
                self.hits[source.value] += num

    @property
    def is_busy(self):
        """Whether vLLM's engine core would go on stepping."""
        return bool(self.scheduler.requests) or self.scheduler.has_requests()

    def drain(self, *, timeout_s):
        """Step until nothing is left to do; False on time-out."""
        deadline = time.monotonic() + timeout_s
        while self.is_busy:
            if time.monotonic() > deadline:
                return False
            self.step()
        return True

    def close(self):
        """Shut scheduler and worker down, in this order."""
        self._undo.close()
