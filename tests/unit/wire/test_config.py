"""Configuration: every refusal is one sentence that says what to type."""

import math
import re

import msgspec
import pytest

from shmoffload.core.types import OffloadPolicy
from shmoffload.errors import ConfigError
from shmoffload.wire import config as cfg
from shmoffload.wire.sizes import parse_size

GOOD = {
    "session": {"name": "s"},
    "primary": {"slots": 4, "block_bytes": "64K"},
    "tier": [{"type": "memory"}],
}


def changed(**sections):
    return {**GOOD, **sections}


def primary(**keys):
    return changed(primary={**GOOD["primary"], **keys})


def tiers(*tiers):
    return changed(tier=[{"type": "memory", **keys} for keys in tiers])


REFUSED = {
    "misspelt section": (
        changed(primry={}),
        "unknown key primry: did you mean primary",
    ),
    "misspelt key": (primary(slot=4), "unknown key primary.slot: did you mean slots"),
    "misspelt tier key": (
        tiers({"max_byte": 1}),
        "unknown key tier.max_byte: did you mean max_bytes",
    ),
    "key like no other": (
        changed(limits={"qqq": 1}),
        "unknown key limits.qqq: known are close_timeout_s, credit_bytes",
    ),
    "wrong type": (primary(slots="x"), "wrong value: .*slots"),
    "section is no table": (changed(session=3), "wrong value: .*session"),
    "no primary": ({"session": {}}, "wrong value: .*primary"),
    "no type": (changed(tier=[{}]), "wrong value: .*type"),
    "policy": (tiers({"policy": "all"}), "wrong value: .*policy"),
    "session name": (
        changed(session={"name": "A b"}),
        'session.name = "A b" is not usable: take 1 to 31',
    ),
    "long session name": (changed(session={"name": "x" * 32}), "is not usable"),
    "block of 0": (primary(block_bytes=0), "block_bytes = 0 is out of range: give 1"),
    "block too large": (primary(block_bytes="2GiB"), "give 1 byte to 1 GiB"),
    "no size": (
        primary(block_bytes="64X"),
        'primary.block_bytes = "64X" is not a size',
    ),
    "neither": (primary(slots=None), "needs exactly one of slots and bytes"),
    "both": (primary(bytes="1GiB"), "needs exactly one of slots and bytes"),
    "0 slots": (primary(slots=0), "the primary has 0 blocks: one block takes 69632"),
    "0 blocks": (
        primary(slots=None, bytes="64K"),
        "has 0 blocks: .*raise primary.bytes or primary.slots",
    ),
    "bytes no size": (
        primary(slots=None, bytes="lots"),
        'primary.bytes = "lots" is not',
    ),
    "too many tiers": (
        tiers(*({"name": f"t{i}"} for i in range(9))),
        "9 tiers are too many: 8 at most",
    ),
    "tier name": (tiers({"name": "A/b"}), 'tier name "A/b" is not usable: take'),
    "tier twice": (tiers({}, {}), 'two tiers are named "memory": give each'),
    "tier without room": (
        tiers({"max_bytes": "64K"}),
        "max_bytes = 65536 holds no block; one takes 69632 bytes: raise max_bytes",
    ),
    "min_free": (tiers({"min_free": "some"}), 'min_free = "some" is not a size'),
    "threads": (tiers({"threads": 9}), "threads = 9: give 1 to 8"),
    "nice": (tiers({"nice": -1}), "nice = -1: give 0 to 19"),
    "limit": (
        changed(limits={"hung_after_s": 0}),
        "hung_after_s = 0.0 must be a number above 0",
    ),
    "limit no number": (
        changed(limits={"job_deadline_s": math.nan}),
        "job_deadline_s = nan must be a number above 0",
    ),
    "endless limit": (
        changed(limits={"heartbeat_s": math.inf}),
        "heartbeat_s = inf must be a number",
    ),
    "limit of years": (
        changed(limits={"heartbeat_s": 1e12}),
        "heartbeat_s = 1e.12 is longer than a day: give 0.001 to 86400",
    ),
    "deadline of a nanosecond": (
        changed(limits={"job_deadline_s": 1e-9}),
        "job_deadline_s = 1e-09 is too short: give 0.001 to 86400",
    ),
    "hung before a beat": (
        changed(limits={"heartbeat_s": 30, "hung_after_s": 2}),
        "hung_after_s = 2 would find healthy workers hung, which beat every 30 s",
    ),
    "prefill below 0": (
        changed(limits={"prefill_s_per_block": -1}),
        "prefill_s_per_block = -1.0 must be a number above 0",
    ),
    "least deadline": (
        changed(limits={"job_deadline_min_s": 0}),
        "job_deadline_min_s = 0.0 must be a number above 0",
    ),
    "one bracket": (changed(tier={"type": "memory"}), r"write \[\[tier\]\]"),
    "path with NUL": (tiers({"path": "/a\0b"}), "has a NUL in it"),
    "path of half a pair": (tiers({"path": "/a\ud800"}), "is no text"),
    "endless path": (tiers({"path": "/a" * 600}), "longer than 1024 bytes"),
    "credit": (
        changed(limits={"credit_bytes": "4K"}),
        "credit_bytes = 4096 is below one block .*raise it",
    ),
    "credit no size": (changed(limits={"credit_bytes": "x"}), 'credit_bytes = "x" is'),
}


