"""vLLM's configuration as ours: drop-in keys, refusals, names, sizes."""

import dataclasses
import json
import uuid
from types import SimpleNamespace

import pytest

from shmoffload.errors import BadInputError, ConfigError
from shmoffload.vllm.setup.settings import read_settings
from shmoffload.wire.config import decode, encode
from shmoffload.wire.layout import stride_of
from shmoffload.wire.region import MAX_RANKS
from shmoffload.worker.registry import check_tier_types

BLOCK = 131072
CPU_BYTES = 1 << 24


def group(**changes):
    fields = {"tokens_per_block": 32, "layer_names": ("l.0", "l.1"), "group_id": 0}
    return SimpleNamespace(**(fields | changes))


def parallel(**changes):
    fields = {
        "rank": 0,
        "world_size": 1,
        "tp_size": 1,
        "pp_size": 1,
        "pcp_size": 1,
        "dcp_size": 1,
        "data_parallel_index": 0,
        "data_parallel_size": 1,
        "data_parallel_rank_local": None,
        "is_parallelism_agnostic": True,
    }
    return SimpleNamespace(**(fields | changes))


def vllm_config(extra=None, *, tp=1, blocks_per_chunk=1, par=None, **changes):
    """An ``OffloadingConfig`` as vLLM 0.32 makes it for a tiny model."""
    fields = {
        "groups": (group(),),
        "worker_kv_bytes_per_block": BLOCK // tp,
        "enable_kv_cache_events": False,
        "extra_config": {"cpu_bytes_to_use": CPU_BYTES} if extra is None else extra,
        "engine_id": "engine0",
        "model": SimpleNamespace(name="no/such-model", dtype="float32"),
        "cache": SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=blocks_per_chunk),
        "parallel": parallel(world_size=tp, tp_size=tp, **(par or {})),
        "replicated_layout": False,
        "canonical_layout": False,
        "kv_cache_layout": "LBHNC",
    }
    return SimpleNamespace(**(fields | changes))


def read(extra=None, **changes):
    return read_settings(vllm_config(extra, **changes))


def with_bytes(**extra):
    return {"cpu_bytes_to_use": CPU_BYTES, **extra}


def with_tier(**tier):
    return with_bytes(secondary_tiers=[tier])


def refusal(extra=None, **changes):
    """The sentence with which a configuration is refused."""
    with pytest.raises(BadInputError) as caught:
        read(extra, **changes)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


