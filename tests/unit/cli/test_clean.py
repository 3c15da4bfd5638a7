"""Removing what the dead left: all of it, and nothing of the living."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shmoffload.cli import checks, leftovers, main
from shmoffload.cli import clean as clean_
from shmoffload.errors import BadInputError, StartError
from shmoffload.supervisor import runtime_dir
from shmoffload.testing.tier_tests import HeapRegion, deadline, key_of
from shmoffload.wire import names
from shmoffload.wire.config import TierConfig, from_dict
from shmoffload.wire.layout import KEEP_AT, namespace_digest
from shmoffload.wire.session import SessionPage
from shmoffload.worker.tiers.fs import FsTier
from shmoffload.worker.tiers.slab import SlabTier

ROOT = Path(__file__).parents[3]
CLEAN, LEFT = 0, 1
SHM = Path(names.SHM_DIR)


@pytest.fixture(autouse=True)
def run_dir(tmp_path, monkeypatch):
    """A runtime directory of our own: others use theirs."""
    path = tmp_path / "run"
    monkeypatch.setenv("SHMOFFLOAD_RUNTIME_DIR", str(path))
    return path


@pytest.fixture
def dead(session_name):
    """Three names that nobody holds."""
    paths = [
        SHM / f"shmoffload.{session_name}.{end}" for end in ("own", "page", "region")
    ]
    for path in paths:
        path.write_bytes(b"x" * 5000)
        path.chmod(0o600)
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)


def clean(session, capsys, *options):
    """Exit code and ``--json``."""
    code = clean_.clean_command(["--session", session, "--json", *options])
    seen = json.loads(capsys.readouterr().out)
    assert seen["clean"] == (code == CLEAN)
    return code, seen


def paths_of(seen):
    return [row["path"] for row in seen["found"]]


def test_dead_names_are_listed_then_removed(dead, session_name, capsys):
    code, seen = clean(session_name, capsys)
    assert (code, paths_of(seen)) == (LEFT, [str(path) for path in dead])
    assert {row["bytes"] for row in seen["found"]} == {8192}
    assert all(path.exists() for path in dead)

    code, seen = clean(session_name, capsys, "--yes")
    assert (code, paths_of(seen)) == (CLEAN, [str(path) for path in dead])
    assert not any(path.exists() for path in dead)
    assert clean(session_name, capsys) == (
        CLEAN,
        {"clean": True, "found": [], "notes": []},
    )


def test_screen(dead, session_name, capsys):
    assert clean_.clean_command(["--session", session_name]) == LEFT
    out = capsys.readouterr().out
    assert f"left over  shared memory  {dead[0]}, 8 KiB\n" in out
    assert out.endswith("3 left over, 24 KiB: add --yes to remove them.\n")
    assert clean_.clean_command(["--session", session_name, "--yes"]) == CLEAN
    assert f"removed    shared memory  {dead[0]}" in capsys.readouterr().out
    assert clean_.clean_command(["--session", session_name]) == CLEAN
    assert capsys.readouterr().out == "Nothing is left over.\n"


def test_one_held_name_keeps_the_whole_session(dead, session_name, capsys):
    """A daemon between two engines: its page is held, an old name is not."""
    fd = os.open(dead[1], os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_SH)
    try:
        assert clean(session_name, capsys, "--yes")[0] == CLEAN
        assert all(path.exists() for path in dead)
    finally:
        os.close(fd)


def test_live_session_beside_a_dead_one(dead, session_name, capsys):
    living = f"{session_name}-b"
    config = {"session": {"name": living}, "primary": {"slots": 1, "block_bytes": 1}}
    page = SessionPage.open_or_create(from_dict(config))
    try:
        code, seen = clean(session_name, capsys, "--yes")
        assert (code, len(seen["found"])) == (CLEAN, 3)
        assert clean(living, capsys, "--yes")[1]["found"] == []
        assert (SHM / f"shmoffload.{living}.page").exists()
    finally:
        page.unlink(living)
        page.close()


def test_name_that_is_taken_again_meanwhile_stays(
    dead, session_name, capsys, monkeypatch
):
    """Between our look and our hand somebody starts."""
    held = []
    real = clean_.in_shared_memory

    def look(session):
        found = list(real(session))
        held.append(os.open(dead[0], os.O_RDWR))
        fcntl.flock(held[0], fcntl.LOCK_SH)
        return found

    monkeypatch.setattr(clean_, "in_shared_memory", look)
    code, seen = clean(session_name, capsys, "--yes")
    os.close(held[0])
    assert code == LEFT
    problems = [row["problem"] for row in seen["found"]]
    assert problems == ["in use by now, or gone", "", ""]
    assert dead[0].exists()


def test_name_that_goes_meanwhile_is_said(dead, session_name, capsys, monkeypatch):
    real = clean_.in_shared_memory

    def look(session):
        found = list(real(session))
        dead[0].unlink()
        return found

    monkeypatch.setattr(clean_, "in_shared_memory", look)
    code, seen = clean(session_name, capsys, "--yes")
    assert (code, seen["found"][0]["problem"]) == (LEFT, "No such file or directory")


def test_region_that_waits_for_an_engine_goes_only_when_asked(
    dead, session_name, capsys
):
    with dead[2].open("r+b") as file:
        file.seek(KEEP_AT)
        file.write(int(names.Keep.EVERYBODY).to_bytes(8, "little"))
    code, seen = clean(session_name, capsys, "--yes")
    assert (code, len(seen["found"])) == (CLEAN, 2)
    assert seen["notes"][0].startswith(f"{dead[2]} stays, 8 KiB: it waits for the next")
    assert dead[2].exists()
    assert str(checks.leftovers(session_name)).startswith("ok ")
    assert clean(session_name, capsys, "--kept")[0] == LEFT
    assert clean(session_name, capsys, "--kept", "--yes")[0] == CLEAN
    assert not dead[2].exists()


def test_what_was_planted_is_left_alone(session_name, tmp_path, capsys):
    target = tmp_path / "precious"
    target.write_text("mine")
    link = SHM / f"shmoffload.{session_name}.page"
    folder = SHM / f"shmoffload.{session_name}.region"
    link.symlink_to(target)
    folder.mkdir()
    try:
        assert clean(session_name, capsys, "--yes")[1]["found"] == []
        assert link.is_symlink()
        assert folder.is_dir()
    finally:
        link.unlink()
        folder.rmdir()
    assert target.read_text() == "mine"


def test_other_users_names_are_not_ours(dead, session_name, monkeypatch, capsys):
    monkeypatch.setattr(leftovers.os, "geteuid", lambda: os.getuid() + 1)
    assert list(leftovers.in_shared_memory(session_name)) == []


def dead_endpoint(where, session):
    """Socket and lock of a daemon that was killed."""
    where.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(where / f"{session}.sock"))
    (where / f"{session}.lock").write_text("4711\n")


def test_socket_and_lock_of_a_killed_daemon(run_dir, session_name, capsys):
    dead_endpoint(run_dir, session_name)
    (run_dir / "notes.txt").touch()
    code, seen = clean(session_name, capsys)
    assert (code, [row["kind"] for row in seen["found"]]) == (LEFT, ["lock", "socket"])
    assert clean(session_name, capsys, "--yes")[0] == CLEAN
    assert [path.name for path in run_dir.iterdir()] == ["notes.txt"]


def test_living_daemon_keeps_its_own(run_dir, session_name, capsys):
    with runtime_dir.listening(session_name):
        dead_endpoint(run_dir, "other")
        code, seen = clean(session_name, capsys, "--yes")
        assert (code, seen["found"]) == (CLEAN, [])
        (run_dir / f"{session_name}.lock").unlink()  # somebody tidied up too much
        assert clean(session_name, capsys, "--yes")[1]["found"] == []
        assert (run_dir / f"{session_name}.sock").exists()
    assert clean_.clean_command(["--session", "other", "--yes"]) == CLEAN
    assert list(run_dir.iterdir()) == []


def test_daemon_that_starts_meanwhile_keeps_its_own(run_dir, session_name, monkeypatch):
    dead_endpoint(run_dir, session_name)
    pieces = list(leftovers.in_runtime_dir(session_name))
    assert len(pieces) == 2
    with runtime_dir.listening(session_name):
        assert [piece.remove() for piece in pieces] == [False, False]
        with pytest.raises(Exception, match="already served"):
            runtime_dir.listening(session_name).__enter__()


def test_unsafe_runtime_directory_is_refused(run_dir, session_name):
    run_dir.mkdir(mode=0o755)
    with pytest.raises(StartError, match="others may use it"):
        clean_.clean_command(["--session", session_name])


def make_tier(path, namespace, *, used_s, kind=FsTier):
    """A tier's directory that nobody serves; ``used_s`` ago for the last time."""
    region = HeapRegion(2, namespace=namespace_digest(namespace))
    tier = kind()
    config = TierConfig(
        type="x", name="x", path=str(path), max_bytes=2 * region.stride, min_free=0
    )
    tier.open(config, region, region.namespace)
    region.fill(0, key_of(1))
    tier.put([key_of(1)], [0], deadline())
    tier.close()
    folder = path / region.namespace.hex()
    when = time.time() - used_s
    for entry in folder.iterdir():
        os.utime(entry, (when, when))
    return folder


