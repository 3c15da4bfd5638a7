"""F42: no lock outlives who held it, and none is between a worker and the scheduler."""

import ast
import fcntl
import signal
from pathlib import Path

import engine_kit as kit
import pytest
from faults_kit import check_quiet, faulty, keys, make_config, not_waiting
from late_faults_kit import WAIT_S, finish_all, patched, pids, wait_up
from supervisor_kit import wait_gone
from worker_kit import WorkerRig

import shmoffload
from shmoffload.engine import Engine
from shmoffload.testing.faults.control import Call
from shmoffload.testing.faults.deaths import Death, resume, strike
from shmoffload.testing.poll import wait_until
from shmoffload.testing.tier_tests import key_of
from shmoffload.wire.session import SessionPage, TierWord

pytestmark = pytest.mark.timeout(300)
PACKAGE = Path(shmoffload.__file__).parent
SQL = """
from shmoffload.worker.tiers.slab_index import SlabIndex
real = SlabIndex._open
def _open(self):
    answer = real(self)
    self._db.set_trace_callback(lambda sql: sql.startswith({word!r}) and die())
    return answer
SlabIndex._open = _open
"""
# The moments at which a worker of a slab dies with a lock in its hands; what it was
# told to do last, and whether that is found again.
MOMENTS = {
    "the directory's lock, only now taken": (
        "from shmoffload.worker.tiers.place import Place\nPlace.free_bytes = die",
        "start",
    ),
    "the index's write lock, before its first row": (
        SQL.format(word="INSERT OR"),
        "store",
    ),
    "the index's write lock, before the commit": (SQL.format(word="COMMIT"), "store"),
    "the tier's own lock": (
        "from shmoffload.worker.tiers.slab_table import SlabTable\n"
        "SlabTable.reserve = die",
        "store",
    ),
    "the lock of the jobs' queue": (
        "from shmoffload.worker.jobs import JobQueues\nJobQueues.done = die",
        "store",
    ),
    "the counters' lock, before the words": (
        "from shmoffload.worker.replies import Counters\n"
        "Counters.add = lambda self, _: self._lock.acquire() and die()",
        "store",
    ),
    "the lock of the answers": (
        "from shmoffload.worker.replies import Replies\n"
        "Replies._sent = lambda self, *_: self._lock.locked() and tier_is_up and die()",
        "store",
    ),
}
UP_FIRST = """
from shmoffload.worker.serve import Worker
tier_is_up = []
real_serve = Worker._serve
def _serve(self, wakeup):
    tier_is_up.append(1)
    return real_serve(self, wakeup)
Worker._serve = _serve
"""


@pytest.fixture
def rig(session_name, tmp_path):
    tier = {"type": "slab", "path": str(tmp_path), "max_bytes": "1MiB", "nice": 0}
    with WorkerRig(session_name, **tier) as made:
        yield made


def store(rig, *numbers):
    for slot, n in enumerate(numbers):
        rig.fill(slot, key_of(n))
    return rig.run([key_of(n) for n in numbers], range(len(numbers)))


@pytest.mark.parametrize("moment", MOMENTS)
def test_f42_the_next_worker_finds_no_lock_in_its_way(rig, moment):
    """Killed with it; the next one opens, serves what was and takes what is new."""
    patch, last = MOMENTS[moment]
    rig.ready()
    assert store(rig, 0, 1) == ([], "")
    rig.process.kill()
    rig.process.wait()
    rig.channel.close()
    if last == "start":
        rig.start(wrap=patched(patch))
    else:
        rig.start(wrap=patched(UP_FIRST + patch))
        for slot, n in enumerate((2, 3)):
            rig.fill(slot, key_of(n))
        rig.submit([key_of(2), key_of(3)], [0, 1])
    assert rig.exit_code() == -signal.SIGKILL
    rig.channel.close()
    rig.ready()
    assert rig.run([key_of(0), key_of(1)], [8, 9], load=True) == ([], "")
    assert rig.holds(8, key_of(0))
    assert rig.holds(9, key_of(1))
    assert store(rig, 2, 3, 4) == ([], "")
    assert rig.run([key_of(n) for n in (2, 3, 4)], range(8, 11), load=True) == ([], "")
    assert rig.word(TierWord.BLOCKS_BAD) == 0


@pytest.mark.parametrize("death", [Death.SIGKILL, Death.HANG])
def test_f42_no_lock_of_a_worker_stops_the_scheduler(session_name, control, death):
    """It dies, or hangs for good, with the index's and the directory's locks held."""
    tiers = [faulty(control), {"type": "memory", "nice": 0}]
    with Engine(make_config(session_name, tiers, slots=32)) as engine:
        kit.store(engine, kit.request(engine, "a"), keys(0, 1))
        assert engine.wait_idle(WAIT_S)
        control.hold(Call.PUT)
        kit.store(engine, kit.request(engine, "b"), keys(2, 3))
        control.wait_held(Call.PUT, meanwhile=lambda: kit.step(engine))
        victim = pids(engine)[0]
        strike(victim, death)
        if death is Death.SIGKILL:
            wait_gone([victim])
        try:
            for turn in range(20):
                ctx = kit.request(engine, f"c{turn}")
                with not_waiting():
                    kit.scan(engine, ctx, keys(0, 1, 2, 3))
                with not_waiting():
                    kit.store(engine, ctx, keys(100 + turn))
                with not_waiting():
                    engine.on_request_finished(ctx)
        finally:
            control.release()
            if death is Death.HANG:
                resume(victim)
        wait_up(engine)
        kit.drop_primary(engine)
        found = kit.load(engine, kit.request(engine, "d"), keys(0, 1, 2, 3))
        assert found == 4
        finish_all(engine)
        check_quiet(engine)


def test_f42_a_word_that_was_cut_is_no_lock(session_name):
    """A text's sequence word stays odd: nobody waits, the next writer mends it."""
    page = SessionPage.open_or_create(config_of_one_tier(session_name))
    page.set_tier_error(0, "first")
    page.add_tier(0, TierWord.TEXT_SEQ, 1)  # its writer was killed here
    assert page.tier_error(0) == ""
    page.set_tier_error(0, "second")
    assert page.tier_error(0) == "second"
    page.unlink(session_name)
    page.close()


def config_of_one_tier(session):
    return kit.make_config(session, [{"type": "memory"}])


def calls_in_package():
    """Yield (place, dotted name, call) for every call in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", name, node


def test_f42_locks_between_processes_are_the_kernels_and_never_waited_for():
    """flock only, always LOCK_NB or LOCK_UN; no semaphore anywhere."""
    flocks = 0
    for place, name, call in calls_in_package():
        last = name.rpartition(".")[2]
        assert last not in ("Semaphore", "MessageQueue", "lockf", "BoundedSemaphore"), (
            place
        )
        if last == "flock":
            flocks += 1
            how = ast.unparse(call.args[1])
            assert "LOCK_NB" in how or "LOCK_UN" in how, place
    assert flocks >= 4


def test_f42_who_is_killed_lets_go_of_its_names_at_once(session_name, tmp_path):
    """The liveness of a session is such a lock: free when the kernel is done."""
    fs = {"type": "slab", "path": str(tmp_path), "max_bytes": "1MiB", "nice": 0}
    with WorkerRig(session_name, **fs) as rig:
        rig.ready()
        lock = next(tmp_path.rglob("lock"))
        with lock.open() as file:
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            rig.process.kill()
            rig.process.wait()

            def is_free():
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                return True

            wait_until(is_free, timeout_s=WAIT_S, what="the lock")
