"""The commands of docs/vllm.md do what is said there."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from server_kit import START_TIMEOUT_S, Server, environment

from shmoffload.supervisor.attach import differing_key
from shmoffload.testing.poll import wait_until
from shmoffload.vllm import tier as tier_module
from shmoffload.vllm.report.metric_names import DEFINITIONS
from shmoffload.vllm.setup.settings import read_settings
from shmoffload.vllm.staging.options import read_options
from shmoffload.wire.config import from_toml

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs/vllm.md").read_text()
GIB = 1 << 30
BLOCK_TOKENS = 32


def marked(kind, name):
    """Return the code block after ``<!-- kind: name -->``."""
    _, found, rest = DOC.partition(f"<!-- {kind}: {name} -->\n")
    assert found, f"docs/vllm.md has no {kind} {name}"
    return re.match(r"```\w+\n(.*?)```", rest, re.DOTALL)[1]


def transfer_config(name):
    """Return the ``--kv-transfer-config`` of a marked command or JSON block."""
    if f"<!-- config: {name} -->" in DOC:
        return json.loads(marked("config", name))
    if name == "readme":
        text = (ROOT / "README.md").read_text()
    else:
        text = marked("command", name)
    return json.loads(re.search(r"--kv-transfer-config '(.*?)'", text, re.DOTALL)[1])


def offloading_config(extra):
    """What vLLM makes of it, for a Llama of 8 B parameters on one GPU."""
    blocks_per_chunk = extra.get("blocks_per_chunk", extra.get("block_size", 16) // 16)
    return SimpleNamespace(
        groups=(
            SimpleNamespace(
                tokens_per_block=16,
                layer_names=tuple(f"model.layers.{i}.attn" for i in range(32)),
                group_id=0,
            ),
        ),
        worker_kv_bytes_per_block=16 * 128 * 1024,
        enable_kv_cache_events=False,
        extra_config=extra,
        engine_id="docs",
        model=SimpleNamespace(name="no/such-model", dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=blocks_per_chunk),
        parallel=SimpleNamespace(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout="LBHNC",
    )


@pytest.mark.parametrize("name", ["gpu", "cpu-server", "drop-in", "ours", "readme"])
def test_every_configuration_is_one(name):
    raw = transfer_config(name)
    assert raw["kv_connector"] == "OffloadingConnector"
    assert raw["kv_role"] == "kv_both"
    extra = raw["kv_connector_extra_config"]
    assert extra["spec_name"] == "ShmOffloadingSpec"
    assert extra["spec_module_path"] == "shmoffload.vllm.spec"
    settings = read_settings(offloading_config(extra))
    assert settings.config.num_slots > 0
    types = [tier["type"] for tier in extra["secondary_tiers"]]
    assert [tier.type for tier in settings.config.tier] == types


def test_the_gpu_command_is_as_large_as_it_says():
    extra = transfer_config("gpu")["kv_connector_extra_config"]
    config = read_settings(offloading_config(extra)).config
    assert extra["cpu_bytes_to_use"] == 64 * GIB
    assert config.block_bytes == 16 * (1 << 20)
    assert config.tier[0].max_bytes == "1TiB"


def test_the_drop_in_needs_two_keys_only():
    vllms = transfer_config("drop-in")["kv_connector_extra_config"]
    ours = {"spec_name", "spec_module_path"}
    settings = read_settings(offloading_config(vllms))
    assert settings.notes == () or all("model" in note for note in settings.notes)
    assert ours < set(vllms)
    assert "shmoffload" not in vllms


def test_the_daemon_serves_what_vllm_is_told():
    """A limit that both act on is the engine's default too, or it says which."""
    extra = transfer_config("ours")["kv_connector_extra_config"]
    engine = read_settings(offloading_config(extra)).config
    daemon = from_toml(marked("toml", "daemon"), tiers_only=True)
    assert daemon.session.name == engine.session.name
    assert differing_key(daemon, engine) == ""