class TestDropIn:
    def test_a_cpu_configuration(self):
        settings = read()
        assert settings.config.num_slots == CPU_BYTES // stride_of(BLOCK)
        assert settings.config.primary.policy == "auto"
        assert settings.config.tier == ()
        assert (settings.num_ranks, settings.rank) == (1, 0)
        assert settings.part_bytes == BLOCK

    def test_a_tiering_configuration(self, tmp_path):
        settings = read(
            {
                "spec_name": "ShmOffloadingSpec",
                "spec_module_path": "shmoffload.vllm.spec",
                "cpu_bytes_to_use": float(CPU_BYTES),
                "block_size": 64,
                "eviction_policy": "arc",
                "store_threshold": 2,
                "max_tracker_size": 1000,
                "offload_prompt_only": False,
                "self_describing_kv_events": True,
                "sync_load_budget_bytes": 1 << 20,
                "secondary_tiers": [
                    {
                        "type": "fs",
                        "root_dir": str(tmp_path),
                        "n_read_threads": 4,
                        "n_write_threads": 16,
                        "enable_kv_events": True,
                        "locality": "REMOTE",
                    }
                ],
            },
            blocks_per_chunk=2,
            enable_kv_cache_events=True,
        )
        assert settings.part_bytes == 2 * BLOCK == settings.config.block_bytes
        assert settings.blocks_per_chunk == 2
        primary, (tier,) = settings.config.primary, settings.config.tier
        assert primary.policy == "arc"
        assert (primary.store_threshold, primary.max_tracker_size) == (2, 1000)
        assert (tier.type, tier.name, tier.path) == ("fs", "fs", str(tmp_path))
        assert (tier.threads, tier.locality) == (4, "REMOTE")
        assert settings.has_events
        assert settings.tier_events == (True,)
        said = [note for note in settings.notes if "model" not in note]
        assert len(said) == 1
        assert "n_write_threads" in said[0]

    def test_what_has_no_meaning_here_is_noted_once_each(self):
        extra = with_tier(type="memory", backpressure={"backpressure_cls": "X"}) | {
            "backpressure": {"high": 1},
            "tier_poll_interval_s": 0.001,
            "cache_policy_module_path": "their.policies",
            "canonical_layout": True,
        }
        for key in (
            "backpressure",
            "tier_poll_interval_s",
            "cache_policy_module_path",
            "canonical_layout",
            "secondary_tiers[0] (memory): backpressure",
        ):
            begins = [n for n in read(extra).notes if n.startswith(f"{key} has no ")]
            assert len(begins) == 1, key

    def test_an_ordinary_configuration_says_nothing_but_that_the_model_is_unknown(self):
        (note,) = read().notes
        assert "model no/such-model were not found" in note

    @pytest.mark.parametrize(
        ("policy", "module", "is_used"),
        [
            ("lru", None, "lru"),
            ("arc", None, "arc"),
            ("arc2", None, "arc2"),
            (None, None, "auto"),
            ("arc", "their.policies", "arc"),
            ("TheirPolicy", "their.policies", "auto"),
        ],
    )
    def test_eviction_policies(self, policy, module, is_used):
        extra = with_bytes(eviction_policy=policy, cache_policy_module_path=module)
        assert read(extra).config.primary.policy == is_used

    def test_our_own_keys(self, tmp_path):
        settings = read(
            with_bytes(
                secondary_tiers=[
                    {
                        "type": "slab",
                        "path": str(tmp_path),
                        "name": "nvme",
                        "max_bytes": "2GiB",
                        "min_free": "1GiB",
                        "policy": "request_level",
                        "admit": "second",
                        "medium": "storage",
                        "locality": "local",
                        "threads": 3,
                        "nice": 5,
                    }
                ],
                shmoffload={
                    "session": "llm0",
                    "namespace": "mine",
                    "revision": "r1",
                    "primary": {"accept_prefix": True},
                    "limits": {"credit_bytes": "1GiB", "job_deadline_s": 5},
                },
            )
        )
        (tier,) = settings.config.tier
        assert (tier.name, tier.max_bytes, tier.admit) == ("nvme", "2GiB", "second")
        assert (tier.policy.value, tier.threads, tier.nice) == ("request_level", 3, 5)
        assert (tier.medium, tier.locality) == ("STORAGE", "LOCAL")
        assert settings.config.session.name == "llm0"
        assert "'mine'" in settings.config.session.namespace
        assert "'r1'" in settings.config.session.namespace
        assert settings.config.primary.accept_prefix
        assert settings.config.credit_bytes == 1 << 30
        assert settings.config.limits.job_deadline_s == 5

    def test_prefill_in_tokens_becomes_time_per_block(self):
        def seconds(rate, **changes):
            extra = with_bytes(shmoffload={"limits": {"prefill_tokens_per_s": rate}})
            return read(extra, **changes).config.limits.prefill_s_per_block

        assert seconds(8000) == 32 / 8000
        assert seconds(8000.0, blocks_per_chunk=4) == 4 * 32 / 8000
        # Each token is in a block of each group; a block counts for its part.
        groups = (group(), group(group_id=1))
        assert seconds(8000, groups=groups) == 16 / 8000
        assert seconds(0) == read().config.limits.prefill_s_per_block == 0

    def test_the_configuration_survives_the_way_to_another_process(self, tmp_path):
        config = read(with_tier(type="fs", root_dir=str(tmp_path))).config
        assert decode(encode(config)) == config
        check_tier_types(config)

    def test_more_threads_than_a_tier_may_have(self, tmp_path):
        settings = read(with_tier(type="fs", root_dir=str(tmp_path), n_read_threads=16))
        assert settings.config.tier[0].threads == 8
        assert any("n_read_threads = 16" in note for note in settings.notes)

    def test_two_tiers_of_one_type_need_no_names(self, tmp_path):
        tiers = [{"type": "fs", "root_dir": str(tmp_path / d)} for d in "ab"]
        config = read(with_bytes(secondary_tiers=tiers)).config
        assert [tier.name for tier in config.tier] == ["fs1", "fs2"]

    def test_blocks_larger_than_the_default_for_bytes_in_flight(self):
        extra = {"cpu_bytes_to_use": 1 << 34}
        config = read(extra, worker_kv_bytes_per_block=1 << 29).config
        assert config.credit_bytes == 4 * config.stride

    def test_events_of_a_tier_without_events_of_the_server(self):
        settings = read(with_tier(type="memory", enable_kv_events=True))
        assert settings.tier_events == (False,)
        assert any("--kv-events-config" in note for note in settings.notes)


