"""Faults about names: keys across processes, namespaces across layouts."""

import ast
import os
import subprocess
import sys
from pathlib import Path

from shmoffload.core.types import make_offload_key
from shmoffload.wire.config import from_dict
from shmoffload.wire.layout import header_matches, seal_header

PACKAGE = Path(__file__).parents[3] / "shmoffload"
RUN_TIMEOUT_S = 60.0

NAME_THINGS = """
from shmoffload.core.types import make_offload_key
from shmoffload.wire.config import from_dict
from shmoffload.wire.layout import seal_header
config = from_dict({"session": {"namespace": "m"},
                    "primary": {"block_bytes": 64, "slots": 2}})
key = make_offload_key(b"hash", 3)
print(key.hex(), config.namespace_digest.hex())
print(seal_header(key, memoryview(bytes(64)), config.namespace_digest).hex())
"""


def test_f49_names_do_not_depend_on_the_process():
    said = set()
    for seed in ("0", "1", "random"):
        done = subprocess.run(
            [sys.executable, "-c", NAME_THINGS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=True,
        )
        said.add(done.stdout)
    assert len(said) == 1
    callers = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "hash"
    ]
    assert callers == []


def digest(namespace="model/rev/bf16", block_bytes=4096, **session):
    return from_dict(
        {
            "session": {**session, "namespace": namespace},
            "primary": {"block_bytes": block_bytes, "slots": 2},
        }
    ).namespace_digest


def test_f50_another_model_or_layout_is_another_namespace():
    """The server's adapter spells out the namespace; here: it always counts."""
    base = digest()
    assert digest() == base
    assert digest(name="another-session") == base
    others = [
        digest("model/rev2/bf16"),
        digest("model/rev/fp8"),
        digest(block_bytes=8192),
        digest("model/rev/bf16\0"),
        digest(""),
    ]
    assert len({base, *others}) == 6
    key, payload = make_offload_key(b"hash"), memoryview(bytes(64))
    header = memoryview(seal_header(key, payload, base))
    assert header_matches(header, key, payload, base)
    assert not any(header_matches(header, key, payload, other) for other in others)
