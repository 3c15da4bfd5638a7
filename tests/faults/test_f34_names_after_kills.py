"""F34: whoever is killed leaves no name for good, and nobody's late end takes others'.

Twenty lives and deaths in a row: ``test_twenty_lives_and_deaths_leave_no_trace``;
here what happens beside, meanwhile and between.
"""

import contextlib
import os
import signal
import time

import engine_kit as kit
import pytest
from late_faults_kit import (
    WAIT_S,
    engine_process,
    hear,
    tell,
    wait_nothing_left,
    word,
)
from region_kit import (
    OPEN,
    STAY,
    config_of,
    our_names,
    run_to_death,
    running,
)
from supervisor_kit import names_of, pids_of, sweep_to_end, wait_gone

from shmoffload.cli import main
from shmoffload.engine import Engine
from shmoffload.errors import NoSessionError, StartError
from shmoffload.testing.poll import wait_until
from shmoffload.wire import names
from shmoffload.wire.region import PrimaryRegion
from shmoffload.wire.session import SessionPage, TierWord

pytestmark = pytest.mark.timeout(300)
NUM = 6
ENGINE = """
session, folder = sys.argv[1:]
tiers = [{**kit.slab(folder, min_free=0), "nice": 0}, {"type": "memory", "nice": 0}]
engine = Engine(kit.make_config(session, tiers))
keys = kit.keys_of(0, 6)
say("up", kit.load(engine, kit.request(engine, "l"), keys))
kit.store(engine, kit.request(engine, "s"), keys)
assert engine.wait_idle(60)
say("stored")
while hear() == "step":
    say("stepped", kit.load(engine, kit.request(engine, "again"), keys))
engine.close()
"""


def use_of_shm(session):
    """Names of a session, and bytes that they take."""
    sizes = [os.stat(f"/dev/shm/{n}").st_blocks * 512 for n in names_of(session)]
    return len(sizes), sum(sizes)


def test_f34_everything_is_killed_beside_a_live_session(session_name, tmp_path):
    """Of a fixed name each time: use returns, the start succeeds, the other lives."""
    tiers = [{"type": "memory", "nice": 0}]
    with Engine(kit.make_config(f"{session_name}-live", tiers)) as live:
        kit.store(live, kit.request(live, "a"), kit.keys_of(50, NUM))
        assert live.wait_idle(WAIT_S)
        mine = names_of(live.config.session.name)
        worker = word(live, TierWord.WORKER_PID)
        used = set()
        for life in range(4):
            with engine_process(ENGINE, session_name, tmp_path / "t") as engine:
                assert hear(engine) == f"up {NUM if life else 0}"
                assert hear(engine) == "stored"
                used.add((*use_of_shm(session_name), len(pids_of(session_name))))
                victims = [engine.pid, *pids_of(session_name)]
                for pid in victims:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                wait_gone(victims)
            assert len(names_of(session_name)) == 3  # nobody is left to remove them
            kit.step(live)
        assert len(used) == 1, used
        sweep_to_end(session_name)
        assert names_of(live.config.session.name) == mine
        assert word(live, TierWord.WORKER_PID) == worker
        kit.drop_primary(live)
        found = kit.load(live, kit.request(live, "b"), kit.keys_of(50, NUM))
        assert found == NUM


def test_f34_late_close_of_an_old_engine_spares_the_new_one(session_name, tmp_path):
    """Somebody removed its names; a new engine has them when it ends."""
    config = kit.make_config(session_name, [{"type": "memory", "nice": 0}])
    with Engine(config) as old:
        kit.store(old, kit.request(old, "a"), kit.keys_of(80, 2))
        supervisor = pids_of(session_name)
        for name in names_of(session_name):
            os.unlink(f"/dev/shm/{name}")
        with engine_process(ENGINE, session_name, tmp_path / "t") as new:
            assert hear(new) == "up 0"
            assert hear(new) == "stored"
            there = {
                name: os.stat(f"/dev/shm/{name}").st_ino
                for name in names_of(session_name)
            }
            assert len(there) == 3
            assert kit.load(old, kit.request(old, "b"), kit.keys_of(80, 2)) == 2
            old.close()
            wait_gone(supervisor)
            assert there == {
                name: os.stat(f"/dev/shm/{name}").st_ino
                for name in names_of(session_name)
            }
            tell(new, "step")
            assert hear(new) == f"stepped {NUM}"
            tell(new, "end")
            assert new.wait(WAIT_S) == 0
    wait_nothing_left(session_name)