@pytest.fixture
def tiers(tmp_path):
    """Three namespaces, oldest first."""
    path = tmp_path / "tier"
    return [
        make_tier(path, "old", used_s=3000),
        make_tier(path, "older slab", used_s=2000, kind=SlabTier),
        make_tier(path, "new", used_s=1000),
    ]


def clean_tier(session, capsys, folder, *options):
    words = ["--tier-path", str(folder.parent), *options]
    return clean(session, capsys, *words)


def test_last_used_namespace_stays(tiers, session_name, capsys):
    code, seen = clean_tier(session_name, capsys, tiers[0])
    assert code == LEFT
    assert set(paths_of(seen)) == {str(tiers[0]), str(tiers[1])}
    assert all(row["bytes"] > 10_000 for row in seen["found"])
    assert seen["notes"] == [f"{tiers[2]} stays: it was used last (--keep 1)"]
    assert clean_tier(session_name, capsys, tiers[0], "--yes")[0] == CLEAN
    assert list(tiers[0].parent.iterdir()) == [tiers[2]]


def test_listing_makes_nothing_look_used(tiers, session_name, capsys):
    first = clean_tier(session_name, capsys, tiers[0])
    time_of = [(path / "lock").stat().st_mtime_ns for path in tiers]
    main_words = ["verify", str(tiers[0]), "--json"]
    with pytest.raises(SystemExit):
        main(main_words)
    capsys.readouterr()
    assert clean_tier(session_name, capsys, tiers[0]) == first
    assert [(path / "lock").stat().st_mtime_ns for path in tiers] == time_of


