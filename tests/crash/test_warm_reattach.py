"""Engines that end, and what the next one still has in the primary; real processes.

Covers: close and SIGKILL, under a daemon and without one, with and without
``primary.persist``; what is dropped; who removes a kept region; old writers.
Does not cover: cuts at every single write (``tests/property/test_adoption``).
"""

import contextlib
import os
import signal

import pytest
from supervisor_kit import sweep_to_end
from warm_kit import (
    BLOCK_BYTES,
    KEYS,
    LONG_S,
    NUM_SLOTS,
    config_of,
    daemon_process,
    engine_process,
    load_all,
    our_names,
    region_names,
    store,
)

from shmoffload.engine import Engine
from shmoffload.testing.poll import wait_until
from shmoffload.wire import names
from shmoffload.wire.region import PrimaryRegion

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("SHMOFFLOAD_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture
def swept(session_name):
    """Remove what persists, as ``clean`` does, once the dead have let go of it."""
    yield
    sweep_to_end(session_name, kept_too=True)


def end(process, how):
    """Let the engine close, or die."""
    if how == "close":
        process.communicate("\n", timeout=LONG_S)
        assert process.returncode == 0
    else:
        process.kill()
        process.wait()


@pytest.mark.parametrize("how", ["close", "kill"])
@pytest.mark.parametrize("persist", [False, True])
def test_engine_under_a_daemon_is_warm(tmp_path, session_name, swept, persist, how):
    config = config_of(session_name, persist=persist)
    with daemon_process(tmp_path, config) as daemon:
        with engine_process(config, 10) as process:
            end(process, how)
        inode = os.stat(f"/dev/shm/{region_names(session_name)[0]}").st_ino
        for _ in range(2):  # and of an engine that was warm itself
            with Engine(config) as engine:
                assert os.fstat(engine.region.fd).st_ino == inode
                assert load_all(engine) == KEYS[:10]
        assert len(region_names(session_name)) == 1
        names.sweep(session_name)
        assert len(region_names(session_name)) == 1
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(LONG_S) == 0
        assert len(region_names(session_name)) == persist
        if persist:
            with Engine(config) as engine:
                assert load_all(engine) == KEYS[:10]


@pytest.mark.parametrize("how", ["close", "kill"])
@pytest.mark.parametrize("persist", [False, True])
def test_engine_without_a_daemon(session_name, swept, persist, how):
    config = config_of(session_name, persist=persist)
    for _ in range(2):
        with engine_process(config, 10) as process:
            end(process, how)
        wait_until(
            lambda: (
                our_names(session_name) == region_names(session_name)
                and len(region_names(session_name)) == persist
            ),
            timeout_s=LONG_S,
            what="the end of all names but a persistent region's",
        )
        with Engine(config) as engine:
            assert load_all(engine) == KEYS[: 10 * persist]
    assert len(region_names(session_name)) == persist
    with Engine(config_of(session_name)) as engine:  # it adopts, and keeps no longer
        assert load_all(engine) == KEYS[: 10 * persist]
    assert our_names(session_name) == []


def test_daemon_killed_with_its_engine(tmp_path, session_name):
    """Without ``persist`` the region goes at the next start, whoever's it is."""
    config = config_of(session_name)
    with (
        daemon_process(tmp_path, config) as daemon,
        engine_process(config, 10) as engine,
    ):
        engine.kill()
        daemon.kill()
    sweep_to_end(session_name)


def test_daemon_ends_before_its_engine(tmp_path, session_name):
    config = config_of(session_name)
    with daemon_process(tmp_path, config) as daemon:
        with Engine(config) as engine:
            store(engine, KEYS)
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(LONG_S) == 0
            assert len(load_all(engine)) == NUM_SLOTS
        assert our_names(session_name) == []


@pytest.mark.parametrize("other", ["namespace", "session"])
def test_what_is_not_the_same_starts_cold(session_name, swept, other):
    config = config_of(session_name, persist=True)
    with engine_process(config, 10) as process:
        end(process, "close")
    inode = os.stat(f"/dev/shm/{region_names(session_name)[0]}").st_ino
    if other == "namespace":
        with Engine(config_of(session_name, namespace="b", persist=True)) as engine:
            assert load_all(engine) == []
        assert len(region_names(session_name)) == 1  # replaced, not added
        with Engine(config) as engine:
            assert load_all(engine) == []
    else:
        with Engine(config_of(f"{session_name}-b")) as engine:
            assert load_all(engine) == []
        with Engine(config) as engine:
            assert os.fstat(engine.region.fd).st_ino == inode
            assert load_all(engine) == KEYS[:10]


@pytest.mark.parametrize("check", [True, False])
def test_unfinished_is_dropped_and_unproven_if_checked(session_name, swept, check):
    """Ten in a tier, two being written; then, of the ten, one is damaged."""
    config = config_of(session_name, persist=True, check=check)
    with engine_process(config, 10, 2) as process:
        end(process, "kill")
    with Engine(config) as engine:
        assert load_all(engine) == KEYS[:10]
        damaged = int(engine.slots_of(KEYS[3:4])[0])
        engine.slot_view(damaged)[BLOCK_BYTES - 1] ^= 1
    with Engine(config) as engine:
        kept = [key for key in KEYS[:10] if key in engine.manager.table.blocks]
        assert kept == (KEYS[:3] + KEYS[4:10] if check else KEYS[:10])
        store(engine, KEYS)  # every slot can still be had
        assert engine.wait_idle(LONG_S)
        if check:
            assert load_all(engine) == KEYS
        else:
            engine.reset_cache()


@pytest.mark.parametrize("check", [True, False])
def test_without_a_tier_nothing_has_a_checksum(session_name, swept, check):
    config = config_of(session_name, persist=True, check=check, tiers=[])
    with engine_process(config, 10) as process:
        end(process, "kill")
    with Engine(config) as engine:
        assert load_all(engine) == ([] if check else KEYS[:10])


@pytest.mark.parametrize("how", ["whole", "cut", "broken"])
def test_after_a_reset_nothing_comes_back(session_name, swept, how):
    config = config_of(session_name, persist=True)
    if how == "cut":
        with engine_process(config, 10) as process:
            process.communicate("reset cut\n", timeout=LONG_S)
            assert process.returncode == -signal.SIGKILL
    else:
        with Engine(config) as engine:
            store(engine, KEYS)
            assert engine.wait_idle(LONG_S)
            if how == "broken":
                engine.manager.reset_cache = broken
            engine.reset_cache()
            assert engine.is_broken == (how == "broken")
    with Engine(config) as engine:
        assert load_all(engine) == []


def broken():
    raise RuntimeError("the core fails in a reset")


def test_a_start_that_fails_leaves_what_was_kept(session_name, swept, tmp_path):
    config = config_of(session_name, persist=True)
    with engine_process(config, 10) as process:
        end(process, "close")
    (tmp_path / "file").touch()
    bad = [{"type": "slab", "path": str(tmp_path / "file"), "max_bytes": "8MiB"}]
    with pytest.raises(Exception, match="slab"):
        Engine(config_of(session_name, persist=True, tiers=bad))
    with Engine(config) as engine:
        assert load_all(engine) == KEYS[:10]


def test_old_writer_keeps_a_region_from_being_adopted(session_name, swept):
    """This process's mapping plays a GPU worker of the engine that was killed."""
    config = config_of(session_name, persist=True)
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(engine_process(config, 10))
        held = PrimaryRegion.from_fd(names.open_name(names.region_name(session_name)))
        stack.callback(held.close)
        assert names.try_lock(held.fd, exclusive=False)
        end(process, "kill")
        with Engine(config) as engine:
            assert os.fstat(engine.region.fd).st_ino != os.fstat(held.fd).st_ino
            assert load_all(engine) == []
            held.slot_view(0)[:] = b"x" * BLOCK_BYTES
            store(engine, KEYS)
            assert engine.wait_idle(LONG_S)
            assert load_all(engine) == KEYS