class TestLayout:
    def test_parts_lie_in_order_of_rank(self):
        for rank in range(2):
            settings = read(tp=2, par={"rank": rank})
            assert settings.config.block_bytes == BLOCK
            assert settings.part_bytes == BLOCK // 2
            assert settings.part_offset == rank * BLOCK // 2

    def test_one_copy_for_all_ranks(self):
        settings = read(tp=2, replicated_layout=True, par={"rank": 1})
        assert settings.is_replicated
        assert settings.config.block_bytes == settings.part_bytes == BLOCK // 2
        assert settings.part_offset == 0

    def test_a_canonical_layout_is_not_made_so_each_rank_stores(self):
        settings = read(tp=2, replicated_layout=True, canonical_layout=True)
        assert not settings.is_replicated
        assert settings.config.block_bytes == BLOCK

    def test_context_parallel_ranks_have_parts_of_their_own(self):
        settings = read(tp=2, par={"dcp_size": 2, "rank": 1})
        assert settings.part_offset == settings.part_bytes

    @pytest.mark.parametrize("rank", range(2))
    def test_all_processes_of_a_server_read_the_same_but_for_the_rank(self, rank):
        scheduler = read(tp=2)
        worker = read(tp=2, par={"rank": rank})
        assert dataclasses.replace(worker, rank=0) == scheduler


class TestSession:
    def test_an_engine_id_that_fits(self):
        assert read(engine_id="llm-7_dp1").config.session.name == "llm-7_dp1"

    def test_an_engine_id_that_does_not_fit(self):
        names = {
            read(engine_id=each).config.session.name
            for each in (str(uuid.UUID(int=1)), str(uuid.UUID(int=2)), "UP", "up!")
        }
        assert len(names) == 4
        assert all(name.startswith("vllm-") and len(name) == 17 for name in names)

    def test_replicas_of_one_session(self):
        extra = with_bytes(shmoffload={"session": "llm0"})
        for par, name in [
            ({}, "llm0"),
            ({"data_parallel_size": 2}, "llm0-dp0"),
            ({"data_parallel_size": 2, "data_parallel_index": 1}, "llm0-dp1"),
            # vLLM tells replicas of a dense model that they are alone.
            ({"data_parallel_index": 1}, "llm0-dp1"),
        ]:
            assert read(extra, par=par).config.session.name == name

    @pytest.mark.parametrize("own", ["UPPER", "-a", "a b", "x" * 32])
    def test_a_session_that_is_no_name(self, own):
        extra = with_bytes(shmoffload={"session": own})
        assert refusal(extra).startswith(f'shmoffload.session = "{own}" is not usable')

    def test_a_session_too_long_for_its_replicas(self):
        extra = with_bytes(shmoffload={"session": "x" * 28})
        assert "1 to 27" in refusal(extra, par={"data_parallel_size": 2})

    def test_replicas_have_directories_of_their_own(self):
        extra = with_tier(type="fs", root_dir="/mnt/kv")
        paths = [
            read(extra, par={"data_parallel_index": idx}).config.tier[0].path
            for idx in range(2)
        ]
        assert paths == ["/mnt/kv", "/mnt/kv/dp1"]


FS = {"type": "fs", "root_dir": "/mnt/kv"}


