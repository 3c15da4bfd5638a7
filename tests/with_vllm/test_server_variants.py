"""Servers of other shapes: tensor parallel, larger blocks, little memory, one process.

Also configurations that are refused.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from server_kit import (
    BLOCK_BYTES,
    REQUEST_TIMEOUT_S,
    START_TIMEOUT_S,
    environment,
    offload,
    serve,
    start,
    transfer_config,
)
from server_traffic import (
    EXTERNAL_HITS,
    HEADER_BYTES,
    PREEMPTIONS,
    Change,
    ask_at_once,
    first_host_disk,
    make_prompt,
    make_prompts,
    slab,
)

from shmoffload.testing import leaks
from shmoffload.testing.poll import wait_until

pytestmark = pytest.mark.timeout(500)

PROMPTS = make_prompts("variants")


def test_four_gpu_blocks_little_memory_and_preemptions(model, tmp_path, reference):
    per_block, slots = 4, 8
    stride = per_block * BLOCK_BYTES + HEADER_BYTES
    extra = offload(
        leaks.new_session_name(),
        [slab(tmp_path)],
        cpu_bytes=slots * stride,
        blocks_per_chunk=per_block,
    )
    # 48 GPU blocks hold two of the prompts below, eight run at once.
    options = ["--num-gpu-blocks-override", "48"]
    with serve(model, tmp_path, extra, options=options) as server:
        assert server.status()["primary"]["slots"] == slots
        first_host_disk(server, reference, PROMPTS[3:], per_block=per_block)
        crowd = [make_prompt(f"crowd{i}", 300 + 32 * i) for i in range(12)]
        change, before = Change(server), server.status()["counters"]
        for _ in range(3):
            ask_at_once(server, reference, crowd, max_tokens=64)
        assert change.of(PREEMPTIONS) > 0
        assert change.of(EXTERNAL_HITS) > 0
        after = server.status()["counters"]
        assert after["evicted_blocks"] > before["evicted_blocks"]
        assert server.status()["status"] == "healthy"


@pytest.fixture(scope="module")
def written_at_tp2(model, reference, tmp_path_factory):
    """A folder that two tensor-parallel workers have filled; see its test."""
    folder = tmp_path_factory.mktemp("tp2")
    # Two cores, and both GPU workers and the engine core spin on them while a request
    # waits for the disk: at niceness 10 a tier's threads waited a second for each turn.
    extra = offload(
        leaks.new_session_name(),
        [slab(folder, nice=0)],
        shmoffload={"limits": {"job_deadline_s": 120}},
    )
    with serve(
        model,
        folder,
        extra,
        options=["--tensor-parallel-size", "2"],
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    ) as server:
        assert len(server.pids("Worker")) == 2
        first_host_disk(server, reference, PROMPTS, per_block=1)
    return folder


def test_two_tensor_parallel_workers_share_blocks(written_at_tp2):
    """The phases are the fixture's; here what it left: one block for both ranks."""
    (file,) = written_at_tp2.rglob("slab.bin")
    assert file.stat().st_size % (BLOCK_BYTES + HEADER_BYTES) == 0


def test_one_process_that_finds_a_cache_of_two_workers(
    model, written_at_tp2, reference, tmp_path
):
    """``LLM()`` in one process: scheduler and GPU worker open the region twice.

    The folder holds every block of these prompts, written at TP=2: all misses.
    """
    session = leaks.new_session_name()
    done = single_process(model, tmp_path, offload(session, [slab(written_at_tp2)]))
    expected = [list(reference.tokens(prompt)) for prompt in PROMPTS]
    assert [phase["tokens"] for phase in done] == [expected] * 3
    assert [phase["cached"] for phase in done] == [
        [0, 0, 0, 0],
        [192, 320, 64, 672],
        [192, 320, 64, 672],
    ]
    assert [phase["sources"] for phase in done] == [{}, {"host": 1248}, {"disk": 1248}]


def single_process(model, folder, extra):
    """Run ``one_process.py`` and return what it says of each phase."""
    work = {
        "model": str(model),
        "transfer_config": transfer_config(extra),
        "prompts": PROMPTS,
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("one_process.py"))],
        input=json.dumps(work),
        capture_output=True,
        text=True,
        check=False,
        timeout=START_TIMEOUT_S + REQUEST_TIMEOUT_S,
        env={**environment(model.parent), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        cwd=folder,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


REFUSED = {
    "unknown key cpu_byte_to_use in kv_connector_extra_config: did you mean "
    "cpu_bytes_to_use?": {"cpu_byte_to_use": 1},
    'there is no tier type "obj": ': {"secondary_tiers": [{"type": "obj"}]},
    "cpu_bytes_to_use is missing: add ": {"cpu_bytes_to_use": None},
}


def test_a_wrong_configuration_is_refused_with_a_sentence(model, tmp_path):
    servers = {}
    try:
        for sentence, wrong in REFUSED.items():
            extra = offload(leaks.new_session_name(), []) | wrong
            extra = {key: value for key, value in extra.items() if value is not None}
            servers[sentence] = start(model, tmp_path, extra)
        wait_until(
            lambda: all(s.process.poll() is not None for s in servers.values()),
            timeout_s=START_TIMEOUT_S,
            what="the servers to give up",
        )
        for sentence, server in servers.items():
            assert server.process.returncode == 1
            lines = server.log.read_text().splitlines()
            assert any(
                "ConfigError: " in line and sentence in line for line in lines
            ), f"no line says {sentence!r}\n{server.last_lines()}"
            server.wait_ended()
    finally:
        for server in servers.values():
            server.clear()
