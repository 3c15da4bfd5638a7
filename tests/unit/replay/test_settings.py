"""From options to a configuration: amounts, tiers, one sentence per fault."""

import os

import pytest

from shmoffload.core.types import OffloadPolicy
from shmoffload.errors import BadInputError, ConfigError
from shmoffload.replay.live import LoopSettings
from shmoffload.replay.settings import BlockScale, build_config

SCALE = BlockScale(num_distinct=18_887, block_bytes=65_536)
STRIDE = 65_536 + 4096


def build(*tiers, primary="5%", session="s"):
    return build_config(session=session, primary=primary, tiers=tiers, scale=SCALE)


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("5%", 944),
        ("100%", 18_887),
        ("0.1%", 18),
        ("200%", 37_774),
        ("944", 944),
        ("64MiB", (64 << 20) // STRIDE),
        (" 64K5 ", None),
        ("69632B", 1),
    ],
)
def test_amounts(text, blocks):
    if blocks is None:
        with pytest.raises(ConfigError, match="no amount"):
            SCALE.blocks(text, option="--primary")
    else:
        assert SCALE.blocks(text, option="--primary") == blocks


@pytest.mark.parametrize("text", ["0", "0%", "0.001%", "4KiB"])
def test_less_than_a_block(text):
    with pytest.raises(ConfigError, match="0 blocks"):
        build(primary=text)


def test_prefill_goes_into_the_limits():
    made = build_config(
        session="s", primary="5%", tiers=(), scale=SCALE, prefill_s_per_block=0.064
    )
    assert made.limits.prefill_s_per_block == 0.064
    assert build().limits.prefill_s_per_block == 0


def test_tiers(tmp_path):
    first, second = build(
        f"slab:{tmp_path}/new/deep,cap=100%",
        "memory,cap=10,name=ram,policy=request_level",
    ).tier
    assert (first.type, first.name, first.path) == (
        "slab",
        "slab",
        f"{tmp_path}/new/deep",
    )
    assert first.max_bytes == 18_887 * STRIDE
    assert (second.name, second.max_bytes) == ("ram", 10 * STRIDE)
    assert second.policy is OffloadPolicy.REQUEST_LEVEL
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("tier", "says"),
    [
        ("slb:/tmp", "did you mean slab"),
        ("slab", "no directory: write slab:/some/dir"),
        ("", "no type: write one like slab:/some/dir"),
        ("slab:/tmp,cap=1,cap=2", "cap is given twice"),
        ("slab:/tmp,cpa=5%", "did you mean cap"),
        ("slab:/tmp,cap", "cap has no value: write cap="),
        ("slab:/tmp,cap=much", "no amount"),
        ("slab:/tmp,policy=all", "request_level"),
        ("slab:/tmp,name=A B", "not usable"),
        ("slab:/dev/null/x", "no directory"),
        ("slab:/proc/none", "permission"),
    ],
)
def test_bad_tiers(tier, says, monkeypatch):
    # Root may write everywhere: ask as somebody else would.
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != "/proc")
    with pytest.raises(BadInputError, match=says) as error:
        build(tier)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_directory_that_we_may_not_even_look_at(tmp_path):
    closed = tmp_path / "closed"
    (closed / "in").mkdir(parents=True)
    closed.chmod(0o700)
    os.setresuid(65534, 65534, 0)  # os.access asks for the real user
    try:
        with pytest.raises(ConfigError, match="no permission to write in"):
            build(f"slab:{closed}/in/x")
    finally:
        os.setresuid(0, 0, 0)


def test_two_tiers_of_one_name():
    with pytest.raises(ConfigError, match="name"):
        build("memory", "memory")


@pytest.mark.parametrize(
    "bad",
    [
        {"speed": 0},
        {"speed": float("nan")},
        {"max_decode": 0},
        {"step_ms": -1},
        {"step_ms": float("inf")},
        {"step_ms": float("nan")},
    ],
)
def test_loop_settings(bad):
    with pytest.raises(ConfigError, match="--"):
        LoopSettings(**bad).check()
    LoopSettings(step_ms=0).check()
