"""Processes that open a session's page and region and die where they are told to."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from shmoffload.wire import names
from shmoffload.wire.config import from_dict

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 30.0
PRELUDE = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from shmoffload.core.types import make_offload_key
from shmoffload.wire import names, region_join, room
from shmoffload.wire.config import from_dict
from shmoffload.wire.region import PrimaryRegion
from shmoffload.wire.session import SessionPage
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
def say(*words): print(*words, flush=True)
config = from_dict({{"session": {{"name": sys.argv[1]}},
                    "primary": {{"slots": 64, "block_bytes": 4096}}}})
"""
OPEN = "region = PrimaryRegion.open(config, timeout_s=20.0)\n"
STAY = "say(os.fstat(region.fd).st_ino)\nsys.stdin.readline()\n"


def config_of(session):
    return from_dict(
        {"session": {"name": session}, "primary": {"slots": 64, "block_bytes": 4096}}
    )


@contextlib.contextmanager
def running(code, session):
    """A process that runs ``code`` after the prelude; killed and reaped at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code, session],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def run_to_death(code, session):
    """Run a process that kills itself."""
    with running(code, session) as process:
        assert process.wait(START_TIMEOUT_S) == -signal.SIGKILL


def our_names(session):
    return sorted(n for n in os.listdir(names.SHM_DIR) if f".{session}." in n)
