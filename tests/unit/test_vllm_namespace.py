"""The namespace: what changes bytes changes it, and nothing else does."""

import hashlib
import os
import time
from types import SimpleNamespace

import pytest

from shmoffload.errors import ConfigError
from shmoffload.vllm.setup import model_identity as identity_module
from shmoffload.vllm.setup.model_identity import SAMPLES, model_identity
from shmoffload.vllm.setup.namespace import namespace_text

KIB = 1024


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("PYTHONHASHSEED", "VLLM_PP_LAYER_PARTITION"):
        monkeypatch.delenv(name, raising=False)


def make_model(directory, *, fill=b"a", num_files=2, config='{"layers": 4}'):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(config)
    (directory / "tokenizer.json").write_text("{}")
    for idx in range(num_files):
        name = f"model-{idx:05d}.safetensors"
        (directory / name).write_bytes(fill * (300 * KIB + idx))
    return directory


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model")


def group(tokens=32, layers=("l.0", "l.1"), group_id=0):
    return SimpleNamespace(
        tokens_per_block=tokens, layer_names=layers, group_id=group_id
    )


def text(model, *, config=None, par=None, **words):
    fields = {
        "groups": (group(),),
        "worker_kv_bytes_per_block": 4096,
        "engine_id": "e",
        "model": SimpleNamespace(name=str(model), dtype="float32"),
        "cache": SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=1),
        "kv_cache_layout": "LBHNC",
        "parallel": SimpleNamespace(
            **{
                "rank": 0,
                "world_size": 1,
                "tp_size": 1,
                "pp_size": 1,
                "pcp_size": 1,
                "dcp_size": 1,
                "data_parallel_index": 0,
                "data_parallel_size": 1,
                **(par or {}),
            }
        ),
        **(config or {}),
    }
    words = {"is_replicated": False, "engine": "0.32 cpu"} | words
    return namespace_text(SimpleNamespace(**fields), **words)[0]


class TestIngredients:
    @pytest.mark.parametrize(
        "par",
        [
            {"tp_size": 2},
            {"pp_size": 2},
            {"pcp_size": 2},
            {"dcp_size": 2},
            {"world_size": 2},
        ],
        ids=str,
    )
    def test_the_parallel_layout_changes_it(self, model, par):
        assert text(model, par=par) != text(model)

    @pytest.mark.parametrize(
        "config",
        [
            {"groups": (group(tokens=16),)},
            {"groups": (group(layers=("l.0", "l.2")),)},
            {"groups": (group(layers=("l.0",)),)},
            {"groups": (group(group_id=1),)},
            {"groups": (group(), group(group_id=1))},
            {"worker_kv_bytes_per_block": 8192},
            {"kv_cache_layout": "BLHNC"},
            {"kv_cache_layout": None},
            {"cache": SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1)},
            {"cache": SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=2)},
        ],
        ids=str,
    )
    def test_the_kv_layout_changes_it(self, model, config):
        assert text(model, config=config) != text(model)

    def test_the_dtype_changes_it(self, model):
        other = SimpleNamespace(name=str(model), dtype="fp8_e4m3")
        assert text(model, config={"model": other}) != text(model)

    @pytest.mark.parametrize(
        "words",
        [
            {"is_replicated": True},
            {"engine": "0.33 cpu"},
            {"engine": "0.32 cuda"},
            {"own": "mine"},
            {"revision": "r1"},
        ],
        ids=str,
    )
    def test_words_change_it(self, model, words):
        assert text(model, **words) != text(model)

    def test_no_word_can_pass_for_another(self, model):
        assert text(model, own="x engine=y", engine="z") != text(
            model, own="x", engine="y engine=z"
        )
        assert text(model, own="a") != text(model, revision="a")

    @pytest.mark.parametrize("seed", ["", "0", "7"])
    def test_the_hash_seed_changes_it(self, model, monkeypatch, seed):
        without = text(model)
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        assert text(model) != without

    @pytest.mark.parametrize(
        ("config", "par"),
        [
            ({"engine_id": "another"}, {}),
            ({}, {"rank": 1}),
            ({}, {"data_parallel_index": 1}),
            ({}, {"data_parallel_size": 8}),
        ],
        ids=str,
    )
    def test_who_asks_does_not_change_it(self, model, config, par):
        assert text(model, config=config, par=par) == text(model)

    def test_pipeline_stages_say_the_same(self, model, monkeypatch):
        stages = [
            text(model, config={"groups": (group(layers=layers),)}, par={"pp_size": 2})
            for layers in (("l.0", "l.1"), ("l.2",), ())
        ]
        assert len(set(stages)) == 1
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,3")
        assert text(model, par={"pp_size": 2}) != stages[0]

    def test_it_is_short(self, model):
        layers = tuple(f"model.layers.{idx}.self_attn.attn" for idx in range(126))
        groups = tuple(group(layers=layers, group_id=idx) for idx in range(4))
        assert len(text(model, config={"groups": groups})) < KIB