class TestRefusals:
    @pytest.mark.parametrize(
        ("extra", "sentence"),
        [
            ({}, "cpu_bytes_to_use is missing: add the bytes of host memory"),
            ({"cpu_bytes_to_use": None}, "cpu_bytes_to_use is missing"),
            ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use = 0 holds no block"),
            ({"cpu_bytes_to_use": -5}, "cpu_bytes_to_use = -5 holds no block"),
            ({"cpu_bytes_to_use": True}, 'cpu_bytes_to_use = "True" is not a size'),
            ({"cpu_bytes_to_use": "lots"}, 'cpu_bytes_to_use = "lots" is not a size'),
            ({"cpu_bytes_to_use": [1]}, 'cpu_bytes_to_use = "[1]" is not a size'),
            ({"cpu_bytes_to_use": float("nan")}, '"nan" is not a size'),
            (with_bytes(cpu_byte=1), "did you mean cpu_bytes_to_use?"),
            (with_bytes(evict_policy="lru"), "did you mean eviction_policy?"),
            (with_bytes(secondary_tier=[]), "did you mean secondary_tiers?"),
            (with_bytes(zzz=1), "unknown key zzz in kv_connector_extra_config: known"),
            (with_bytes(eviction_policy="lur"), 'eviction_policy = "lur" is no evic'),
            (with_bytes(eviction_policy=7), "eviction_policy = 7 is not a name"),
            (with_bytes(store_threshold=-1), "store_threshold = -1 is no count"),
            (with_bytes(max_tracker_size="x"), 'max_tracker_size = "x" is no count'),
            (with_bytes(max_tracker_size=0), "max_tracker_size = 0"),
            (with_bytes(shmoffload="llm0"), 'shmoffload = "llm0" is not a mapping'),
            (with_bytes(shmoffload={"sesion": "a"}), "did you mean session?"),
            (
                with_bytes(shmoffload={"namespace": 7}),
                "shmoffload.namespace = 7 is not",
            ),
            (with_bytes(shmoffload={"limits": 7}), "shmoffload.limits = 7 is not a"),
            (
                with_bytes(shmoffload={"limits": {"job_deadline": 1}}),
                "shmoffload.limits.job_deadline: did you mean job_deadline_s",
            ),
            (
                with_bytes(shmoffload={"limits": {"prefill_s_per_block": 1}}),
                "follows from the block size here: give prefill_tokens_per_s",
            ),
            (
                with_bytes(shmoffload={"limits": {"prefill_tokens_per_s": "fast"}}),
                'shmoffload.limits.prefill_tokens_per_s = "fast" is not',
            ),
            (
                with_bytes(shmoffload={"limits": {"prefill_tokens_per_s": True}}),
                "shmoffload.limits.prefill_tokens_per_s = true is not a number",
            ),
            (
                with_bytes(shmoffload={"limits": {"prefill_tokens_per_s": -1}}),
                "shmoffload.limits.prefill_tokens_per_s = -1 is not usable",
            ),
            (
                with_bytes(
                    shmoffload={"limits": {"prefill_tokens_per_s": float("inf")}}
                ),
                "shmoffload.limits.prefill_tokens_per_s = inf is not usable",
            ),
            (
                with_bytes(shmoffload={"limits": {"heartbeat_s": -1}}),
                "shmoffload.limits.heartbeat_s = -1",
            ),
            (
                with_bytes(shmoffload={"primary": {"policy": "lru"}}),
                "give eviction_policy beside shmoffload",
            ),
            (
                with_bytes(shmoffload={"primary": {"acept_prefix": True}}),
                "did you mean accept_prefix?",
            ),
        ],
    )
    def test_keys_and_values(self, extra, sentence):
        assert sentence in refusal(extra)

    @pytest.mark.parametrize(
        ("tiers", "sentence"),
        [
            ({"type": "fs"}, "is not a list: write a list of"),
            ("fs", 'secondary_tiers = "fs" is not a list'),
            ({}, "secondary_tiers = {} is not a list"),
            ("", 'secondary_tiers = "" is not a list'),
            (False, "secondary_tiers = false is not a list"),
            (["fs"], 'secondary_tiers[0] = "fs" is not a tier'),
            ([{}], 'secondary_tiers[0] has no type: add "type": "slab"'),
            ([FS, {"type": 3}], "secondary_tiers[1] has no type"),
            ([{"type": "obj"}], 'no tier type "obj": object stores are not served'),
            ([{"type": "p2p"}], 'the nearest is {"type": "slab"'),
            ([{"type": "kvcr"}], 'the nearest is {"type": "slab"'),
            ([{"type": "example"}], 'the nearest is {"type": "memory"}'),
            ([{"type": "slap"}], "did you mean slab?"),
            ([{"type": "T", "module_path": "m"}], "a tier class of vLLM (module_path)"),
            ([{"type": "fs"}], 'a fs tier needs a directory: add "root_dir"'),
            ([FS | {"path": "/x"}], "has root_dir and path"),
            ([{"type": "fs", "root_dir": 7}], "root_dir = 7 is no directory"),
            ([FS | {"root_dirs": 1}], "unknown key root_dirs: did you mean root_dir?"),
            ([FS | {"n_read_threads": 0}], "n_read_threads = 0 is no number"),
            (
                [FS | {"enable_kv_events": "false"}],
                'enable_kv_events = "false" is neither true nor false',
            ),
            ([FS | {"enable_kv_events": 1}], "enable_kv_events = 1 is neither"),
            ([FS | {"key_file": 7}], "key_file"),
            ([FS | {"key_file": ""}], "key_file is empty"),
            ([FS | {"n_read_threads": 2, "threads": 2}], "threads and n_read_threads"),
            ([FS | {"locality": "NEAR"}], "NEAR"),
            ([FS | {"max_bytes": 1}], "max_bytes = 1 holds no block"),
            ([FS | {"admit": "some"}], "admit"),
            ([FS] * 9, "9 tiers are too many"),
        ],
    )
    def test_tiers(self, tiers, sentence):
        assert sentence in refusal(with_bytes(secondary_tiers=tiers))

    @pytest.mark.parametrize(
        "extra",
        [
            {"secondary_tiers": "x" * 9999},
            {"secondary_tiers": ["x" * 9999]},
            {"secondary_tiers": [{"type": "x" * 9999}]},
            {"secondary_tiers": [FS | {"x" * 9999: 1}]},
            {"secondary_tiers": [FS | {"enable_kv_events": "x" * 9999}]},
            {"secondary_tiers": [FS | {"n_read_threads": "x" * 9999}]},
            {"secondary_tiers": [FS | {"name": "x" * 9999}]},
            {"secondary_tiers": [FS | {"max_bytes": "x" * 9999}]},
            {"shmoffload": "x" * 9999},
            {"shmoffload": {"session": "x" * 9999}},
            {"shmoffload": {"revision": ["x" * 9999]}},
            {"shmoffload": {"limits": "x" * 9999}},
            {"shmoffload": {"limits": {"x" * 9999: 1}}},
            {"shmoffload": {"limits": {"credit_bytes": "x" * 9999}}},
            {"eviction_policy": "x" * 9999},
            {"eviction_policy": ["x" * 9999]},
            {"store_threshold": "x" * 9999},
            {"cpu_bytes_to_use": "x" * 9999},
            {"x" * 9999: 1},
        ],
        ids=lambda extra: str(extra)[:40],
    )
    def test_long_values_are_shown_cut(self, extra):
        sentence = refusal(with_bytes(**extra))
        assert "xxx..." in sentence
        assert len(sentence) < 700

    def test_a_tiers_key_file_is_ours(self):
        tier = read(with_tier(type="memory", key_file="/k")).config.tier[0]
        assert tier.key_file == "/k"

    def test_what_is_refused_as_a_type_may_be_a_plug_in(self, monkeypatch):
        monkeypatch.setattr(
            "shmoffload.vllm.setup.tiers.tier_types", lambda: ("fs", "obj", "slab")
        )
        assert read(with_tier(type="obj")).config.tier[0].type == "obj"

    def test_a_set_up_without_bytes(self):
        assert "0 bytes" in refusal(worker_kv_bytes_per_block=0)

    def test_more_ranks_than_have_words(self):
        assert "at most 128" in refusal(tp=MAX_RANKS + 1)

    def test_blocks_that_are_too_large(self):
        assert "lower blocks_per_chunk" in refusal(blocks_per_chunk=1 << 14)

    def test_every_refusal_is_a_configuration_error_or_a_set_up(self):
        with pytest.raises(ConfigError):
            read({})