def test_the_yaml_gives_the_pod_shared_memory():
    spec = yaml.safe_load(marked("yaml", "kubernetes"))["spec"]
    (container,) = spec["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "hostPath" in volumes[mounts["/var/cache/shmoffload"]]


def test_the_trial_has_keys_that_the_tier_knows():
    extra = transfer_config("trial")["kv_connector_extra_config"]
    (tier,) = extra["secondary_tiers"]
    assert tier["module_path"] == tier_module.__name__
    own = {k: v for k, v in tier.items() if k not in {"type", "module_path"}}
    vllm_config = offloading_config(extra)
    config, _ = read_options(
        own, vllm_config, row_bytes=1 << 21, is_replicated=False, engine="docs"
    )
    assert config.tier[0].type == tier["tier"]


def test_every_metric_is_in_the_table():
    # A row is | `name without its prefix` | `label`, `label` | metric_names' text |.
    rows = re.findall(
        r"^\| `(\w+)` \| (.*?) \|", DOC.split("## Metrics")[1], re.MULTILINE
    )
    said = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    prefixes = ("vllm:kv_offload_", "vllm:shmoffload_")
    assert said == {
        name.removeprefix(prefixes[0]).removeprefix(prefixes[1]): set(labels)
        for name, (_, labels, _) in DEFINITIONS.items()
    }


def test_the_planner_answers(tmp_path):
    requests = [
        {"timestamp": 1000 * i, "input_length": 1024, "output_length": 8}
        | {"hash_ids": [1, i]}
        for i in range(2, 30)
    ]
    lines = "\n".join(json.dumps(request) for request in requests)
    (tmp_path / "trace.jsonl").write_text(lines)
    reader = Reader(tmp_path, session="")
    shown = reader.run(f"cd {tmp_path} && {marked('command', 'plan')}")
    assert {"auto", "lru", "min"} <= set(" ".join(shown).split())


# The command for a machine without a GPU, for real --------------------------------


def local(text, *, port, model, folder, session):
    """Return a command of the document for this test: smaller, and nowhere else."""
    for said, mine in (
        ("shmoffload status", f"shmoffload status --session {session}"),
        ("8000", str(port)),
        ("Qwen/Qwen3-0.6B", str(model)),
        ("/tmp/shmoffload-vllm", str(folder)),
        ("536870912", str(64 << 20)),
        ('"cpu_bytes_to_use": 268435456', f'"cpu_bytes_to_use": {32 << 20}'),
        ('"1GiB"}]', f'"64MiB"}}], "shmoffload": {{"session": "{session}"}}'),
    ):
        text = text.replace(said, mine)
    return text


class Reader:
    """Somebody who pastes the commands into a shell of vLLM's environment."""

    def __init__(self, folder, session):
        self.env = environment(folder)
        self.env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.folder, self.session = folder, session
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def run(self, command):
        """Run a command; return its lines."""
        done = subprocess.run(
            ["bash", "-c", command],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout.splitlines()

    @contextlib.contextmanager
    def server(self, command):
        """Run a command that serves; SIGTERM at the end."""
        log = self.folder / "server.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec env {command}"],
                env=self.env,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        server = Server(process, port=self.port, log=log, session=self.session)
        try:
            wait_until(server.is_ready, timeout_s=START_TIMEOUT_S, what="the server")
            yield
            server.stop()
        finally:
            server.clear()


def cached_tokens(line):
    return json.loads(line.partition(":")[2])["cached_tokens"]


def tokens_from(source, lines):
    """Return the value of one line of ``vllm:prompt_tokens_cached_by_source``."""
    pattern = rf'^vllm:prompt_tokens_cached_by_source_total{{.*"{source}".*}} (\S+)$'
    found = [re.match(pattern, line) for line in lines]
    return sum(float(match[1]) for match in found if match)


@pytest.mark.timeout(900)
def test_the_cpu_command_finds_a_prompt_again(session_name, model, tmp_path):
    reader = Reader(tmp_path, session_name)
    start, ask, params = (
        local(
            marked("command", name),
            port=reader.port,
            model=model,
            folder=tmp_path / "disk",
            session=session_name,
        )
        for name in ("cpu-server", "cpu-ask", "cpu-params")
    )
    with reader.server(start):
        first, reset, second, *rest = reader.run(ask)
        usage = json.loads("".join(reader.run(params)))["usage"]
        whole = (usage["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert whole > 400
        assert json.loads(reset) == {"success": True}
        assert cached_tokens(first) == 0
        assert cached_tokens(second) == whole
        assert tokens_from("host", rest) == whole
        assert any(session_name in line for line in rest), rest
    with reader.server(start):
        first, *_ = reader.run(ask)
        assert cached_tokens(first) == whole
        metrics = reader.run(f"curl -s http://127.0.0.1:{reader.port}/metrics")
        assert tokens_from("disk", metrics) == whole
