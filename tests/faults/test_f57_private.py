"""F57: what we make is ours alone, and what is not ours is refused, not used.

There is no group mode: a directory belongs to one user.
"""

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path

import engine_kit as kit
import pytest
from executor_kit import Rig
from faults_kit import faulty, keys, look_until, make_config, put_in_tiers
from late_faults_kit import (
    WAIT_S,
    engine_process,
    hear,
    patched,
    tell,
    wait_nothing_left,
    word,
)
from region_kit import config_of
from supervisor_kit import names_of
from worker_kit import WorkerRig

from shmoffload.cli import main
from shmoffload.core.types import LookupResult
from shmoffload.engine import Engine
from shmoffload.errors import ShmoffloadError, StartError, TierConfigError
from shmoffload.testing.faults.control import Call
from shmoffload.testing.poll import wait_until
from shmoffload.testing.tier_tests import HeapRegion, key_of
from shmoffload.wire import names
from shmoffload.wire.region import PrimaryRegion
from shmoffload.wire.session import Fault, SessionPage, TierWord
from shmoffload.worker.tiers.fs import FsTier
from shmoffload.worker.tiers.slab import SlabTier

pytestmark = pytest.mark.timeout(300)
NOBODY = 65534
ENGINE = """
session, folder, umask = sys.argv[1:]
os.umask(int(umask, 8))
tiers = [{**kit.slab(f"{folder}/{type}", min_free=0), "type": type, "nice": 0}
         for type in ("slab", "fs")]
engine = Engine(kit.make_config(session, tiers, namespace="secret-model tenant-7"))
kit.store(engine, kit.request(engine, "a"), kit.keys_of(0, 4))
assert engine.wait_idle(60)
say("stored")
hear()
engine.close()
"""
HELD_BEFORE_RENAME = """
from shmoffload.worker.tiers.fs import FsTier
real = FsTier._give_name
def give_name(self, temp, key):
    open({gate!r}).read()  # until the test opens it
    return real(self, temp, key)
FsTier._give_name = give_name
os.umask({umask})
"""


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def check_private(folder):
    """Every directory 0700, every file 0600; no name says whose or what."""
    for path in [folder, *folder.rglob("*")]:
        assert mode_of(path) == (0o700 if path.is_dir() else 0o600), path
        assert not {"secret", "model", "tenant"} & set(path.name.split("-"))


@pytest.mark.parametrize("umask", ["000", "077"])
def test_f57_all_that_is_made_is_private(session_name, tmp_path, umask):
    with engine_process(ENGINE, session_name, tmp_path, umask) as engine:
        assert hear(engine) == "stored"
        for name in names_of(session_name):
            assert mode_of(Path("/dev/shm", name)) == 0o600
        for kind in ("slab", "fs"):
            check_private(tmp_path / kind)
        assert len(list((tmp_path / "fs").rglob("*0" * 4))) == 4
        tell(engine, "end")
        assert engine.wait(WAIT_S) == 0
    wait_nothing_left(session_name)


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_f57_a_file_is_private_before_it_is_whole(session_name, tmp_path, umask):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    fs = {"type": "fs", "path": str(tmp_path / "d"), "max_bytes": "1MiB", "nice": 0}
    patch = HELD_BEFORE_RENAME.format(gate=str(gate), umask=umask)
    with WorkerRig(session_name, **fs) as rig:
        rig.ready(wrap=patched(patch))
        rig.fill(0, key_of(0))
        job = rig.submit([key_of(0)], [0])
        (temp,) = wait_until(
            lambda: list((tmp_path / "d").rglob("*.tmp")),
            timeout_s=WAIT_S,
            what="the temporary file",
        )
        assert mode_of(temp) == 0o600
        gate.write_text("go")
        assert rig.answer(job).failed_idx == b""
        check_private(tmp_path / "d")


@contextlib.contextmanager
def as_another_user(monkeypatch):
    """Be somebody else for a while; who is not root only believes to be."""
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: NOBODY)
            yield