class TestDirectory:
    def test_neither_path_nor_time_matters(self, model, tmp_path):
        other = make_model(tmp_path / "elsewhere" / "copy")
        os.utime(other / "config.json", (1, 1))
        assert text(other) == text(model)

    def test_a_tokenizer_does_not_matter(self, model):
        before = text(model)
        (model / "tokenizer.json").write_text('{"other": 1}')
        (model / "README.md").write_text("hello")
        assert text(model) == before

    @pytest.mark.parametrize("offset", [0, 150 * KIB, 300 * KIB - 1])
    def test_new_weights_of_the_same_size(self, model, offset):
        before = text(model)
        file = model / "model-00000.safetensors"
        stat = file.stat()
        content = bytearray(file.read_bytes())
        # As a fine-tune would: everywhere, but here the change is as long as the
        # distance of two windows.
        width = len(content) // SAMPLES + identity_module.WINDOW_BYTES
        start = min(offset, len(content) - width)
        content[start : start + width] = b"b" * width
        file.write_bytes(content)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert text(model) != before

    def test_every_byte_of_a_small_file_counts(self, tmp_path):
        model = tmp_path / "small"
        model.mkdir()
        file = model / "w.safetensors"
        content = bytes(64 * KIB)
        file.write_bytes(content)
        before = model_identity(str(model))
        for offset in range(0, len(content), 997):
            file.write_bytes(content[:offset] + b"x" + content[offset + 1 :])
            assert model_identity(str(model)) != before, offset

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("config.json", '{"layers": 4, "rope": 2}'),
            ("model-00002.safetensors", "x"),
            ("modeling_own.py", "x = 1"),
            ("params.json", "{}"),
        ],
    )
    def test_other_files_that_matter(self, model, name, content):
        before = text(model)
        (model / name).write_text(content)
        assert text(model) != before

    def test_a_weight_file_that_is_gone(self, model):
        before = text(model)
        (model / "model-00001.safetensors").unlink()
        assert text(model) != before

    def test_a_model_of_one_file(self, tmp_path):
        files = [tmp_path / name for name in ("a.gguf", "b.gguf", "c.gguf")]
        for file, content in zip(files, (b"1", b"1", b"2"), strict=True):
            file.write_bytes(content * 9000)
        a, b, c = (model_identity(str(file)) for file in files)
        assert a == b != c

    def test_a_directory_without_weights_is_its_path_and_says_so(self, tmp_path):
        models = [
            make_model(tmp_path / name, num_files=0) for name in ("first", "second")
        ]
        identities = [model_identity(str(model)) for model in models]
        assert identities[0][0] != identities[1][0]
        assert "set shmoffload.revision" in identities[0][1][0]
        with_revision = {model_identity(str(model), "r1")[0] for model in models}
        assert len(with_revision) == 1

    def test_a_hundred_files_are_quick(self, tmp_path):
        model = make_model(tmp_path / "large", num_files=100)
        model_identity(str(model))
        start_s = time.thread_time()
        model_identity(str(model))
        assert time.thread_time() - start_s < 0.2


MAIN, OLD = "a" * 40, "b" * 40


def add_snapshot(cache, commit, content, *, repo="org/tiny", config="{}"):
    """Put a revision into a cache as Hugging Face does: links to named blobs."""
    root = cache / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir(exist_ok=True)
    for name, data in (
        ("config.json", config.encode()),
        ("model.safetensors", content),
    ):
        if data is None:
            continue
        blob = root / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / name).symlink_to(blob)
    return root