def test_f34_late_close_of_an_old_page_spares_the_new_one(session_name):
    old = SessionPage.open_or_create(config_of(session_name))
    os.unlink(names.SHM_DIR + names.page_name(session_name))
    new = SessionPage.open_or_create(config_of(session_name))
    old.unlink(session_name)
    old.close()
    assert names.is_held(names.page_name(session_name))
    new.unlink(session_name)
    new.close()


def test_f34_sigkill_leaves_names_that_a_sweep_removes(session_name):
    """And those of a live session stay."""
    live = session_name + "-live"
    engine = "page = SessionPage.open_or_create(config)\n" + OPEN + "region.own()\n"
    with running(engine + STAY, live) as survivor:
        assert survivor.stdout.readline()
        run_to_death(engine + "die()\n", session_name)
        assert len(our_names(session_name)) == 3
        before = our_names(live)
        assert len(before) == 3
        sweep_to_end(session_name)
        names.sweep()
        assert our_names(live) == before
        assert live in names.live_sessions()
    sweep_to_end(live)


@pytest.mark.parametrize(
    "moment",
    [
        "room.allocate = die",
        "allocate = room.allocate\nroom.allocate = lambda *a: (allocate(*a), die())",
        "region_join._MAGIC = type('M', (int,), {'to_bytes': die})(1)",
        "room.populate = die",
    ],
    ids=["before_memory", "before_header", "before_magic", "before_populate"],
)
def test_f34_creator_killed_midway_is_repaired_by_the_next(session_name, moment):
    run_to_death(f"{moment}\n{OPEN}", session_name)
    assert our_names(session_name) == [f"shmoffload.{session_name}.region"]
    region = PrimaryRegion.open(config_of(session_name))
    region.slot_view(63)[:] = b"w" * 4096
    region.own()
    region.unlink()
    region.close()
    assert our_names(session_name) == []


def test_f34_page_of_a_creator_killed_midway(session_name, capsys):
    """Whoever only looks is told so at once; the next start makes it anew."""
    page = "page = SessionPage.open_or_create(config)\n"
    run_to_death(f"room.reserve = die\n{page}", session_name)
    assert our_names(session_name) == [f"shmoffload.{session_name}.page"]
    with pytest.raises(NoSessionError, match="only now being made"):
        SessionPage.look(session_name)
    with pytest.raises(SystemExit) as ended:
        main(["status", "--session", session_name])
    assert ended.value.code == 3
    assert f'no session "{session_name}" is live' in capsys.readouterr().err
    fresh = SessionPage.open_or_create(config_of(session_name))
    fresh.unlink(session_name)
    fresh.close()


@pytest.mark.parametrize(
    ("what", "moment"),
    [("page", "room.reserve = stop"), ("region", "room.allocate = stop")],
)
def test_f34_creator_that_hangs_midway_is_named_to_who_joins(
    session_name, what, moment
):
    """It lives, so it is not swept: who would join fails soon, in a sentence."""
    stop = "def stop(*_):\n    say('there')\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    code = {"page": "SessionPage.open_or_create(config)\n", "region": OPEN}[what]
    join = {
        "page": lambda: SessionPage.open_or_create(config_of(session_name)),
        "region": lambda: PrimaryRegion.open(config_of(session_name), timeout_s=0.5),
    }[what]
    with running(f"{stop}{moment}\n{code}", session_name) as creator:
        assert creator.stdout.readline() == "there\n"
        wait_until(
            lambda: state_of(creator.pid) == "T",
            timeout_s=WAIT_S,
            what="the creator to hang",
        )
        started_s = time.monotonic()
        with pytest.raises(StartError, match=session_name) as failed:
            join()
        assert time.monotonic() - started_s < WAIT_S / 2
        assert "\n" not in str(failed.value)
        names.sweep(session_name)
        assert len(our_names(session_name)) == 1
    sweep_to_end(session_name)


def state_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
