"""One request at a time through a real engine: the same hits as planned."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).parents[3] / "shared" / "data"
RUN_TIMEOUT_S = 150.0
# Of the first 1,000 requests of the conversation trace, by slots of the primary.
PREFIX_HITS = {1_708: 1_126, 8_544: 4_426, 17_089: 5_597, 42_724: 5_780}

pytestmark = [
    pytest.mark.data,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not DATA.exists(), reason="no recorded traces here"),
]


def replay(*words):
    result = subprocess.run(
        [
            *(sys.executable, "-m", "shmoffload.cli", "replay"),
            *(str(DATA / "mooncake_conversation.ptrace.zst"), "--json"),
            *("--limit", "1000", "--policy", "lru", *words),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("num_slots", PREFIX_HITS)
def test_lru_gives_the_exact_hits(session_name, num_slots):
    report = replay(
        *("--live", "--speed", "max", "--max-num-seqs", "1", "--session", session_name),
        *("--primary", str(num_slots), "--block-bytes", "4K"),
    )
    assert report["blocks"] == 26_307
    assert report["prefix_hits"] == PREFIX_HITS[num_slots]
    assert report["hits_by_tier"] == {"primary": PREFIX_HITS[num_slots]}
    assert report["max_running"] == 1
    assert report["stores_failed"] == 0
    assert report["settings"]["speed"] == "max"


def test_the_plan_says_the_same():
    plan = replay("--plan", "--primary", ",".join(map(str, PREFIX_HITS)))
    hits = {cell["primary_blocks"]: cell["prefix_hits"] for cell in plan["cells"]}
    assert hits == PREFIX_HITS