@pytest.fixture
def open_folder():
    """A directory that every user may reach and write to."""
    folder = Path(tempfile.mkdtemp(prefix="shmoffload-f57-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def test_f57_another_users_names_and_directories_are_refused(
    session_name, open_folder, monkeypatch
):
    """Each in a sentence; nothing of the owner's changes."""
    region = HeapRegion()
    page = SessionPage.open_or_create(config_of(session_name))
    memory = PrimaryRegion.open(config_of(session_name))
    try:
        for tier_class in (SlabTier, FsTier):
            path = open_folder / tier_class.__name__
            with Rig(tier_class(), region, path=path) as rig:
                rig.fill([key_of(0)])
                assert rig.run([key_of(0)], [0]) == ([], [], "")
            path.chmod(0o777)  # reachable, and yet another's
            before = {p: p.stat().st_mode for p in path.rglob("*")}
            with as_another_user(monkeypatch):
                tier = tier_class()
                with pytest.raises(TierConfigError) as refused:
                    tier.open(rig.config, region, region.namespace)
                tier.close()
                assert "give" in str(refused.value)
            assert before == {p: p.stat().st_mode for p in path.rglob("*")}
        with as_another_user(monkeypatch):
            for start in (SessionPage.open_or_create, PrimaryRegion.open):
                with pytest.raises(StartError, match=r"remove it, or choose another"):
                    start(config_of(session_name))
            names.sweep(session_name)
        assert len(names_of(session_name)) == 2
    finally:
        memory.unlink()
        memory.close()
        page.unlink(session_name)
        page.close()


@pytest.mark.parametrize("what", ["page", "region", "own"])
def test_f57_a_link_at_a_name_of_ours_is_refused(session_name, tmp_path, what):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    planted = Path(f"/dev/shm/shmoffload.{session_name}.{what}")
    planted.symlink_to(victim)
    try:
        tiers = [{"type": "memory", "nice": 0}]
        with pytest.raises(ShmoffloadError, match="another user's; remove it"):
            Engine(kit.make_config(session_name, tiers))
        assert victim.read_text() == "precious"
        assert planted.is_symlink()
    finally:
        planted.unlink()
    wait_nothing_left(session_name)


@pytest.mark.parametrize("kind", ["slab", "fs"])
def test_f57_a_link_in_a_tiers_place_is_refused_at_the_start(
    session_name, tmp_path, kind
):
    victim = tmp_path / "victim"
    victim.mkdir()
    config = kit.make_config(
        session_name, [{**kit.slab(tmp_path / "t", min_free=0, nice=0), "type": kind}]
    )
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / config.namespace_digest.hex()).symlink_to(victim)
    with pytest.raises(ShmoffloadError, match="cannot be used"):
        Engine(config)
    assert list(victim.iterdir()) == []
    wait_nothing_left(session_name)


@pytest.mark.parametrize("tier_class", [SlabTier, FsTier])
def test_f57_files_are_made_through_no_link(tmp_path, monkeypatch, tier_class):
    """O_NOFOLLOW whenever we make a file, O_EXCL for a temporary one, 0600."""
    made = []
    real = os.open

    def note(path, flags, mode=0o777, **kwargs):
        if flags & os.O_CREAT:
            made.append((str(path), flags, mode))
        return real(path, flags, mode, **kwargs)

    monkeypatch.setattr(os, "open", note)
    with Rig(tier_class(), HeapRegion(), path=tmp_path) as rig:
        rig.fill([key_of(0)])
        assert rig.run([key_of(0)], [0]) == ([], [], "")
    assert made
    for path, flags, mode in made:
        assert flags & os.O_NOFOLLOW, path
        assert mode == 0o600, path
        assert flags & os.O_EXCL or not path.endswith(".tmp"), path
    assert any(path.endswith(".tmp") for path, _, _ in made) == (tier_class is FsTier)


def test_f57_a_permission_error_is_no_miss(session_name, make_control, capsys):
    """It is counted, shown, and the block stays."""
    control = make_control(inner="fs")
    with Engine(make_config(session_name, [faulty(control)], slots=16)) as engine:
        put_in_tiers(engine, 0, 1)
        control.fail(Call.GET, errno.EACCES)
        ctx = kit.request(engine, "a")
        assert look_until(engine, ctx, 0) == [LookupResult.MISS]
        assert word(engine, Fault.NO_ACCESS.word) == 1
        assert word(engine, TierWord.BLOCKS_MISSED) == 0
        assert word(engine, TierWord.RESIDENT_BLOCKS) == 2
        put_in_tiers(engine, 0)
        assert word(engine, TierWord.BLOCKS_SKIPPED) == 1  # it is still there
        assert kit.load(engine, kit.request(engine, "b"), keys(0, 1)) == 2
        control.fail(Call.PUT, errno.EACCES, times=1000)
        numbers = iter(range(100, 1000))

        def is_backing_off():
            kit.store(engine, kit.request(engine, "r"), keys(next(numbers)))
            assert engine.wait_idle(WAIT_S)
            return word(engine, TierWord.BACKING_OFF)

        wait_until(is_backing_off, timeout_s=WAIT_S, what="the breaker")
        with pytest.raises(SystemExit) as ended:
            main(["status", "--session", session_name])
        said = capsys.readouterr().out
        assert ended.value.code == 1
        assert "takes no stores now (no permission): let this user write" in said
        assert "no permission" in said.partition("blocks refused by faulty: ")[2]


def test_f57_a_file_without_permission_is_no_miss(open_folder, monkeypatch):
    """The system's own EACCES: a read fails, is counted, and the file stays."""
    if os.geteuid() == 0:
        os.chown(open_folder, NOBODY, NOBODY)
    with as_another_user(monkeypatch) if os.geteuid() == 0 else monkeypatch.context():
        region = HeapRegion(num_slots=32)
        with Rig(FsTier(), region, path=open_folder) as rig:
            rig.fill([key_of(0)])
            assert rig.run([key_of(0)], [0]) == ([], [], "")
            (file,) = [p for p in open_folder.rglob("*0" * 4) if p.is_file()]
            file.chmod(0)
            failed, removed, words = rig.run([key_of(0)], [8], load=True)
            assert (failed, removed) == ([0], [])
            assert "Permission denied" in words
            assert rig.word(Fault.NO_ACCESS.word) == 1
            assert rig.word(TierWord.BLOCKS_MISSED) == 0
            file.chmod(0o600)
            assert rig.run([key_of(0)], [8], load=True) == ([], [], "")
