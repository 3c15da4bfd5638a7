"""Engines under a daemon whose file has tiers only, as beside vLLM."""

import signal
import subprocess
import sys

from engine_kit import BLOCK_BYTES, keys_of, load, request, store

from shmoffload.engine import Engine
from shmoffload.wire.config import from_toml

LONG_S = 30.0
TIERS = """
[session]
name = "{name}"
[[tier]]
type = "slab"
path = "{path}"
max_bytes = "8MiB"
min_free = 0
"""


def test_the_engine_says_primary_and_namespace(tmp_path, session_name, monkeypatch):
    monkeypatch.setenv("SHMOFFLOAD_RUNTIME_DIR", str(tmp_path / "run"))
    tiers = TIERS.format(name=session_name, path=tmp_path / "slab")
    file = tmp_path / "serve.toml"
    file.write_text(tiers)
    keys = keys_of(0, 4)
    with subprocess.Popen(
        [sys.executable, "-m", "shmoffload.cli", "serve", "-c", str(file)],
        stderr=subprocess.PIPE,
        text=True,
    ) as daemon:
        try:
            assert "ready" in daemon.stderr.readline()
            for namespace, num_hits in (("a", 0), ("a", 4), ("b", 0)):
                said = f'namespace = "{namespace}"\n[primary]\nslots = 4\n'
                said += f"block_bytes = {BLOCK_BYTES}\n[[tier]]"
                with Engine(from_toml(tiers.replace("[[tier]]", said))) as engine:
                    ctx = request(engine, "r")
                    assert load(engine, ctx, keys) == num_hits
                    store(engine, ctx, keys)
                    engine.on_request_finished(ctx)
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(LONG_S) == 0
        finally:
            daemon.terminate()
