"""One server with blocks of two GPU blocks, a slab, and a folder of files behind it.

What one request says through the OpenAI API, and what corrupted files do.
"""

import os
from pathlib import Path

import pytest
from server_kit import BLOCK_BYTES, offload, serve
from server_traffic import (
    HEADER_BYTES,
    Change,
    ask,
    first_host_disk,
    fs,
    make_prompt,
    make_prompts,
    num_blocks,
    slab,
)

from shmoffload.testing import leaks

pytestmark = pytest.mark.timeout(500)

PROMPTS = make_prompts("two tiers")
PER_BLOCK = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two-tiers")


@pytest.fixture(scope="module")
def server(model, folder):
    extra = offload(
        leaks.new_session_name(),
        [slab(folder), fs(folder)],
        blocks_per_chunk=PER_BLOCK,
    )
    with serve(model, folder, extra) as server:
        yield server


def test_phases(server, reference):
    first_host_disk(server, reference, PROMPTS, per_block=PER_BLOCK)
    # Both tiers got each block; the first one served.
    blocks = num_blocks(PROMPTS, per_block=PER_BLOCK)
    server.wait_tier("fs", "blocks_written", blocks)
    assert server.tier("fs")["blocks_read"] == 0


def test_one_tier_asks_for_whole_requests(server, reference):
    prompt = make_prompt("whole request", 512)
    blocks = num_blocks([prompt], per_block=PER_BLOCK)

    def written():
        return {t["name"]: t["blocks_written"] for t in server.status()["tiers"]}

    def say(**ours):
        cached = ask(
            server, reference, [prompt], kv_transfer_params={"shmoffload": ours}
        )
        return cached[0]

    before = written()
    assert say(store_tiers=["slab"]) == 0
    server.wait_tier("slab", "blocks_written", before["slab"] + blocks)
    assert written()["fs"] == before["fs"]
    # Known blocks are offered to no tier, ...
    server.reset()
    assert say() == 512
    # ... unless a tier asks for the request as a whole, and then to that one.
    server.reset()
    assert say(policy={"fs": "request_level"}) == 512
    server.wait_tier("fs", "blocks_written", before["fs"] + blocks)
    after = written()
    assert after["slab"] == before["slab"] + blocks
    # And it is of use: the slab may not serve this request, the files do.
    server.reset(external=True)
    read = server.tier("fs")["blocks_read"]
    assert say(load_tiers=["fs"]) == 512
    assert server.tier("fs")["blocks_read"] == read + blocks


def test_a_filter_of_vllm_reaches_us(server, reference):
    prompt = PROMPTS[1]
    server.reset(external=True)
    change = Change(server)
    params = {"kv_load_tiers": []}
    assert ask(server, reference, [prompt], kv_transfer_params=params) == [0]
    change.expect_cached()


@pytest.mark.parametrize("tier", ["slab", "fs"])
def test_corrupted_files_are_misses(folder, server, reference, tier):
    # Runs last: from here on the files are spoilt. A file is read afresh, so
    # that the server need not stop: direct I/O, or opened for each read.
    blocks = num_blocks(PROMPTS, per_block=PER_BLOCK)
    num_spoilt = spoil(folder / tier, PER_BLOCK * BLOCK_BYTES)
    assert num_spoilt >= blocks
    server.reset(external=True)
    before, change = server.tier(tier), Change(server)
    params = {"shmoffload": {"load_tiers": [tier], "store_tiers": []}}
    found = ask(server, reference, PROMPTS, kv_transfer_params=params)
    assert found == [0, 0, 0, 0]
    change.expect_cached()
    after = server.tier(tier)
    assert after["blocks_bad"] - before["blocks_bad"] == blocks
    assert after["restarts"] == before["restarts"]


def spoil(path: Path, block_bytes: int) -> int:
    """Invert half of the payload of every block under ``path``; headers stay."""
    stride, half = block_bytes + HEADER_BYTES, block_bytes // 2
    num_spoilt = 0
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.stat().st_size >= stride:
            with file.open("r+b") as blocks:
                for begin in range(half, file.stat().st_size, stride):
                    blocks.seek(begin)
                    inverted = bytes(byte ^ 0xFF for byte in blocks.read(half))
                    blocks.seek(begin)
                    blocks.write(inverted)
                    num_spoilt += 1
                blocks.flush()
                os.fsync(blocks.fileno())
    return num_spoilt
