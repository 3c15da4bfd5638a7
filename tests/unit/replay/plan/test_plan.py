"""``replay --plan``, ``sweep`` and ``stats`` as a person calls them."""

import csv
import json
import sys
from pathlib import Path

import pytest
from plan_kit import BLOCK_TOKENS

from shmoffload import cli
from shmoffload.errors import ConfigError
from shmoffload.replay.plan.grid import Grid
from shmoffload.replay.plan.models import model_of, named_models
from shmoffload.wire.sizes import format_size

DATA = Path(__file__).parents[5] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="no recorded traces here")
MIB = 1 << 20


@pytest.fixture
def trace(tmp_path):
    """Twenty requests over ten conversations, 512 tokens a block."""
    path = tmp_path / "a.jsonl"
    rows = [
        {
            "timestamp": 100 * i,
            "input_length": 512 * 4 + 7,
            "output_length": 10 + i,
            "hash_ids": [0, i % 10, 20 + i % 10, 40 + i % 10, 99],
        }
        for i in range(20)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def call(capsys):
    """Run a verb; return what it printed, and check its exit code."""

    def run(*words, code=0):
        with pytest.raises(SystemExit) as caught:
            cli.main([str(word) for word in words])
        captured = capsys.readouterr()
        assert caught.value.code == code, captured.err
        return captured.out if code == 0 else captured.err

    return run


def test_a_plan_has_every_cell_and_is_the_same_again(trace, call):
    words = ("replay", trace, "--plan", "--primary", "10,50%", "--compare", "lru,min")
    words += ("--tier", "slab,cap=40%,name=disk", "--model", "64MiB", "--json")
    text = call(*words)
    plan = json.loads(text)
    assert text == call(*words)
    assert (plan["requests"], plan["blocks"], plan["distinct_blocks"]) == (20, 80, 31)
    # Of 10 conversations each comes twice; all share the first block.
    assert plan["prefix_hits_attainable"] == 9 + 40
    assert [
        (c["policy"], c["primary"], c["primary_blocks"]) for c in plan["cells"]
    ] == [
        ("lru", "10%", 3),
        ("min", "10%", 3),
        ("lru", "50%", 15),
        ("min", "50%", 15),
    ]
    for cell in plan["cells"]:
        assert cell["of_optimum"] <= 1
        assert cell["stored_bytes"] == cell["stores"] * 64 * MIB
        for tier in cell["tiers"]:
            assert tier["max_blocks"] == 12
            assert tier["bytes_written"] == tier["blocks_written"] * 64 * MIB


def test_limit_is_the_first_requests(trace, call):
    plan = json.loads(
        call("replay", trace, "--plan", "--limit", 3, "--primary", "50%", "--json")
    )
    assert (plan["requests"], plan["distinct_blocks"]) == (3, 1 + 3 * 3)


def test_the_table_fits_a_terminal(trace, call):
    text = call("replay", trace, "--plan", "--primary", "50%", "--tier", "slab")
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


BAD = {
    "no mode": ((), "add either --live or --plan"),
    "both modes": (("--plan", "--live"), "either --live or --plan"),
    "policy": (("--plan", "--policy", "lruu"), "did you mean lru?"),
    "compare": (("--plan", "--compare", "lru,maximum"), '"maximum"'),
    "primary": (("--plan", "--primary", "50%,lots"), '"lots" is no amount'),
    "no block": (("--plan", "--primary", "0.01%"), "is 0 blocks"),
    "model": (("--plan", "--model", "llama-3.1-8"), "did you mean llama-3.1-8b?"),
    "no model": (("--plan", "--model", "0"), "at least 1 byte"),
    "tier": (("--plan", "--tier", "slap"), "did you mean slab?"),
    "admit": (("--plan", "--tier", "slab,admit=third"), "give all, second or tail:N"),
    "tier twice": (("--plan", "--tier", "slab", "--tier", "slab"), "add ,name=OTHER"),
    "limit": (("--plan", "--limit", "-1"), "--limit -1"),
    "compare live": (("--live", "--compare", "lru,min"), "has one policy"),
    "live policy": (
        ("--live", "--primary", "50%", "--policy", "min"),
        "primary.policy",
    ),
    "speed": (("--live", "--speed", "fast"), "write a factor like 10, or max"),
}


@pytest.mark.parametrize(("words", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence(trace, call, words, sentence):
    told = call("replay", trace, *words, code=2)
    assert sentence in told
    assert told.count("\n") == 1


def test_nine_tiers_are_too_many():
    with pytest.raises(ConfigError, match="too many"):
        Grid.parse(
            primary="5",
            policies="lru",
            tiers=[f"slab,name=t{i}" for i in range(9)],
            num_distinct=9,
            model=model_of("1MiB", block_tokens=BLOCK_TOKENS),
        )


def test_blocks_of_named_models():
    sizes = {model.name: model.block_bytes / MIB for model in named_models(512)}
    assert sizes["llama-3.1-8b"] == 64
    assert sizes["llama-3.1-70b"] == 160
    assert sizes["deepseek-v3"] == pytest.approx(34.3, abs=0.1)


def test_sizes_for_people():
    texts = [format_size(n) for n in (5, 2048, 64 * MIB, 11 << 40, 5 << 50)]
    assert texts == ["5 B", "2 KiB", "64 MiB", "11 TiB", "5120 TiB"]


def test_stats(trace, call):
    stats = json.loads(call("stats", trace, "--json"))
    assert (stats["requests"], stats["span_s"]) == (20, 1.9)
    assert (stats["blocks"], stats["distinct_blocks"]) == (80, 31)
    assert stats["used_once"] == 0
    assert stats["output_tokens"] == {"p50": 19, "p99": 28, "max": 29}
    assert stats["blocks_per_request"]["max"] == 4
    assert stats["model_bytes"]["llama-3.1-8b"] == 31 * 64 * MIB
    assert "attainable prefix hits" in call("stats", trace)


def test_a_sweep_is_a_table_and_a_picture(trace, call, tmp_path):
    image = pytest.importorskip("PIL.Image")
    out = tmp_path / "new" / "folder"
    call("sweep", trace, "--out", out, "--primary", "10,50%", "--policy", "lru,min")
    rows = list(csv.DictReader((out / "sweep.csv").read_text().splitlines()))
    assert [(r["policy"], r["primary_blocks"]) for r in rows] == [
        ("lru", "3"),
        ("min", "3"),
        ("lru", "15"),
        ("min", "15"),
    ]
    assert all(float(r["prefix_hit_rate"]) <= 49 / 80 for r in rows)
    with image.open(out / "sweep.png") as png:
        colors = {color for _, color in png.convert("RGB").getcolors(1 << 20)}
    assert {(0x1F, 0x77, 0xB4), (0xD6, 0x27, 0x28)} <= colors  # two curves


@pytest.mark.parametrize("primary", ["30%", "3,3"])
def test_a_sweep_over_one_capacity_has_a_picture_too(trace, call, tmp_path, primary):
    pytest.importorskip("PIL.Image")
    call("sweep", trace, "--out", tmp_path, "--primary", primary)
    assert (tmp_path / "sweep.png").stat().st_size > 1000


def test_without_pillow_there_is_a_table_and_a_sentence(
    trace, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(SystemExit) as caught:
        cli.main(["sweep", str(trace), "--out", str(tmp_path), "--primary", "50%"])
    assert caught.value.code == 0
    assert "pip install 'shmoffload[plot]'" in capsys.readouterr().err
    assert (tmp_path / "sweep.csv").exists()
    assert not (tmp_path / "sweep.png").exists()


def test_a_sweep_into_a_file_is_one_sentence(trace, call):
    told = call("sweep", trace, "--out", trace, "--primary", "50%", code=2)
    assert "give another --out" in told


# Recorded traces ------------------------------------------------------------------

NAMES = {"lru": "lru", "arc": "arc_vllm", "arc2": "arc_ghost4", "min": "min"}
CELLS = [
    *(("mooncake_synthetic", policy) for policy in NAMES),
    ("mooncake_conversation", "lru"),
    ("mooncake_conversation", "min"),
]


@needs_data
@pytest.mark.data
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("trace_name", "policy"), CELLS)
def test_exact_numbers_of_recorded_traces(call, trace_name, policy):
    anchors = json.loads((DATA / "anchors.json").read_text())[trace_name]
    plan = json.loads(
        call(
            *("replay", DATA / f"{trace_name}.ptrace.zst", "--plan", "--json"),
            *("--primary", "1%,5%,10%,25%", "--policy", policy),
        )
    )
    assert (plan["requests"], plan["blocks"]) == (
        anchors["requests"],
        anchors["blocks"],
    )
    assert plan["distinct_blocks"] == anchors["unique"]
    assert plan["prefix_hits_attainable"] == anchors["infinite_hits"]
    for cell, share in zip(plan["cells"], ("0.01", "0.05", "0.1", "0.25"), strict=True):
        anchor = anchors["cells"][share]
        assert cell["primary_blocks"] == anchor["capacity"]
        expected = anchor[NAMES[policy]]
        assert {name: cell[name] for name in expected} == expected
        assert cell["optimum_hits"] == anchor["min"]["prefix_hits"]


@needs_data
@pytest.mark.data
def test_two_tiers_of_the_recorded_conversation(call):
    """Shares that were measured with another simulator (unlimited disk)."""
    plan = json.loads(
        call(
            *("replay", DATA / "mooncake_conversation.ptrace.zst", "--plan", "--json"),
            *("--primary", "5%", "--tier", "slab", "--policy", "lru"),
        )
    )
    (cell,) = plan["cells"]
    (tier,) = cell["tiers"]
    assert cell["prefix_hits"] == plan["prefix_hits_attainable"] == 105_592
    assert cell["hits_by_source"] == {"primary": 55_906, "slab": 105_592 - 55_906}
    assert tier["writes_per_distinct"] == 1
    assert tier["promoted_per_block"] == pytest.approx(0.180, abs=0.001)
    assert tier["never_read_share"] == pytest.approx(0.82, abs=0.01)


@needs_data
@pytest.mark.data
def test_stats_of_the_recorded_conversation(call):
    stats = json.loads(
        call("stats", DATA / "mooncake_conversation.ptrace.zst", "--json")
    )
    anchors = json.loads((DATA / "anchors.json").read_text())["mooncake_conversation"]
    assert stats["requests"] == anchors["requests"]
    assert stats["used_once"] == anchors["once_only_blocks"]
    assert stats["blocks_per_request"]["max"] == anchors["max_request"]
    assert stats["span_s"] == anchors["span_s"]
    assert stats["input_tokens"]["p50"] == 6909
    assert stats["input_tokens"]["p99"] == pytest.approx(85_400, abs=100)
