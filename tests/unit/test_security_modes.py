"""All that one process makes is private whatever its umask, and names tell nothing.

Tiers under a real engine are F57; here is what else makes names: encrypted tiers, the
quarantine of ``verify``, a daemon's directory and socket, names in /dev/shm.
"""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

SECRETS = ("secret-model", "tenant-7")
MAKE = """
import json, os, sys
os.umask(int(sys.argv[1], 8))
from pathlib import Path
from shmoffload.cli.verify import verify_command
from shmoffload.supervisor import runtime_dir
from shmoffload.testing.tier_tests import deadline, key_of
from shmoffload.wire.config import from_dict
from shmoffload.wire.region import PrimaryRegion
from shmoffload.wire.session import SessionPage
from shmoffload.worker.registry import load_tier
from shmoffload.worker.seal import sealer_of

session, folder = sys.argv[2], Path(sys.argv[3])
os.environ["SHMOFFLOAD_RUNTIME_DIR"] = str(folder / "run" / "deep")
tiers = [{"type": kind, "name": f"{kind}{len(key)}", "path": f"{folder}/{kind}",
          "max_bytes": "1MiB", "min_free": 0, **key}
         for kind in ("slab", "fs")
         for key in ({}, {"key_file": f"{folder}/tenant-7.key"})]
config = from_dict({
    "session": {"name": session, "namespace": "secret-model tenant-7"},
    "primary": {"block_bytes": 4096, "slots": 4},
    "tier": tiers,
})
page = SessionPage.open_or_create(config)
region = PrimaryRegion.open(config)
region.own()
with runtime_dir.listening(session):
    for one in config.tier:
        sealer, tier = sealer_of(one, region, max_threads=8), load_tier(one.type)()
        tier.open(one, sealer.region, sealer.region.namespace)
        keys = [key_of(i) for i in range(3)]
        tier.put(keys, sealer.outgoing(keys, [0, 1, 2]), deadline())
        tier.close()
    block = next((folder / "fs").rglob(key_of(0).hex()))
    block.write_bytes(bytes(block.stat().st_size))
    sys.stdout = sys.stderr
    assert verify_command([str(folder / "fs"), "--repair"]) == 1
    sys.stdout = sys.__stdout__
    shm = Path("/dev/shm")
    made = [*folder.rglob("*"), *shm.glob(f"shmoffload.{session}.*")]
    print(json.dumps([[str(path), path.lstat().st_mode] for path in made]))
region.unlink()
region.close()
page.unlink(session)
page.close()
"""


@pytest.mark.parametrize("umask", ["000", "077"])
def test_everything_is_private_and_says_nothing(session_name, tmp_path, umask):
    (tmp_path / "tenant-7.key").write_bytes(os.urandom(32))
    (tmp_path / "tenant-7.key").chmod(0o600)
    done = subprocess.run(
        [sys.executable, "-c", MAKE, umask, session_name, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = {Path(path): mode for path, mode in json.loads(done.stdout)}
    names = {path.name for path in made}
    assert {"slab.bin", "index.sqlite", "lock", "quarantine"} <= names
    assert {f"{session_name}.sock", f"{session_name}.lock", "deep"} <= names
    assert sum(path.parent == Path("/dev/shm") for path in made) >= 3
    assert sum(path.name == "lock" for path in made) == 4  # each key a namespace
    for path, mode in made.items():
        allowed = 0o700 if stat.S_ISDIR(mode) else 0o600
        assert stat.S_IMODE(mode) == allowed, path
        if path.name != "tenant-7.key":  # the person's own
            assert not any(secret in path.name for secret in SECRETS), path
