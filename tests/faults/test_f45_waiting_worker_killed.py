"""F45: a worker that is killed while it waits for work blocks nobody's work."""

import ast
import mmap
import os
import sys
from pathlib import Path

import engine_kit as kit
import pytest
from faults_kit import Tap, check_quiet, keys, make_config
from late_faults_kit import (
    WAIT_S,
    engine_process,
    hear,
    pids,
    tell,
    wait_nothing_left,
    wait_up,
    word,
)
from supervisor_kit import pids_of, wait_gone

import shmoffload
from shmoffload.engine import Engine
from shmoffload.testing.faults.deaths import Death, strike
from shmoffload.testing.poll import wait_until
from shmoffload.wire.session import TierWord

pytestmark = pytest.mark.timeout(300)
PACKAGE = Path(shmoffload.__file__).parent


def test_f45_the_replacement_gets_the_next_job(session_name, tmp_path):
    """Ten times; each job is sent once, to a queue that no dead process holds."""
    tiers = [{**kit.slab(tmp_path, min_free=0), "nice": 0}]
    config = make_config(session_name, tiers, slots=48, restart_backoff_max_s=0.05)
    with Engine(config) as engine:
        for turn in range(10):
            (victim,) = pids(engine)
            strike(victim, Death.SIGKILL)  # nothing was sent: it waits for work
            wait_gone([victim])
            wait_until(
                lambda: kit.step(engine) or not engine.tiers[0].is_up,
                timeout_s=WAIT_S,
                what="the death to be noticed",
            )
            wait_up(engine)
            tap = Tap(engine)
            ctx = kit.request(engine, f"r{turn}")
            kit.store(engine, ctx, keys(turn))
            assert engine.wait_idle(WAIT_S)
            engine.on_request_finished(ctx)
            kit.step(engine)
            assert tap.said("store") == [[f"r{turn}", turn]]
            assert [done.failed_idx for done in tap.done] == [b""]
        assert word(engine, TierWord.RESIDENT_BLOCKS) == 10
        check_quiet(engine)
        kit.drop_primary(engine)
        assert kit.load(engine, kit.request(engine, "l"), keys(*range(10))) == 10


def test_f45_jobs_that_were_queued_are_answered_and_not_resent(session_name, tmp_path):
    """Stopped first, so that its queue fills; then killed: each job fails once."""
    tiers = [{**kit.slab(tmp_path, min_free=0), "nice": 0}]
    with Engine(make_config(session_name, tiers, slots=48)) as engine:
        (victim,) = pids(engine)
        strike(victim, Death.HANG)
        tap = Tap(engine)
        for n in range(20):
            ctx = kit.request(engine, f"r{n}")
            kit.store(engine, ctx, keys(n))
            engine.on_request_finished(ctx)
        assert engine.tiers[0].num_open_jobs == len(tap.job_ids) == 20
        strike(victim, Death.SIGKILL)
        wait_gone([victim])
        wait_until(
            lambda: kit.step(engine) or not engine.tiers[0].num_open_jobs,
            timeout_s=WAIT_S,
            what="all jobs to be answered",
        )
        wait_up(engine)
        assert tap.done == []
        check_quiet(engine)
        kit.store(engine, kit.request(engine, "again"), keys(30))
        assert engine.wait_idle(WAIT_S)
        assert word(engine, TierWord.RESIDENT_BLOCKS) == 1


# Started by exec ----------------------------------------------------------------------

ENGINE = """
import mmap, threading
# What a fork would inherit: a thread that holds a lock, a mapping, libraries.
marked = mmap.mmap(os.open(sys.argv[2], os.O_RDWR), 4096)
lock = threading.Lock()
lock.acquire()
threading.Thread(target=lock.acquire, daemon=True).start()
engine = Engine(kit.make_config(sys.argv[1], [{"type": "memory", "nice": 0}] * 1))
say("up")
hear()
engine.close()
"""


def test_f45_workers_are_new_programs_and_no_forks(session_name, tmp_path):
    """They have none of the scheduler's mappings, threads or libraries."""
    mark = tmp_path / "mark-of-the-scheduler"
    mark.write_bytes(bytes(mmap.PAGESIZE))
    with engine_process(ENGINE, session_name, mark) as engine:
        assert hear(engine) == "up"
        assert str(mark) in Path(f"/proc/{engine.pid}/maps").read_text()
        children = [pid for pid in pids_of(session_name) if pid != engine.pid]
        assert len(children) == 2
        for pid in children:
            place = Path(f"/proc/{pid}")
            assert os.readlink(place / "exe") == os.path.realpath(sys.executable)
            maps = (place / "maps").read_text()
            assert str(mark) not in maps
            assert not {"libtorch", "libcuda", "_multiprocessing"} & {
                name.partition(".")[0] for name in maps.replace("/", " ").split()
            }
        tell(engine, "end")
        assert engine.wait(WAIT_S) == 0
    wait_nothing_left(session_name)


def test_f45_nothing_in_the_package_forks():
    """``subprocess`` without ``preexec_fn`` execs; no other way is in use."""
    starts = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            assert name not in ("os.fork", "os.forkpty", "pty.fork"), path
            assert not name.startswith("multiprocessing."), path
            if name == "subprocess.Popen":
                starts += 1
                assert "preexec_fn" not in [word.arg for word in node.keywords], path
    assert starts >= 1
