"""F56: what comes over a border is data, whatever it is; it runs nothing.

Each border once with the words of the scenario. At random and for longer:
``make fuzz`` (``test_fuzz_worker``, ``test_fuzz_engine``, ``test_fuzz_control``).
"""

import array
import ast
import stat
import subprocess
import sys
import time
from pathlib import Path

import engine_kit as kit
import msgspec
import pytest
from faults_kit import keys, make_config
from late_faults_kit import WAIT_S, Prompted, wait_nothing_left
from supervisor_kit import num_fds
from worker_kit import ENGINE_EPOCH, WORKER_EPOCH, WorkerRig

import shmoffload
from shmoffload.engine import Engine
from shmoffload.supervisor.spawn import connect_daemon
from shmoffload.testing.poll import wait_until
from shmoffload.testing.tier_tests import key_of
from shmoffload.wire.channel import ChannelClosedError
from shmoffload.wire.messages import (
    MAX_FRAME_BYTES,
    JobDone,
    JobPart,
    Resident,
    encode_frame,
)
from shmoffload.wire.session import TierWord

pytestmark = pytest.mark.timeout(300)
PACKAGE = Path(shmoffload.__file__).parent
NUM_SLOTS = 16
GARBAGE = {
    "random bytes": bytes(range(256)) * 4,
    "one byte": b"\xc1",
    "an array of 4 GiB that is not there": b"\xdd\xff\xff\xff\xff",
    "a text of 4 GiB that is not there": b"\x91\x92\xa1J\xdb\xff\xff\xff\xff",
    "an unknown tag": b"\x91\x92\xa1Z\x01",
    "no tag": b"\x91\x90",
    "a nest": b"\x91" * 60_000,
    "a frame of the largest size": b"\x00" * MAX_FRAME_BYTES,
    "a program": b"\x80\x04cposix\nsystem\n\x94\x8c\x05false\x94\x85R.",
}


# Into a worker ------------------------------------------------------------------------


def job(job_id, job_keys, slots, **more):
    fields = {
        "engine_epoch": ENGINE_EPOCH,
        "worker_epoch": WORKER_EPOCH,
        "job_id": job_id,
        "is_promotion": True,
        "req_id": "r",
        "deadline_s": time.monotonic() + WAIT_S,
        "keys": job_keys,
        "slots": array.array("i", slots).tobytes(),
        "num_left": 0,
        "start": 0,
    }
    return JobPart(**{**fields, **more})


KEY = key_of(0)
BENT_JOBS = {
    "a slot behind the last": lambda n: job(n, [KEY], [NUM_SLOTS]),
    "a slot before the first": lambda n: job(n, [KEY], [-1]),
    "the largest slot": lambda n: job(n, [KEY], [2**31 - 1]),
    "the smallest slot": lambda n: job(n, [KEY], [-(2**31)]),
    "no key": lambda n: job(n, [b""], [3]),
    "a short key": lambda n: job(n, [KEY[:4]], [3]),
    "a long key": lambda n: job(n, [KEY + b"12345"], [3]),
    "a slot twice": lambda n: job(n, [KEY, key_of(1)], [3, 3]),
    "fewer slots than keys": lambda n: job(n, [KEY, key_of(1)], [3]),
    "half a slot": lambda n: msgspec.structs.replace(job(n, [KEY], [3]), slots=b"\0"),
    "no time": lambda n: job(n, [KEY], [3], deadline_s=float("nan")),
}


@pytest.mark.parametrize("tier_type", ["slab", "memory"])
def test_f56_into_a_worker(session_name, tmp_path, tier_type):
    """It counts and lives; not one byte of the region changes, and none outside."""
    tier = {"type": tier_type, "path": str(tmp_path), "max_bytes": "1MiB", "nice": 0}
    if tier_type == "memory":
        del tier["path"]
    with WorkerRig(session_name, slots=NUM_SLOTS, **tier) as rig:
        rig.ready()
        rig.fill(0, KEY)
        assert rig.run([KEY], [0]) == ([], "")
        before = bytes(rig.region._bytes)
        page = [
            word
            for i, word in enumerate(rig.page.words)
            if not 0 <= i - rig.page.tier_base(0) < TierWord.HITS
        ]
        for data in GARBAGE.values():
            rig.send(data)
        rig.wait_for(TierWord.GARBAGE_FRAMES, len(GARBAGE))
        for i, bent in enumerate(BENT_JOBS.values()):
            rig.send(encode_frame([bent(1000 + i)]))
            answer = rig.answer(1000 + i)
            assert answer.failed_idx
            assert answer.error
        num_bad = len(GARBAGE) + len(BENT_JOBS)
        assert rig.word(TierWord.GARBAGE_FRAMES) == num_bad
        for part in (
            job(2000, [KEY], [3], start=1),
            job(2001, [KEY], [3], engine_epoch=ENGINE_EPOCH + 1),
            job(2002, [KEY], [3], worker_epoch=WORKER_EPOCH + 1),
        ):  # of nobody that could be answered
            rig.send(encode_frame([part]))
        rig.wait_for(TierWord.GARBAGE_FRAMES, num_bad + 3)
        assert bytes(rig.region._bytes) == before
        assert page == [
            word
            for i, word in enumerate(rig.page.words)
            if not 0 <= i - rig.page.tier_base(0) < TierWord.HITS
        ]
        assert {m.job_id for m in rig.said(JobDone)} & {2000, 2001, 2002} == set()
        assert rig.run([KEY], [5], load=True) == ([], "")
        assert rig.holds(5, KEY)
        assert rig.process.poll() is None


