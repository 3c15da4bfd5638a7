"""F49: two processes with hash seeds of their own name blocks alike, and share them.

That nothing in the package calls ``hash``: ``tests/unit/faults/test_name_faults``.
"""

import pytest
from late_faults_kit import WAIT_S, engine_process, hear, wait_nothing_left

pytestmark = pytest.mark.timeout(300)
# The same tokens; the key of a block is a chain of digests, as in a server.
ENGINE = """
import hashlib
from shmoffload.core.types import make_offload_key
session, folder, kind, what = sys.argv[1:]
tokens = [list(range(16 * i, 16 * i + 16)) for i in range(6)]
parent, keys = b"", []
for block in tokens:
    parent = hashlib.sha256(parent + repr(block).encode()).digest()
    keys.append(make_offload_key(parent, 1))
tier = {**kit.slab(folder, min_free=0), "type": kind, "nice": 0}
with Engine(kit.make_config(session, [tier])) as engine:
    say(hash("seed"))
    say(keys[-1].hex(), engine.config.namespace_digest.hex())
    ctx = kit.request(engine, "r")
    if what == "write":
        assert kit.store(engine, ctx, keys) == keys
        assert engine.wait_idle(60)
    say(kit.load(engine, ctx, keys))  # every byte is compared
"""


@pytest.mark.parametrize("kind", ["slab", "fs"])
def test_f49_what_one_wrote_the_other_reads(session_name, tmp_path, kind):
    said = []
    for seed, what in (("1", "write"), ("2", "read"), ("random", "read")):
        words = (session_name, tmp_path / "d", kind, what)
        env = {"PYTHONHASHSEED": seed}
        with engine_process(ENGINE, *words, env=env) as engine:
            said.append([hear(engine) for _ in range(3)])
            assert engine.wait(WAIT_S) == 0
        wait_nothing_left(session_name)
    hashes, names, loaded = zip(*said, strict=True)
    assert len(set(hashes[:2])) == 2  # the interpreter's own do differ
    assert len(set(names)) == 1
    assert loaded == ("6", "6", "6")