def test_the_example_of_the_documentation_is_read():
    import shmoffload.vllm.setup.settings as module

    text = module.__doc__.partition("::\n\n")[2].partition("\n\nWhat")[0]
    settings = read(json.loads(text))
    assert settings.config.session.name == "llm0"
    assert settings.config.tier[0].max_bytes == "200GiB"


class TestHoles:
    """0.32 stores blocks of a window without the GPU blocks that it has left."""

    def test_large_blocks_of_several_groups_are_refused(self):
        words = refusal(groups=(group(), group()), blocks_per_chunk=2)
        assert "blocks_per_chunk = 2 with 2 KV cache groups" in words
        assert "give blocks_per_chunk = 1" in words

    def test_not_where_vllm_says_which_groups_have_a_window(self):
        mended = [group(), group()]
        for each in mended:
            each.sliding_window_size_in_chunks = None
        assert read(groups=tuple(mended), blocks_per_chunk=2).blocks_per_chunk == 2

    def test_a_window_is_possible_until_vllm_says_no(self):
        mended = group()
        mended.sliding_window_size_in_chunks = None
        window = group()
        window.sliding_window_size_in_chunks = 4
        assert read().may_have_window
        assert not read(groups=(mended,)).may_have_window
        assert read(groups=(mended, window)).may_have_window

    def test_not_blocks_of_one_gpu_block(self):
        assert read(groups=(group(), group())).blocks_per_chunk == 1
