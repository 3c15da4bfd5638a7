"""Processes that race for the primary region, and die at the wrong moment."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shmoffload.core.types import SlotState
from shmoffload.testing.poll import wait_until
from shmoffload.wire import names
from shmoffload.wire.config import from_dict
from shmoffload.wire.region import PrimaryRegion
from shmoffload.wire.session import SessionPage

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


@pytest.mark.timeout(180)
def test_race_of_four_makes_one_region(session_name):
    for round_idx in range(5):
        with contextlib.ExitStack() as stack:
            racers = [
                stack.enter_context(running(OPEN + STAY, session_name))
                for _ in range(4)
            ]
            inodes = {racer.stdout.readline().strip() for racer in racers}
            assert len(inodes) == 1
            assert inodes != {""}
        if round_idx % 2:  # odd rounds begin with a leftover, even ones with nothing
            names.sweep(session_name)
    names.sweep(session_name)
    assert our_names(session_name) == []


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
def test_creator_killed_midway_is_repaired_by_the_next(session_name, moment):
    run_to_death(f"{moment}\n{OPEN}", session_name)
    assert our_names(session_name) == [f"shmoffload.{session_name}.region"]
    region = PrimaryRegion.open(config_of(session_name))
    region.slot_view(63)[:] = b"w" * 4096
    region.own()
    region.unlink()
    region.close()
    assert our_names(session_name) == []


def test_sigkill_leaves_names_that_a_sweep_removes_and_live_ones_stay(session_name):
    live = session_name + "-live"
    engine = "page = SessionPage.open_or_create(config)\n" + OPEN + "region.own()\n"
    with running(engine + STAY, live) as survivor:
        assert survivor.stdout.readline()
        run_to_death(engine + "die()\n", session_name)
        assert len(our_names(session_name)) == 3
        before = our_names(live)
        assert len(before) == 3
        names.sweep()
        assert our_names(session_name) == []
        assert our_names(live) == before
        assert live in names.live_sessions()
    assert len(names.sweep(live)) == 3


def test_owner_killed_while_its_worker_lives(session_name):
    """This process's mapping plays the worker that still writes."""
    region = PrimaryRegion.open(config_of(session_name))
    try:
        with running(OPEN + "region.own()\n" + STAY, session_name) as engine:
            assert engine.stdout.readline()
        fresh = PrimaryRegion.open(config_of(session_name), timeout_s=0.5)
        assert os.fstat(fresh.fd).st_ino != os.fstat(region.fd).st_ino
        fresh.own()
        fresh.unlink()
        fresh.close()
    finally:
        region.unlink()
        region.close()


@pytest.mark.timeout(180)
def test_no_kill_shows_a_ready_slot_with_wrong_bytes(session_name):
    """The crash contract of the slot table, at random instants."""
    writer = f"""
import random
{OPEN}
say("go")
rnd, generation = random.Random(os.getpid()), 0
while True:
    slot, generation = rnd.randrange(64), generation + 1
    key = make_offload_key(rnd.randbytes(32))
    region.hand_out(slot, generation, key, 4096)
    region.slot_view(slot)[:] = key[:32] * 128
    region.publish(slot, generation)
"""
    keeper = PrimaryRegion.open(config_of(session_name))
    num_ready = 0
    for _ in range(15):
        with running(writer, session_name) as process:
            assert process.stdout.readline() == "go\n"
            generations = random.randrange(1, 400)

            def has_worked(wanted=generations):
                return max(keeper.record(slot)[0] for slot in range(64)) >= wanted

            wait_until(has_worked, timeout_s=START_TIMEOUT_S, what="hand-outs")
        for slot in range(64):
            _, state, key, num_bytes = keeper.record(slot)
            if state is SlotState.READY:
                num_ready += 1
                assert num_bytes == 4096
                assert bytes(keeper.slot_view(slot)) == key[:32] * 128
            keeper.set_state(slot, 0, SlotState.FREE)
    assert num_ready > 15
    keeper.unlink()
    keeper.close()


@pytest.mark.shm
def test_too_small_shm_is_refused_and_nothing_is_left(session_name):
    unshare = shutil.which("unshare")
    mount = (
        "mount --make-rprivate / && mount -t tmpfs -o size=128K tmpfs /dev/shm && "
        'exec "$@"'
    )
    inside = [unshare or "", "-m", "sh", "-c", mount, "sh"]
    if not unshare or subprocess.run([*inside, "true"], check=False).returncode:
        pytest.skip("needs the right to make a private mount")
    code = f"""
from shmoffload.errors import RegionTooSmallError
def attempt():
    try:
        {OPEN.strip()}
    except RegionTooSmallError as error:
        say(error)
    say(os.listdir("/dev/shm"))
attempt()
# The check is passed, the memory is not there: another process was quicker.
real, free = os.fstatvfs, type("Free", (), dict(f_bavail=1 << 40, f_frsize=1,
                                                f_blocks=1))
os.fstatvfs = lambda fd: free
attempt()
"""
    done = subprocess.run(
        [*inside, sys.executable, "-c", PRELUDE + code, session_name],
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, names_1, second, names_2 = done.stdout.splitlines()
    assert first.startswith("/dev/shm has 131072 bytes free")
    assert "needs 532480 bytes" in first
    assert "needs 532480 bytes" in second
    assert (names_1, names_2) == ("[]", "[]")


@pytest.mark.shm
@pytest.mark.parametrize(
    ("options", "then", "words"),
    [
        ("ro", "true", "is mounted read-only: type"),
        ("nr_inodes=1", "true", "nr_inodes"),
        ("size=4K", "echo full >/dev/shm/full", "/dev/shm has 0 bytes free"),
        ("size=1M", "ulimit -f 0", "ulimit -f unlimited"),
    ],
    ids=["read-only", "no inode", "no room for the page", "limit of file size"],
)
def test_start_says_what_shared_memory_refuses(session_name, options, then, words):
    unshare = shutil.which("unshare")
    mount = (
        f"mount --make-rprivate / && mount -t tmpfs -o {options} tmpfs /dev/shm && "
        f'{then} && exec "$@"'
    )
    inside = [unshare or "", "-m", "sh", "-c", mount, "sh"]
    if not unshare or subprocess.run([*inside, "true"], check=False).returncode:
        pytest.skip("needs the right to make a private mount")
    code = """
from shmoffload.errors import BadInputError
for start in (SessionPage.open_or_create, PrimaryRegion.open):
    try:
        start(config)
    except BadInputError as error:
        say(error.exit_code, error)
say(os.listdir("/dev/shm"))
"""
    done = subprocess.run(
        [*inside, sys.executable, "-c", PRELUDE + code, session_name],
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page, region, left = done.stdout.splitlines()
    for said in (page, region):
        assert said.startswith("2 ")
        assert words in said
    assert left in ("[]", "['full']")


def test_late_close_of_an_old_page_spares_the_new_one(session_name):
    old = SessionPage.open_or_create(config_of(session_name))
    os.unlink(names.SHM_DIR + names.page_name(session_name))
    new = SessionPage.open_or_create(config_of(session_name))
    old.unlink(session_name)
    old.close()
    assert names.is_held(names.page_name(session_name))
    new.unlink(session_name)
    new.close()
