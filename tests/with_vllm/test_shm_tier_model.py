"""``ShmTier`` in a real vLLM with a model: the tokens stay those of no cache.

vLLM's own ``TieringOffloadingSpec``, with its GPU copies replaced on the host platform
(``cpu_tiering_spec``); manager, primary and everything else are vLLM's.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from server_kit import (
    BLOCK_TOKENS,
    REQUEST_TIMEOUT_S,
    START_TIMEOUT_S,
    environment,
    transfer_config,
)
from server_traffic import make_prompts, num_blocks

from shmoffload.testing import leaks

pytestmark = pytest.mark.timeout(2 * (START_TIMEOUT_S + REQUEST_TIMEOUT_S))

PROMPTS = make_prompts("shm-tier")
TOKENS = num_blocks(PROMPTS) * BLOCK_TOKENS
CACHED = [192, 320, 64, 672]


def run(model, folder, slab):
    """Three phases in one process; see ``one_process``."""
    tier = {
        "type": "ShmTier",
        "module_path": "shmoffload.vllm.tier",
        "tier": "slab",
        "path": str(slab),
        "max_bytes": "64MiB",
        "staging_bytes": "16MiB",
        "session": leaks.new_session_name(),
    }
    extra = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "cpu_tiering_spec",
        "cpu_bytes_to_use": 64 << 20,
        "secondary_tiers": [tier],
    }
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
    # vLLM's region says that it goes, after the last word of the script.
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    return json.loads(line)


def test_tokens_of_all_phases_and_of_a_new_server_are_the_computed_ones(
    model, tmp_path
):
    first = run(model, tmp_path, tmp_path / "slab")
    again = run(model, tmp_path, tmp_path / "slab")
    computed = first[0]["tokens"]
    assert [phase["tokens"] for phase in first + again] == [computed] * 6
    assert [phase["cached"] for phase in first] == [[0, 0, 0, 0], CACHED, CACHED]
    assert [phase["cached"] for phase in again] == [CACHED] * 3
    host, disk = {"host": TOKENS}, {"disk": TOKENS}
    assert [phase["sources"] for phase in first] == [{}, host, disk]
    assert [phase["sources"] for phase in again] == [disk, host, disk]
