"""One server through the phases of a cache: the tokens stay those of no cache.

Every phase says where its cached tokens came from, and counters of the server, of our
tier and of the GPU worker have to agree to the token.
"""

import signal

import pytest
from server_kit import BLOCK_BYTES, BLOCK_TOKENS, SETTLE_TIMEOUT_S, offload, serve
from server_traffic import (
    LOAD_BYTES,
    STORE_BYTES,
    Change,
    ask,
    ask_at_once,
    cpu_share,
    make_prompt,
    make_prompts,
    num_blocks,
)

from shmoffload.testing import leaks
from shmoffload.testing.poll import wait_until

pytestmark = pytest.mark.timeout(400)

PROMPTS = make_prompts("phases")
BLOCKS = num_blocks(PROMPTS)
TOKENS = BLOCKS * BLOCK_TOKENS
CACHED = [192, 320, 64, 672]
SPIN_S = 2.0  # after its last message vLLM's worker spins for one second
IDLE_WINDOW_S = 8.0
MAX_IDLE_CORES = 0.1  # measured: 0.012; vLLM's own tiers, polled: 1.4 (vllm.md)
TIER = {"tier": "1:slab"}


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("phases")
    tier = {"type": "slab", "path": str(folder / "slab"), "max_bytes": "64MiB"}
    extra = offload(
        leaks.new_session_name(),
        [tier],
        # The idle test stops a worker for longer than a worker may be silent.
        shmoffload={"limits": {"hung_after_s": 120, "job_deadline_s": 120}},
    )
    with serve(model, folder, extra) as server:
        yield server


@pytest.fixture(scope="module")
def first_pass(server, reference):
    """The first pass: everything is computed, stored and cascaded, once."""
    change = Change(server)
    assert ask(server, reference, PROMPTS) == [0, 0, 0, 0]
    server.wait_tier("slab", "blocks_written", BLOCKS)
    return change


def test_counters_are_there_before_the_first_request(server):
    names = server.metrics().names()
    assert {n for n in names if n.startswith("vllm:shmoffload_")}
    assert server.status()["status"] == "healthy"


def test_a_changed_prompt_changes_the_text(reference):
    for prompt in PROMPTS:
        changed = [*prompt[:3], prompt[3] ^ 1, *prompt[4:]]
        ours, other = reference.tokens(prompt), reference.tokens(changed)
        assert sum(a == b for a, b in zip(ours, other, strict=True)) < len(ours) // 2


def test_first_pass_is_computed_and_stored_once(server, first_pass):
    first_pass.expect_cached()
    first_pass.expect(STORE_BYTES, BLOCKS * BLOCK_BYTES)
    status = server.status()
    assert status["counters"]["stored_blocks"] == BLOCKS
    (tier,) = status["tiers"]
    assert (tier["resident_blocks"], tier["blocks_read"]) == (BLOCKS, 0)


@pytest.mark.usefixtures("first_pass")
def test_after_a_reset_of_the_gpu_cache_hits_come_from_the_host(server, reference):
    server.reset()
    before, change = server.tier("slab"), Change(server)
    assert ask(server, reference, PROMPTS) == CACHED
    change.expect_cached(host=TOKENS)
    change.expect(LOAD_BYTES, BLOCKS * BLOCK_BYTES)
    change.expect(STORE_BYTES, 0)
    after = server.tier("slab")
    for word in ("blocks_read", "blocks_written", "load_jobs", "hits"):
        assert after[word] == before[word], word


@pytest.mark.usefixtures("first_pass")
def test_after_the_primary_is_dropped_hits_come_from_disk(server, reference):
    server.reset(external=True)
    before, change = server.tier("slab"), Change(server)
    assert ask(server, reference, PROMPTS) == CACHED
    change.expect_cached(disk=TOKENS)
    change.expect(LOAD_BYTES, BLOCKS * BLOCK_BYTES)
    after = server.tier("slab")
    assert after["blocks_read"] - before["blocks_read"] == BLOCKS
    assert after["blocks_written"] == before["blocks_written"]
    change.expect(
        "vllm:kv_offload_tiering_read_bytes_total", BLOCKS * BLOCK_BYTES, **TIER
    )


@pytest.mark.usefixtures("first_pass")
def test_tokens_on_the_gpu_are_the_gpus(server, reference):
    ask(server, reference, PROMPTS)
    change = Change(server)
    ask(server, reference, PROMPTS)
    # vLLM looks on the GPU for all but the last token: of the prompt that is whole
    # blocks the last one is missing there and comes from the host.
    change.expect_cached(device=192 + 320 + 32 + 672, host=32)


@pytest.mark.usefixtures("first_pass")
def test_a_killed_tier_worker_costs_hits_and_no_token(server, reference):
    server.reset(external=True)
    before = server.tier("slab")
    more = [make_prompt(f"traffic{i}", 150 + 20 * i) for i in range(12)]

    def kill():
        server.kill(server.tier("slab")["pid"])

    ask_at_once(server, reference, [*more, *PROMPTS, *more], meanwhile=kill)

    def is_back():
        # An idle engine takes no step, and takes a worker over in a step only.
        server.complete([1, 2, 3], max_tokens=1)
        tier = server.tier("slab")
        return tier["state"] == "UP" and tier["engine_tier_up"] and tier

    after = wait_until(is_back, timeout_s=SETTLE_TIMEOUT_S, what="the next worker")
    assert after["restarts"] == before["restarts"] + 1
    assert after["pid"] != before["pid"]
    # What the dead worker had finished is found again.
    server.reset(external=True)
    change = Change(server)
    assert ask(server, reference, PROMPTS) == CACHED
    change.expect_cached(disk=TOKENS)


def test_a_pending_store_lets_the_server_rest(server, reference):
    tier = server.tier("slab")
    pids = [*server.pids("EngineCore"), *server.pids("Worker")]
    assert len(pids) == 2
    prompt = make_prompt("idle", 640)
    server.kill(tier["pid"], sig=signal.SIGSTOP)
    try:
        ask(server, reference, [prompt])
        cpu_share(pids, window_s=SPIN_S)
        busy = cpu_share(pids, window_s=IDLE_WINDOW_S)
        pending = server.tier("slab")
    finally:
        server.kill(tier["pid"], sig=signal.SIGCONT)
    assert pending["in_flight_bytes"] > 0, "no store was pending: nothing is proven"
    assert pending["blocks_written"] == tier["blocks_written"]
    assert busy < MAX_IDLE_CORES
    # And the store ends without the scheduler.
    server.wait_tier("slab", "blocks_written", tier["blocks_written"] + 20)
    assert cpu_share(pids, window_s=IDLE_WINDOW_S / 2) < MAX_IDLE_CORES
