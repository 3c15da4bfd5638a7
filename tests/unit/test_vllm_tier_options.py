"""Options of a ``ShmTier``: every key is known or refused with a sentence."""

from types import SimpleNamespace

import pytest

from shmoffload.errors import ConfigError
from shmoffload.vllm.staging.options import DEFAULT_STAGING, read_options
from shmoffload.wire.sizes import parse_size

ROW = 64 * 1024
SLAB = {"tier": "slab", "path": "/var/cache/kv"}


def vllm_config(*, replica=0, engine_id="e1", canonical=False, **model):
    return SimpleNamespace(
        engine_id=engine_id,
        model=SimpleNamespace(**{"name": "/nowhere/m", "dtype": "float16"} | model),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=2),
        parallel=SimpleNamespace(
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            world_size=1,
            data_parallel_index=replica,
        ),
        groups=(
            SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("a", "b")),
        ),
        worker_kv_bytes_per_block=ROW // 2,
        kv_cache_layout="NHD",
        canonical_layout=canonical,
    )


def read(options, config=None, **more):
    arguments = {"row_bytes": ROW, "is_replicated": False} | more
    return read_options(options, config or vllm_config(), **arguments)[0]


def test_a_block_is_a_row_and_stores_may_fill_half_of_the_staging():
    config = read(SLAB | {"staging_bytes": 10 * (ROW + 4096)})
    assert config.block_bytes == ROW
    assert config.num_slots == 10
    assert config.credit_bytes == 5 * config.stride
    assert [tier.type for tier in config.tier] == ["slab"]
    assert config.tier[0].path == "/var/cache/kv"


def test_the_default_staging():
    config = read(SLAB)
    assert config.num_slots == parse_size(DEFAULT_STAGING) // config.stride


def test_limits_and_tier_keys_arrive():
    config = read(
        {
            "tier": "slab",
            "root_dir": "/d",
            "max_bytes": "1GiB",
            "locality": "remote",
            "n_read_threads": 3,
            "limits": {"job_deadline_s": 5},
        }
    )
    (tier,) = config.tier
    assert (tier.path, tier.max_bytes, tier.locality) == ("/d", "1GiB", "REMOTE")
    assert tier.threads == 3
    assert config.limits.job_deadline_s == 5


def test_sessions_of_other_places_engines_and_replicas_have_other_names():
    names = {
        read(SLAB).session.name,
        read(SLAB | {"path": "/other"}).session.name,
        read(SLAB, vllm_config(engine_id="e2")).session.name,
        read(SLAB | {"session": "mine"}).session.name,
        read(SLAB | {"session": "mine"}, vllm_config(replica=1)).session.name,
    }
    assert len(names) == 5
    assert "mine" in names
    assert read(SLAB).session.name in names


def test_replicas_have_a_directory_each():
    config = read(SLAB, vllm_config(replica=1))
    assert config.tier[0].path != read(SLAB).tier[0].path


def test_what_changes_bytes_changes_the_namespace():
    spaces = {
        read(SLAB).session.namespace,
        read(SLAB, vllm_config(dtype="float32")).session.namespace,
        read(SLAB, vllm_config(canonical=True)).session.namespace,
        read(SLAB, is_replicated=True).session.namespace,
        read(SLAB, engine="0.33 cuda").session.namespace,
        read(SLAB | {"namespace": "x"}).session.namespace,
        read(SLAB | {"revision": "x"}).session.namespace,
    }
    assert len(spaces) == 7
    assert read(SLAB, vllm_config(engine_id="e2")).session.namespace in spaces


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, 'add "tier": "slab"'),
        (SLAB | {"stage_bytes": 1}, "did you mean staging_bytes"),
        (SLAB | {"tier": "slob"}, "slab"),
        ({"tier": "slab"}, "directory"),
        (SLAB | {"staging_bytes": ROW}, "give at least"),
        (SLAB | {"staging_bytes": "much"}, "staging_bytes"),
        (SLAB | {"limits": 3}, "mapping"),
        (SLAB | {"limits": {"credit_bytes": 1}}, "set staging_bytes"),
        (SLAB | {"limits": {"job_deadlines": 1}}, "job_deadline_s"),
        (SLAB | {"limits": {"prefill_s_per_block": 1}}, "vLLM decides what is loaded"),
        (SLAB | {"session": 3}, "not text"),
        (SLAB | {"session": "NO"}, "NO"),
    ],
)
def test_a_wrong_option_is_refused_with_a_sentence(options, words):
    with pytest.raises(ConfigError, match=words):
        read(options)
