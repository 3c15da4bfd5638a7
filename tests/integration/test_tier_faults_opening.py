"""A tier is up before its old blocks are found; what is found late is found."""

import os
import sys
import time

import pytest
from worker_kit import TIMEOUT_S, WorkerRig

from shmoffload.testing.poll import wait_until
from shmoffload.testing.tier_tests import key_of
from shmoffload.wire.messages import Hello, Resident
from shmoffload.wire.session import TierWord
from shmoffload.worker.opening import PATIENCE_S

KEYS = [key_of(i) for i in range(20)]
GATED = """
import os, sys
from shmoffload.worker import __main__
from shmoffload.worker.tiers import slab
from shmoffload.worker.tiers.slab import SlabTier
slab._MANY_SLOTS = 1
real = SlabTier._rows

def late(self, *args):
    with open(os.environ["SHMOFFLOAD_TEST_GATE"]) as gate:  # until the test opens it
        if gate.read() == "break":
            raise OSError(5, "Input/output error")
    return real(self, *args)

SlabTier._rows = late
sys.exit(__main__.main())
"""


@pytest.fixture
def rig(session_name, tmp_path, monkeypatch):
    """A slab with ``KEYS`` whose next worker looks for them until ``open_gate``."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    monkeypatch.setenv("SHMOFFLOAD_TEST_GATE", str(gate))
    slab = {"type": "slab", "path": str(tmp_path / "d"), "max_bytes": "4MiB"}
    with WorkerRig(session_name, **slab) as made:
        made.ready()
        for slot, key in enumerate(KEYS):
            made.fill(slot, key)
        assert made.run(KEYS, range(20)) == ([], "")
        made.process.kill()
        made.process.wait()
        made.channel.close()
        made.open_gate = gate.write_text
        made.start(wrap=lambda command: [sys.executable, "-c", GATED, *command[3:]])
        yield made


def test_few_old_blocks_are_waited_for_however_long(rig):
    """What a busy machine does to a small tier must not look like a miss."""
    rig.process.kill()
    rig.process.wait()
    rig.channel.close()
    small = GATED.replace("slab._MANY_SLOTS = 1", "slab._MANY_SLOTS = 513")
    rig.start(wrap=lambda command: [sys.executable, "-c", small, *command[3:]])
    beat = time.monotonic_ns() + int(2 * PATIENCE_S * 1e9)
    wait_until(  # it beats while it opens
        lambda: rig.word(TierWord.HEARTBEAT_NS) > beat,
        timeout_s=TIMEOUT_S,
        what="heartbeats",
    )
    assert rig.receive() == []
    rig.open_gate("go")
    assert rig.hello().num_resident == 20
    assert sorted(rig.resident()) == sorted(KEYS)


def test_a_tier_is_up_before_its_old_blocks_are_found(rig):
    hello = rig.hello()
    assert (hello.error, hello.num_resident) == ("", 0)
    assert hello.limits == "512 blocks, 4 MiB"
    assert rig.resident() == []  # and this is the whole report: the tier is up
    rig.wait_for(TierWord.WORKER_READY, 3)
    beat = rig.word(TierWord.HEARTBEAT_NS)
    new = key_of(100)
    rig.fill(30, new)
    for load in (False, True):
        failed, words = rig.run([new], [30], load=load)
        assert (failed, "looking for its old blocks" in words) == ([0], True)
    wait_until(
        lambda: rig.word(TierWord.HEARTBEAT_NS) > beat,
        timeout_s=TIMEOUT_S,
        what="a heartbeat",
    )
    rig.open_gate("go")

    def told():
        return [key for report in rig.said(Resident) for key in report.added]

    wait_until(lambda: len(told()) >= 20, timeout_s=TIMEOUT_S, what="the old blocks")
    assert sorted(told()) == sorted(KEYS)
    assert [r.is_last for r in rig.said(Resident)].count(True) == 1
    assert rig.word(TierWord.RESIDENT_BLOCKS) == 20
    assert rig.run(KEYS, range(32, 52), load=True) == ([], "")
    assert all(rig.holds(32 + i, key) for i, key in enumerate(KEYS))
    assert rig.run([new], [30]) == ([], "")


def test_a_search_that_fails_ends_the_worker_in_words(rig):
    assert rig.resident() == []
    rig.open_gate("break")
    assert rig.exit_code() == 1
    assert rig.said(Hello)[-1].error == "[Errno 5] Input/output error"


def test_sigterm_does_not_wait_for_the_search(rig):
    assert rig.resident() == []
    rig.process.terminate()
    assert rig.exit_code() == 0
    rig.channel.close()
    rig.start()
    assert sorted(rig.resident()) == sorted(KEYS)