@pytest.mark.parametrize(("keep", "num_left"), [("0", 0), ("2", 2), ("9", 3)])
def test_keep(tiers, session_name, capsys, keep, num_left):
    clean_tier(session_name, capsys, tiers[0], "--keep", keep, "--yes")
    assert len(list(tiers[0].parent.iterdir())) == num_left


def test_served_namespace_stays_and_counts_as_the_last(tiers, session_name, capsys):
    fd = os.open(tiers[0] / "lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        code, seen = clean_tier(session_name, capsys, tiers[0], "--keep", "0", "--yes")
        assert code == CLEAN
        assert set(paths_of(seen)) == {str(tiers[1]), str(tiers[2])}
        assert f"{tiers[0]} stays: process {os.getpid()} has it" in seen["notes"]
        assert list(tiers[0].parent.iterdir()) == [tiers[0]]
    finally:
        os.close(fd)


def test_namespace_that_is_taken_meanwhile_stays(tiers):
    (found, _) = leftovers.below_tier_path(str(tiers[0].parent), keep=1)
    fds = [os.open(tier / "lock", os.O_RDWR) for tier in tiers]
    for fd in fds:
        fcntl.flock(fd, fcntl.LOCK_EX)
    assert [piece.remove() for piece in found] == [False, False]
    for fd in fds:
        os.close(fd)
    assert all((tier / "lock").exists() for tier in tiers)


def test_directory_with_a_stranger_in_it_stays(tiers, session_name, capsys):
    (tiers[0] / "thesis.tex").write_text("mine")
    _code, seen = clean_tier(session_name, capsys, tiers[0], "--keep", "0", "--yes")
    assert f"{tiers[0]} stays: thesis.tex in it is not ours" in seen["notes"]
    assert (tiers[0] / "thesis.tex").read_text() == "mine"


def test_what_is_no_namespace_stays(tiers, session_name, capsys, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "lock").touch()
    (tiers[0].parent / ("a" * 32)).symlink_to(outside)
    (tiers[0].parent / ("b" * 32)).mkdir()  # no lock: none of our making
    (tiers[0].parent / "photos").mkdir()
    clean_tier(session_name, capsys, tiers[0], "--keep", "0", "--yes")
    left = {path.name for path in tiers[0].parent.iterdir()}
    assert left == {"a" * 32, "b" * 32, "photos"}
    assert (outside / "lock").exists()


def test_links_inside_a_namespace_are_not_followed(
    tiers, session_name, capsys, tmp_path
):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    (tiers[0] / "00").rmdir()
    (tiers[0] / "00").symlink_to(outside)
    clean_tier(session_name, capsys, tiers[0], "--keep", "0", "--yes")
    assert not tiers[0].exists()
    assert (outside / "file").exists()


def test_litter_of_the_namespace_that_stays(tiers, session_name, capsys):
    (tiers[2] / ".1-1-1.tmp").write_bytes(b"x" * 5000)
    (tiers[2] / "quarantine").mkdir()
    (tiers[2] / "quarantine" / "bad").write_bytes(b"x" * 9000)
    _, seen = clean_tier(session_name, capsys, tiers[2])
    sizes = {row["kind"]: row["bytes"] for row in seen["found"]}
    assert sizes["temporary file"] == 8192
    assert sizes["quarantine"] == 12288
    assert clean_tier(session_name, capsys, tiers[2], "--yes")[0] == CLEAN
    assert not (tiers[2] / "quarantine").exists()
    assert not (tiers[2] / ".1-1-1.tmp").exists()
    assert (tiers[2] / "lock").exists()


def test_worker_that_starts_at_the_last_moment_keeps_its_directory(
    tiers, session_name, capsys, monkeypatch
):
    """Between the lock's end and the directory's a new lock appears."""
    real = os.rmdir

    def rmdir(path, **words):
        if str(path) == str(tiers[0]):
            (tiers[0] / "lock").touch()
        real(path, **words)

    monkeypatch.setattr(os, "rmdir", rmdir)
    code, seen = clean_tier(session_name, capsys, tiers[0], "--yes")
    assert code == LEFT
    assert "Directory not empty" in [row["problem"] for row in seen["found"]]
    assert (tiers[0] / "lock").exists()


BAD = {
    "option": (["--yess"], "unknown option --yess: did you mean --yes?"),
    "word": (["qqq"], "unknown option qqq: known: "),
    "number": (["--keep", "x"], "argument --keep: invalid int value"),
    "negative": (["--keep", "-1"], "--keep -1: give 0 or more"),
    "path": (["--tier-path", "/nope"], "/nope cannot be read (No such file"),
}


@pytest.mark.parametrize(("words", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence(words, sentence, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["clean", *words])
    out, err = capsys.readouterr()
    assert (caught.value.code, out, err.count("\n")) == (2, "", 1)
    assert sentence in err


def test_path_is_checked_before_anything_goes(dead, session_name):
    with pytest.raises(BadInputError):
        clean_.clean_command(
            ["--session", session_name, "--yes", "--tier-path", "/nope"]
        )
    assert all(path.exists() for path in dead)


def test_script_works_without_an_installation(dead, session_name, tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "tools/clean.py", "--session", session_name, "--yes"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert done.returncode == CLEAN, done.stderr
    assert not any(path.exists() for path in dead)
