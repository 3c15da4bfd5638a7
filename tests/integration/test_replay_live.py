"""Replays against real engines: processes, shared memory, files; every byte."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shmoffload.cli.replay import describe
from shmoffload.core.types import JobReply
from shmoffload.engine import Engine
from shmoffload.replay.generate import MultiTurn, generate
from shmoffload.replay.kill import WorkerKiller
from shmoffload.replay.live import LoopSettings
from shmoffload.replay.report import Hooks, replay_on
from shmoffload.replay.settings import BlockScale, build_config
from shmoffload.testing.leaks import find_leftovers
from shmoffload.wire import config as config_
from shmoffload.wire import layout

DATA = Path(__file__).parents[3] / "shared" / "data"
BLOCK_BYTES = 4096
STRIDE = layout.stride_of(BLOCK_BYTES)
SHAPE = MultiTurn(num_conversations=8, num_turns=4, spread_s=0.5)
SETTINGS = LoopSettings(max_decode=4)

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def workload():
    return generate(SHAPE)


@pytest.fixture
def config_of(workload, session_name):
    def make(*tiers, primary="20%", **limits):
        config = build_config(
            session=session_name,
            primary=primary,
            tiers=tiers,
            scale=BlockScale(workload.num_distinct, BLOCK_BYTES),
        )
        raw = json.loads(config_.encode(config))
        return config_.from_dict({**raw, "limits": {**raw["limits"], **limits}})

    return make


@pytest.fixture
def trace(workload, tmp_path):
    """The generated workload as a Mooncake JSONL file."""
    number = {}
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": round(r.arrival_s * 1000),
                    "input_length": r.num_input_tokens,
                    "output_length": 4,
                    "hash_ids": [number.setdefault(h, len(number)) for h in r.hashes],
                }
            )
            + "\n"
            for r in workload.requests
        )
    )
    return path


@pytest.fixture
def cli(session_name):
    def run(*words, session=True, timeout_s=120):
        if session:
            words = (*words, "--session", session_name)
        return subprocess.run(
            [sys.executable, "-m", "shmoffload.cli", *map(str, words)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return run


def replay(config, workload, **hooks):
    with Engine(config) as engine:
        for name, make in list(hooks.items()):
            hooks[name] = make(engine)
        return replay_on(
            engine,
            workload,
            SETTINGS,
            hooks=Hooks(**hooks),
            described=describe(config, SETTINGS),
        )


def slab_file(folder):
    (path,) = Path(folder).glob("*/slab.bin")
    return path


def test_first_and_second_run_of_the_command(cli, trace, tmp_path, workload):
    words = (
        *("replay", trace, "--live", "--block-bytes", BLOCK_BYTES, "--json"),
        *("--primary", "20%", "--tier", f"slab:{tmp_path}/slab,cap=100%"),
        *("--max-decode", "4"),
    )
    first = cli(*words)
    assert first.returncode == 0, first.stderr
    report = json.loads(first.stdout)
    assert report["ok"] is True
    assert report["requests"] == len(workload.requests)
    assert report["prefix_hits_attainable"] == workload.attainable_hits()
    assert report["prefix_hits"] >= 0.9 * workload.attainable_hits()
    assert report["hits_by_tier"]["slab"] > 0
    assert report["blocks_written"]["total"] == workload.num_distinct
    assert report["bytes"]["cascade"] == workload.num_distinct * STRIDE
    assert report["bad_stamps"] == report["stores_failed"] == 0
    assert report["settings"]["primary_blocks"] == workload.num_distinct // 5

    second = cli(*words)
    assert second.returncode == 0, second.stderr
    report = json.loads(second.stdout)
    assert report["prefix_hits_attainable"] == workload.num_blocks
    assert report["prefix_hits"] == workload.num_blocks
    assert report["blocks_written"]["total"] == 0


def test_a_planted_byte_behind_the_checksum_fails_the_command(cli, trace, tmp_path):
    words = (
        *("replay", trace, "--live", "--block-bytes", BLOCK_BYTES, "--json"),
        *("--primary", "50", "--tier", f"slab:{tmp_path}/slab,cap=100%"),
    )
    assert cli(*words).returncode == 0
    with slab_file(tmp_path / "slab").open("r+b") as slab:
        block = bytearray(slab.read(STRIDE))
        block[1234] ^= 1
        header = memoryview(block)[layout.round_up_to_page(BLOCK_BYTES) :]
        namespace = bytes(header[24:40])
        key = bytes(header[40 : 40 + int.from_bytes(header[12:16], "little")])
        payload = memoryview(block)[:BLOCK_BYTES]
        seal = layout.seal_header(key, payload, namespace)
        header[: len(seal)] = seal
        slab.seek(0)
        slab.write(block)
    again = cli(*words)
    report = json.loads(again.stdout)
    assert again.returncode == 1
    assert report["ok"] is False
    assert report["bad_stamps"] >= 1


def test_a_flipped_byte_in_the_slab_is_a_miss(config_of, workload, tmp_path):
    config = config_of(f"slab:{tmp_path}/slab,cap=100%")
    assert replay(config, workload).ok
    with slab_file(tmp_path / "slab").open("r+b") as slab:
        slab.seek(1234)
        byte = slab.read(1)[0]
        slab.seek(1234)
        slab.write(bytes([byte ^ 1]))
    report = replay(config, workload)
    assert report.ok  # a bad block is a miss, and never data
    assert report.bad_stamps == 0
    assert report.jobs_failed >= 1
    assert report.prefix_hits < report.prefix_hits_attainable
    assert report.blocks_written["total"] >= 1


def test_a_dropped_reply_is_a_failed_job(config_of, workload, tmp_path):
    config = config_of(f"slab:{tmp_path}/slab,cap=100%", job_deadline_s=1.0)

    def drop_one(engine):
        tier, dropped = engine.tiers[0], []
        feed = tier.feed

        def lossy(inputs):
            kept = []
            for item in inputs:
                if isinstance(item, JobReply) and not dropped:
                    dropped.append(item)
                else:
                    kept.append(item)
            feed(kept)

        tier.feed = lossy

    report = replay(config, workload, on_step=drop_one)
    assert report.jobs_failed >= 1
    assert report.bad_stamps == 0


def test_a_killed_worker_costs_hits_and_no_byte(config_of, workload, tmp_path):
    config = config_of(f"slab:{tmp_path}/slab,cap=100%", "memory,cap=100%")
    with Engine(config) as engine:
        killer = WorkerKiller(engine, 0, after=8)
        report = replay_on(
            engine, workload, SETTINGS, hooks=Hooks(on_step=killer.on_step)
        )
        assert killer.await_return(), killer.story()
        assert "SIGKILL hit the worker of slab" in killer.story()
    assert report.ok
    assert report.jobs_failed >= 1
    assert report.bad_stamps == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--tier", "slb:/tmp/x"), "did you mean slab"),
        (("--tier", "slab:/tmp/x,cpa=1"), "did you mean cap"),
        (("--tier", "slab:/dev/null/x"), "no directory"),
        (("--primary", "0%"), "0 blocks"),
        (("--primary", "lots"), "no amount"),
        (("--gpu", "5%"), "--gpu 0"),
        (("--window", "9"), "A:B"),
        (("--speed", "0"), "--speed"),
        (("--prefill-tokens-per-s", "-1"), "--prefill-tokens-per-s -1"),
        (("--prefill-tokens-per-s", "nan"), "--prefill-tokens-per-s nan"),
        (("--block-bytes", "x"), "not a size"),
        (("--block-tokens", "100"), "multiple"),
        (("--wrong", "1"), "--wrong"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(cli, trace, words, says):
    result = cli("replay", trace, "--live", *words)
    assert result.returncode == 2, result.stderr
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""
    assert not find_leftovers()


def test_no_trace_is_one_sentence(cli, tmp_path):
    path = tmp_path / "photo.jpg"
    path.write_bytes(b"\xff\xd8\xff")
    result = cli("replay", path, "--live", "--tier", f"slab:{tmp_path}/s")
    assert result.returncode == 2
    assert "is no request trace" in result.stderr
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("words", [(), ("--kill", "slab")])
def test_demo(cli, words):
    started_s = time.monotonic()
    result = cli("demo", *words, session=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Verified" in result.stdout
    if words:
        assert "SIGKILL hit the worker of slab" in result.stdout
        assert "was back after" in " ".join(result.stdout.split())
    # 20 s on an idle machine; this one may be shared.
    assert time.monotonic() - started_s < 60
    assert not list(Path(os.environ.get("TMPDIR", "/tmp")).glob("shmoffload-demo-*"))


@pytest.mark.data
@pytest.mark.skipif(not DATA.exists(), reason="no recorded traces here")
def test_recorded_minute(cli, tmp_path):
    """A fifth of the acceptance replay; the whole one takes 30 s."""
    result = cli(
        *("replay", DATA / "mooncake_conversation.ptrace.zst", "--live", "--json"),
        *("--window", "0:60", "--speed", "4", "--primary", "30%"),
        *("--tier", f"slab:{tmp_path}/slab,cap=100%"),
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["prefix_hits"] >= 0.95 * report["prefix_hits_attainable"]
    assert report["bad_stamps"] == report["stores_failed"] == 0
