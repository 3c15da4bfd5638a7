"""F50: what changes bytes changes the namespace: a miss, and the old data stay.

Each part of the text by itself: ``tests/unit/test_vllm_namespace``.
"""

import json
from types import SimpleNamespace

import pytest
from late_faults_kit import files_in
from worker_kit import WorkerRig

from shmoffload.cli import main
from shmoffload.testing.tier_tests import key_of
from shmoffload.vllm.setup import namespace as namespace_module
from shmoffload.vllm.setup.namespace import namespace_text
from shmoffload.wire.config import from_dict
from shmoffload.wire.session import TierWord

pytestmark = pytest.mark.timeout(300)
NUM = 4
KEYS = [key_of(i) for i in range(NUM)]
PARALLEL = {
    "rank": 0,
    "world_size": 1,
    "tp_size": 1,
    "pp_size": 1,
    "pcp_size": 1,
    "dcp_size": 1,
    "data_parallel_index": 0,
    "data_parallel_size": 1,
}


def group(tokens=32, group_id=0):
    return SimpleNamespace(
        tokens_per_block=tokens, layer_names=("l.0", "l.1"), group_id=group_id
    )


def text(model, *, parallel=(), config=(), **words):
    """Return the namespace that the vLLM adapter gives a server."""
    fields = {
        "groups": (group(),),
        "worker_kv_bytes_per_block": 4096,
        "engine_id": "e",
        "model": SimpleNamespace(name=str(model), dtype="bfloat16"),
        "cache": SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=1),
        "kv_cache_layout": "LBHNC",
        "parallel": SimpleNamespace(**{**PARALLEL, **dict(parallel)}),
        **dict(config),
    }
    words = {"is_replicated": False, "engine": "0.32 cpu", **words}
    return namespace_text(SimpleNamespace(**fields), **words)[0]


def make_model(folder, *, weights=b"a", quantised=False):
    folder.mkdir()
    (folder / "config.json").write_text('{"layers": 2}')
    (folder / "model.safetensors").write_bytes(weights * 10_000)
    if quantised:
        (folder / "quantize_config.json").write_text('{"bits": 4}')
    return folder


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """Namespaces of which each differs from the first in one thing."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    model = make_model(tmp_path / "model")
    fp8 = SimpleNamespace(name=str(model), dtype="fp8_e4m3")
    texts = {
        "as it was": text(model),
        "model revision": text(make_model(tmp_path / "newer", weights=b"b")),
        "revision by name": text(model, revision="r2"),
        "dtype": text(model, config={"model": fp8}),
        "kv layout": text(model, config={"kv_cache_layout": "BLHNC"}),
        "block size": text(model, config={"groups": (group(tokens=16),)}),
        "tp": text(model, parallel={"tp_size": 2, "world_size": 2}),
        "pp": text(model, parallel={"pp_size": 2, "world_size": 2}),
        "groups": text(model, config={"groups": (group(), group(group_id=1))}),
        "quantisation": text(make_model(tmp_path / "quantised", quantised=True)),
    }
    with monkeypatch.context() as patch:
        patch.setattr(namespace_module, "FORMAT_VERSION", 2)
        texts["format version"] = text(model)
    assert len(set(texts.values())) == len(texts)
    return texts


def tier(kind, path):
    return {"type": kind, "path": str(path), "max_bytes": "256KiB", "nice": 0}


def store_all(rig):
    for slot, key in enumerate(KEYS):
        rig.fill(slot, key)
    assert rig.run(KEYS, range(NUM)) == ([], "")


def json_of(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main([*words, "--json"])
    return ended.value.code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", ["slab", "fs"])
def test_f50_one_changed_thing_is_a_cold_start(
    session_name, tmp_path, changed, kind, capsys
):
    """Real workers on one path: nothing of the others is found, nothing is lost."""
    path = tmp_path / "tier"
    first = ""
    digests = set()
    for what, namespace in changed.items():
        with WorkerRig(session_name, namespace=namespace, **tier(kind, path)) as rig:
            rig.ready()
            digests.add(rig.region.namespace.hex())
            assert rig.resident() == [], what
            failed, _ = rig.run(KEYS, range(10, 10 + NUM), load=True)
            assert failed == list(range(NUM)), what
            assert rig.word(TierWord.BLOCKS_MISSED) == NUM
            assert rig.word(TierWord.BLOCKS_BAD) == 0
            store_all(rig)
            rig.process.terminate()
            assert rig.exit_code() == 0
        if not first:
            first = rig.region.namespace.hex()
            before = files_in(path / first)
    assert len(digests) == len(changed)
    assert files_in(path / first) == before
    code, seen = json_of(capsys, "verify", str(path))
    assert code == 0
    assert {row["path"].rpartition("/")[2] for row in seen["directories"]} == digests
    assert {row["blocks"] for row in seen["directories"]} == {NUM}
    code, seen = json_of(
        capsys, "clean", "--session", session_name, "--tier-path", str(path)
    )
    assert (code, len(seen["found"])) == (1, len(changed) - 1)
    rig = WorkerRig(session_name, namespace=changed["as it was"], **tier(kind, path))
    with rig:
        rig.ready()
        assert rig.run(KEYS, range(10, 10 + NUM), load=True) == ([], "")
        assert all(rig.holds(10 + i, key) for i, key in enumerate(KEYS))


def test_f50_the_same_things_in_another_order_are_the_same(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    model = make_model(tmp_path / "model")
    turned = dict(reversed(PARALLEL.items()))
    assert text(model) == text(model, parallel=turned)
    words = {
        "session": {"name": "a", "namespace": text(model)},
        "primary": {"block_bytes": 4096, "slots": 2},
        "tier": [{"type": "memory", "nice": 3}],
    }
    other = {
        name: dict(reversed(value.items())) if isinstance(value, dict) else value
        for name, value in reversed(words.items())
    }
    assert from_dict(words).namespace_digest == from_dict(other).namespace_digest


@pytest.mark.parametrize("kind", ["slab", "fs"])
def test_f50_a_directory_of_another_namespace_by_the_same_name(
    session_name, tmp_path, kind, capfd
):
    """As if two digests were equal: what is stored inside says whose it is."""
    disk = tier(kind, tmp_path)
    rigs = {
        name: WorkerRig(f"{session_name}-{name}", namespace=name, **disk)
        for name in ("ours", "others")
    }
    with rigs["others"] as rig:
        rig.ready()
        store_all(rig)
        rig.process.terminate()
        assert rig.exit_code() == 0
        others = tmp_path / rig.region.namespace.hex()
    with rigs["ours"] as rig:
        others.rename(tmp_path / rig.region.namespace.hex())
        rig.start()
        assert rig.hello().error == ""
        found = rig.resident()
        failed, _ = rig.run(KEYS, range(10, 10 + NUM), load=True)
        assert failed == list(range(NUM))
        if kind == "slab":  # the index says so, before a block is read
            assert found == []
            assert "it was made for another layout" in capfd.readouterr().err
        else:  # each block's header does
            assert sorted(found) == sorted(KEYS)
            assert rig.word(TierWord.BLOCKS_BAD) == NUM
        store_all(rig)
        assert rig.run(KEYS, range(10, 10 + NUM), load=True) == ([], "")
        assert all(rig.holds(10 + i, key) for i, key in enumerate(KEYS))