def set_ref(root, ref, commit):
    path = root / "refs" / ref
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(commit)


class TestHub:
    def test_one_revision(self, tmp_path):
        root = add_snapshot(tmp_path, MAIN, b"w" * 9000)
        identity, notes = model_identity("org/tiny", hub_cache=tmp_path)
        assert notes == []
        # vLLM without a network gives the directory in place of the name.
        directory = root / "snapshots" / MAIN
        assert model_identity(str(directory)) == (identity, [])

    def test_new_weights_under_the_name(self, tmp_path):
        caches = [tmp_path / "1", tmp_path / "2"]
        for cache, content in zip(caches, (b"1", b"2"), strict=True):
            add_snapshot(cache, MAIN, content)
        first, second = (
            model_identity("org/tiny", hub_cache=cache) for cache in caches
        )
        assert first != second

    def test_two_revisions_with_the_same_files(self, tmp_path):
        for commit in (MAIN, OLD):
            add_snapshot(tmp_path, commit, b"w")
        assert model_identity("org/tiny", hub_cache=tmp_path)[1] == []

    def test_a_revision_without_weights_is_no_revision(self, tmp_path):
        add_snapshot(tmp_path, MAIN, b"w")
        before = model_identity("org/tiny", hub_cache=tmp_path)
        add_snapshot(tmp_path, OLD, None, config='{"other": 1}')
        assert model_identity("org/tiny", hub_cache=tmp_path) == before

    def test_several_revisions_have_to_be_told_apart(self, tmp_path):
        root = add_snapshot(tmp_path, MAIN, b"new")
        add_snapshot(tmp_path, OLD, b"old")
        set_ref(root, "main", MAIN)
        set_ref(root, "refs/pr/1", OLD)
        with pytest.raises(ConfigError) as caught:
            model_identity("org/tiny", hub_cache=tmp_path)
        assert "set shmoffload.revision" in str(caught.value)
        assert MAIN[:12] in str(caught.value)
        new, old = (
            model_identity(str(root / "snapshots" / commit)) for commit in (MAIN, OLD)
        )
        assert new != old
        for revision, expected in [
            (MAIN, new),
            (MAIN[:12], new),
            ("main", new),
            (OLD, old),
            ("refs/pr/1", old),
        ]:
            found = model_identity("org/tiny", revision, hub_cache=tmp_path)
            assert found == expected, revision

    @pytest.mark.parametrize("revision", ["v2", "../../x", "/etc/passwd", "c" * 40])
    def test_a_revision_that_is_none_of_several(self, tmp_path, revision):
        add_snapshot(tmp_path, MAIN, b"new")
        add_snapshot(tmp_path, OLD, b"old")
        with pytest.raises(ConfigError, match="is none of them"):
            model_identity("org/tiny", revision, hub_cache=tmp_path)

    def test_a_word_of_the_operator_beside_the_only_revision(self, tmp_path):
        add_snapshot(tmp_path, MAIN, b"w")
        assert model_identity("org/tiny", "v2", hub_cache=tmp_path) == model_identity(
            "org/tiny", hub_cache=tmp_path
        )

    def test_a_model_that_is_not_there_is_its_name_and_says_so(self, tmp_path):
        identity, (note,) = model_identity("org/tiny", hub_cache=tmp_path)
        assert identity == "name:org/tiny"
        assert "set shmoffload.revision" in note
        assert model_identity("org/tiny", "r1", hub_cache=tmp_path)[1] == []

    @pytest.mark.parametrize("name", ["s3://bucket/model", "../no", "a/b/c"])
    def test_what_is_no_hub_name_is_not_looked_for(self, tmp_path, name):
        assert model_identity(name, "r1", hub_cache=tmp_path)[0] == f"name:{name}"

    def test_the_default_cache_is_hugging_faces(self, monkeypatch, tmp_path):
        def absent(name):
            raise ImportError(name)

        monkeypatch.setattr(identity_module.importlib, "import_module", absent)
        monkeypatch.delenv("HF_HUB_CACHE", raising=False)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        add_snapshot(tmp_path / "hub", MAIN, b"w")
        assert model_identity("org/tiny")[0].startswith("files:")
