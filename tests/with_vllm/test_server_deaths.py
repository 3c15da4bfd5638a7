"""Ends of a server: in order and by SIGKILL of each of its processes.

Each end leaves no process and no name of ours within ten seconds, and the disk tier
whole: the next server on the same folder finds every block. One server follows the
other here, so the tests run in the order in which they are written.
"""

import contextlib
import os
import time

import pytest
from server_kit import BLOCK_TOKENS, GONE_TIMEOUT_S, offload, serve
from server_traffic import Change, ask, make_prompt, make_prompts, num_blocks

from shmoffload.testing import leaks
from shmoffload.testing.poll import wait_until

pytestmark = pytest.mark.timeout(400)

PROMPTS = make_prompts("deaths")
BLOCKS = num_blocks(PROMPTS)
TOKENS = BLOCKS * BLOCK_TOKENS
CACHED = [192, 320, 64, 672]
ORPHANED_S = 3.0


class Lives:
    """The server that runs now, and the way to the next one."""

    def __init__(self, start, stack):
        self._start = start
        self._stack = stack
        self.server = None

    def begin(self):
        """Start the next server; the one before has ended."""
        self._stack.close()
        self.server = self._stack.enter_context(self._start())
        return self.server


@pytest.fixture(scope="module")
def lives(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("deaths")
    tier = {"type": "slab", "path": str(folder / "slab"), "max_bytes": "64MiB"}
    # One session name: the next server meets whatever the last one left.
    extra = offload(leaks.new_session_name(), [tier])
    with contextlib.ExitStack() as stack:
        yield Lives(lambda: serve(model, folder, extra), stack)


@pytest.fixture(scope="module")
def stored(lives, reference):
    """The first server has stored every block."""
    server = lives.begin()
    assert ask(server, reference, PROMPTS) == [0, 0, 0, 0]
    server.wait_tier("slab", "blocks_written", BLOCKS)


def rise(lives, reference):
    """Start the next server: its first requests are answered from disk."""
    server = lives.begin()
    change = Change(server)
    assert ask(server, reference, PROMPTS) == CACHED
    change.expect_cached(disk=TOKENS)
    status = server.status()
    assert status["status"] == "healthy"
    assert status["tiers"][0]["blocks_bad"] == 0


def unfinished(server, reference, name):
    """Ask something new, so that stores to the tier are under way right after."""
    ask(server, reference, [make_prompt(name, 900)], max_tokens=1)


@pytest.mark.usefixtures("stored")
def test_sigterm_without_grace_leaves_nothing(lives, reference):
    began_s = time.monotonic()
    lives.server.stop()
    assert time.monotonic() - began_s < GONE_TIMEOUT_S
    rise(lives, reference)


@pytest.mark.usefixtures("stored")
def test_killed_engine_core_leaves_nothing(lives, reference):
    server = lives.server
    unfinished(server, reference, "engine core")
    server.kill(*server.pids("EngineCore"))
    server.wait_ended()
    rise(lives, reference)


@pytest.mark.usefixtures("stored")
def test_killed_gpu_worker_leaves_nothing(lives, reference):
    server = lives.server
    unfinished(server, reference, "gpu worker")
    server.kill(*server.pids("Worker"))
    server.wait_ended()
    rise(lives, reference)


@pytest.mark.usefixtures("stored")
def test_killed_api_server_keeps_ours_as_long_as_the_engine_core(lives):
    server = lives.server
    engine_core = server.pids("EngineCore")
    assert len(engine_core) == 1
    before = server.ours()
    assert len(before) == 2, before  # the supervisor and one tier worker
    server.kill(server.process.pid)
    server.process.wait(timeout=GONE_TIMEOUT_S)
    orphaned_s = time.monotonic()
    wait_until(
        lambda: time.monotonic() - orphaned_s > ORPHANED_S,
        timeout_s=ORPHANED_S + 5,
        what="some time as orphans",
    )
    # vLLM leaves both running; so do we.
    assert server.pids("EngineCore") == engine_core
    assert server.ours().keys() == before.keys()
    assert server.status()["engine"]["alive"]
    server.kill(*engine_core)
    server.wait_ended()
    assert not os.path.exists(f"/proc/{engine_core[0]}")
