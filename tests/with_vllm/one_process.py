"""API, scheduler and GPU worker in one process: the three phases without a server.

Covers: ``LLM()`` under VLLM_ENABLE_V1_MULTIPROCESSING=0, work from stdin, one line of
JSON with tokens, cached tokens and their source of each phase to stdout.
Does not cover: what should come out (``test_server_variants``).
Who calls it: that test, as a script.
"""

import json
import sys

from server_traffic import BY_SOURCE

from shmoffload.testing.poll import wait_until

SETTLE_TIMEOUT_S = 30.0


def main():
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    work = json.load(sys.stdin)
    llm = LLM(
        model=work["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=True,
        disable_log_stats=False,  # else there are no counters
        kv_transfer_config=KVTransferConfig(**work["transfer_config"]),
    )
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in work["prompts"]]
    phases = []
    for drop in ({}, {"reset_connector": False}, {"reset_connector": True}):
        if phases:
            wait_until(
                lambda drop=drop: llm.reset_prefix_cache(**drop),
                timeout_s=SETTLE_TIMEOUT_S,
                what="the reset",
            )
        before = sources(llm)
        outputs = [
            llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts
        ]
        phases.append(
            {
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "cached": [output.num_cached_tokens for output in outputs],
                "sources": {
                    source: count - before.get(source, 0)
                    for source, count in sources(llm).items()
                    if count != before.get(source, 0)
                },
            }
        )
    sys.stdout.write("\n" + json.dumps(phases) + "\n")
    sys.stdout.flush()


def sources(llm):
    """Cached prompt tokens by source so far."""
    return {
        metric.labels["source"]: metric.value
        for metric in llm.get_metrics()
        if metric.name == BY_SOURCE.removesuffix("_total")
    }


if __name__ == "__main__":
    main()