@pytest.mark.parametrize(("raw", "sentence"), REFUSED.values(), ids=REFUSED)
def test_bad_configuration_is_one_sentence(raw, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        cfg.from_dict(raw)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_no_prefill_rate_is_no_fault():
    config = cfg.from_dict(changed(limits={"prefill_s_per_block": 0}))
    assert config == cfg.from_dict(GOOD)
    config = cfg.from_dict(changed(limits={"prefill_s_per_block": 0.25}))
    assert cfg.decode(cfg.encode(config)).limits.prefill_s_per_block == 0.25


def test_defaults_and_derived_sizes():
    config = cfg.from_dict(GOOD)
    assert (config.block_bytes, config.stride, config.num_slots) == (65536, 69632, 4)
    assert config.tier[0].name == "memory"
    assert config.tier[0].policy is None
    assert config.credit_bytes == 256 << 20
    by_bytes = cfg.from_dict(primary(slots=None, bytes="1MiB"))
    assert by_bytes.num_slots == (1 << 20) // 69632


def test_namespace_covers_block_size():
    digests = {
        cfg.from_dict(raw).namespace_digest
        for raw in (
            GOOD,
            primary(block_bytes="32K"),
            changed(session={"name": "s", "namespace": "m"}),
        )
    }
    assert len(digests) == 3
    assert all(len(digest) == 16 for digest in digests)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (7, 7),
        ("7", 7),
        ("64K", 65536),
        ("64KiB", 65536),
        ("64 kb", 65536),
        ("1.5GiB", 3 << 29),
        ("2T", 2 << 40),
    ],
)
def test_sizes(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "K", "-1", "1e3", "64KiBs", True, None, "1 2"])
def test_no_sizes(text):
    with pytest.raises(ConfigError, match="is not a size: write a number of bytes or"):
        parse_size(text)


def test_toml_file(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(
        '[primary]\nslots = 4\nblock_bytes = "64K"\n[[tier]]\ntype = "slab"\n'
        'path = "/data"\npolicy = "request_level"\n'
    )
    config = cfg.load(path)
    assert config.session.name == "default"
    assert config.tier[0].policy is OffloadPolicy.REQUEST_LEVEL
    assert cfg.decode(cfg.encode(config)) == config


def test_unreadable_files(tmp_path):
    for content, sentence in (
        (None, "cannot be read (No such file or directory): give a TOML file"),
        (b"\xff\xfe", "is no text: give a TOML file"),
        (b"[primary", "the configuration is not TOML: "),
        (b"a = " + b"[" * 3000, "the configuration is not TOML: "),
    ):
        path = tmp_path / "c.toml"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            cfg.load(path)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"3", b"\xff", b'{"a":1}'])
def test_packed_garbage_is_refused(data):
    with pytest.raises(ConfigError):
        cfg.decode(data)


def test_packed_configuration_is_compact_json():
    assert msgspec.json.decode(cfg.encode(cfg.from_dict(GOOD)))["primary"]["slots"] == 4