# Into an engine -----------------------------------------------------------------------


def test_f56_into_an_engine(session_name):
    """From one that speaks in a worker's name: dropped, counted, nothing believed."""
    tiers = [{"type": "memory", "nice": 0}]
    with Engine(make_config(session_name, tiers, slots=NUM_SLOTS)) as engine:
        link, tier = engine._links[0], engine.tiers[0]
        ctx = kit.request(engine, "a")
        kit.store(engine, ctx, keys(0, 1))
        assert engine.wait_idle(WAIT_S)
        link._channel = prompted = Prompted(link._channel)
        epochs = (engine._epoch, tier.worker_epoch)
        before = bytes(engine.region._bytes)
        prompted.frames += list(GARBAGE.values())
        kit.step(engine)
        assert link.garbage_frames == len(GARBAGE)
        strangers = [
            JobDone(*epochs, 10**9),  # a job that never was
            JobDone(epochs[0] + 1, epochs[1], 1),
            JobDone(epochs[0], epochs[1] + 1, 1),
            JobDone(*epochs, 1),  # answered already
            JobDone(*epochs, -1, failed_idx=b"\xff\xff\xff\x7f"),
            Resident(epochs[1] + 1, added=keys(7)),
            Resident(epochs[1], added=[b"", b"x" * 4, b"y" * 200]),
        ]
        for message in strangers:
            prompted.frames.append(encode_frame([message]))
        kit.step(engine)
        assert tier.num_resident == 2
        assert bytes(engine.region._bytes) == before
        # And a lie about an open job: positions that it does not have.
        kit.store(engine, kit.request(engine, "b"), keys(2))
        lie = array.array("i", [5, -3, 2**31 - 1]).tobytes()
        for job_id in list(tier._open):
            prompted.frames.append(encode_frame([JobDone(*epochs, job_id, lie)]))
        assert engine.wait_idle(WAIT_S)
        assert not engine.is_broken
        engine.manager.check_integrity()
        kit.drop_primary(engine)
        assert kit.load(engine, kit.request(engine, "c"), keys(0, 1)) == 2


# Into a daemon ------------------------------------------------------------------------


def test_f56_into_a_daemons_socket(session_name, tmp_path, monkeypatch):
    """A socket file of ours alone, no network; who talks nonsense is hung up on."""
    monkeypatch.setenv("SHMOFFLOAD_RUNTIME_DIR", str(tmp_path / "run"))
    file = tmp_path / "serve.toml"
    file.write_text(
        f'[session]\nname = "{session_name}"\n[[tier]]\ntype = "memory"\nnice = 0\n'
    )
    command = [sys.executable, "-m", "shmoffload.cli", "serve", "-c", str(file)]
    with (tmp_path / "log").open("w") as log:
        daemon = subprocess.Popen(command, stderr=log)
    try:
        wait_until(
            lambda: "ready: " in (tmp_path / "log").read_text(),
            timeout_s=WAIT_S,
            what="the daemon",
        )
        (where,) = (tmp_path / "run").glob("*.sock")
        assert stat.S_IMODE(where.stat().st_mode) == 0o600
        inodes = {
            target.removeprefix("socket:[").removesuffix("]")
            for fd in Path(f"/proc/{daemon.pid}/fd").iterdir()
            if (target := str(fd.readlink())).startswith("socket:")
        }
        for kind in ("tcp", "tcp6", "udp", "udp6"):
            table = Path(f"/proc/{daemon.pid}/net/{kind}").read_text().splitlines()[1:]
            assert not inodes & {line.split()[9] for line in table}
        before = num_fds(daemon.pid)
        for data in GARBAGE.values():
            channel = connect_daemon(session_name)
            channel.send(data)

            def is_hung_up(channel=channel):
                try:
                    channel.receive()
                except ChannelClosedError:
                    return True
                return False

            wait_until(is_hung_up, timeout_s=WAIT_S, what="the end of that connection")
            channel.close()
        wait_until(
            lambda: num_fds(daemon.pid) == before, timeout_s=WAIT_S, what="no leak"
        )
        assert daemon.poll() is None
        config = kit.make_config(session_name, [{"type": "memory", "nice": 0}])
        with Engine(config) as one:  # of the daemon's limits
            kit.store(one, kit.request(one, "a"), keys(1))
            assert one.wait_idle(WAIT_S)
    finally:
        daemon.terminate()
        assert daemon.wait(WAIT_S) == 0
    wait_nothing_left(session_name)


# Nothing runs -------------------------------------------------------------------------

FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "numpy.load"}


def test_f56_nothing_in_the_product_decodes_programs():
    """Package and tools; and every decoder of ours has a type and is strict."""
    decoders = 0
    for path in [
        *PACKAGE.rglob("*.py"),
        *PACKAGE.parent.joinpath("tools").rglob("*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names]
                names.append(getattr(node, "module", None) or "")
                found = {name.partition(".")[0] for name in names} & FORBIDDEN_MODULES
                assert not found, path
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            assert name not in FORBIDDEN_CALLS, path
            if name.startswith("msgspec.") and name.endswith(("Decoder", "decode")):
                decoders += 1
                words = {word.arg: ast.unparse(word.value) for word in node.keywords}
                is_typed = "type" in words or (
                    name.endswith("Decoder") and len(node.args) == 1
                )
                assert is_typed, path
                assert words.get("strict", "True") == "True", path
    assert decoders >= 6
