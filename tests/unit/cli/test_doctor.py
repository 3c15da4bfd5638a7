"""The look before the start: every fault is one line with its way out."""

import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shmoffload.cli import checks, main, tier_checks
from shmoffload.cli.checks import Check
from shmoffload.cli.doctor import doctor_command
from shmoffload.errors import BadInputError
from shmoffload.supervisor import runtime_dir
from shmoffload.testing.tier_tests import HeapRegion
from shmoffload.wire import room
from shmoffload.wire.config import TierConfig, from_dict
from shmoffload.wire.region import PrimaryRegion
from shmoffload.wire.session import SessionPage, Word
from shmoffload.worker import crypt
from shmoffload.worker.tiers.slab import SlabTier

ROOT = Path(__file__).parents[3]
WELL, ILL = 0, 1
LINE = re.compile(r"ok \S.*|FAIL: [A-Z/].*\. Fix: \S.*")
MAX_CPU_S = 0.3
GIB = 1 << 30


@pytest.fixture(autouse=True)
def run_dir(tmp_path, monkeypatch):
    """A runtime directory of our own; any amount of shared memory is enough."""
    path = tmp_path / "run"
    monkeypatch.setenv("SHMOFFLOAD_RUNTIME_DIR", str(path))
    monkeypatch.setattr(checks, "DOCKER_SHM_BYTES", -1)
    return path


@pytest.fixture
def config_file(tmp_path, session_name):
    """Write a configuration with a disk tier; returns how."""

    def write(*, slots=4, tier="slab", path=None, more=""):
        file = tmp_path / "config.toml"
        file.write_text(
            f'session.name = "{session_name}"\n'
            f'primary = {{ block_bytes = "64KiB", slots = {slots} }}\n'
            f'[[tier]]\ntype = "{tier}"\npath = "{path or tmp_path / "tier"}"\n{more}'
        )
        return str(file)

    return write


def examine(session, capsys, *options):
    """Exit code and checks, by name, of ``--json``."""
    code = doctor_command(["--session", session, "--json", *options])
    seen = json.loads(capsys.readouterr().out)
    assert seen["ok"] == (code == WELL)
    return code, seen["checks"]


def faults(found):
    return [(row["fact"], row["fix"]) for row in found if not row["ok"]]


def faults_of(found):
    return [str(check) for check in found if not check.ok]


def test_this_machine_is_well(session_name, capsys, config_file):
    file = config_file(more='max_bytes = "1MiB"\n[[tier]]\ntype = "memory"\n')
    code, found = examine(session_name, capsys, "-c", file)
    assert (code, faults(found)) == (WELL, [])
    assert {row["check"] for row in found} >= {
        "shared memory",
        "cgroup",
        "open files",
        "processes",
        "locked memory",
        "file size",
        "pidfd",
        "populate",
        "autogroup",
        "slab",
        "runtime directory",
        "leftovers",
        "daemon",
    }


def test_looking_leaves_nothing(session_name, capsys, config_file, tmp_path, run_dir):
    (tmp_path / "tier").mkdir()
    file = config_file()
    before = sorted(tmp_path.rglob("*")), sorted(os.listdir("/dev/shm"))
    examine(session_name, capsys, "-c", file, "--tier-path", str(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before[0]
    assert not run_dir.exists()
    ours = [name for name in os.listdir("/dev/shm") if session_name in name]
    assert ours == []


def test_screen_is_one_line_a_fact(session_name, capsys, monkeypatch):
    monkeypatch.setattr(checks.os, "pidfd_open", refuse)
    assert doctor_command(["--session", session_name]) == ILL
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 9
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    (fault,) = [line for line in lines if line.startswith("FAIL: ")]
    assert "gives no pidfd" in fault


def test_a_line_is_a_line_whatever_the_path():
    assert "\n" not in str(Check("x", "/tmp/a\nb is bad", "rm it"))


def refuse(*_words, **_more):
    raise PermissionError(1, "Operation not permitted")


class Stats:
    """What ``statvfs`` says of a healthy file system, but for what is given."""

    def __init__(self, **changes):
        self.f_flag = 0
        self.f_frsize = 4096
        self.f_blocks = self.f_bavail = 64 * GIB // 4096
        self.f_files = self.f_favail = 1000
        self.__dict__.update(changes)


SHM_FAULTS = {
    "read-only": (Stats(f_flag=os.ST_RDONLY), "is mounted read-only", "remount,rw"),
    "no inode": (Stats(f_favail=2), "takes no further file", "nr_inodes"),
    "docker": (
        Stats(f_blocks=16384, f_bavail=16384),
        "has 64 MiB free of 64 MiB: too little",
        "size|emptyDir",
    ),
}


@pytest.mark.parametrize(("stats", "fact", "fix"), SHM_FAULTS.values(), ids=SHM_FAULTS)
def test_shared_memory_that_does_not_do(monkeypatch, stats, fact, fix):
    monkeypatch.setattr(checks, "DOCKER_SHM_BYTES", 64 << 20)
    monkeypatch.setattr(checks.os, "statvfs", lambda _path: stats)
    (fault,) = faults_of(checks.shared_memory(None))
    assert fact in fault
    assert re.search(f"Fix: .*({fix})", fault)


def test_shared_memory_that_is_not_there(monkeypatch):
    monkeypatch.setattr(checks, "SHM_DIR", "/nope")
    (fault,) = faults_of(checks.shared_memory(None))
    assert "/nope is not there" in fault
    monkeypatch.setattr(checks.os, "statvfs", lambda _path: Stats())
    monkeypatch.setattr(checks.os, "access", lambda *_words: False)
    (fault,) = faults_of(checks.shared_memory(None))
    assert "chmod 1777 /nope" in fault


def test_shared_memory_without_a_limit_is_enough(monkeypatch):
    stats = Stats(f_blocks=0, f_bavail=0, f_files=0, f_favail=0)
    monkeypatch.setattr(checks.os, "statvfs", lambda _path: stats)
    assert faults_of(checks.shared_memory(10 * GIB)) == []


def test_region_that_does_not_fit(session_name, capsys, config_file, monkeypatch):
    """10,000 slots of 68 KiB and their records."""
    monkeypatch.setattr(room, "cgroup_headroom", lambda: GIB // 2)
    statvfs = os.statvfs
    small = Stats(f_blocks=100_000, f_bavail=100_000)
    monkeypatch.setattr(
        checks.os,
        "statvfs",
        lambda path: small if path == "/dev/shm" else statvfs(path),
    )
    code, found = examine(session_name, capsys, "-c", config_file(slots=10_000))
    (shm, cgroup) = faults(found)
    assert code == ILL
    assert shm[0].startswith("/dev/shm has 390.6 MiB free of 390.6 MiB, the primary")
    assert "takes 664.7 MiB" in shm[0]
    assert "lower primary.slots" in shm[1]
    assert cgroup[0] == "The memory limit leaves 512 MiB, the region takes 664.7 MiB"
    assert faults(examine(session_name, capsys, "-c", config_file(slots=10))[1]) == []


def test_region_that_is_in_use_needs_no_more(
    session_name, capsys, config_file, monkeypatch
):
    file = config_file()
    monkeypatch.setattr(room, "cgroup_headroom", lambda: 10)
    assert len(faults(examine(session_name, capsys, "-c", file)[1])) == 1
    region = PrimaryRegion.open(
        from_dict(
            {
                "session": {"name": session_name},
                "primary": {"slots": 1, "block_bytes": 1},
            }
        )
    )
    try:
        assert faults(examine(session_name, capsys, "-c", file)[1]) == []
    finally:
        region.unlink()
        region.close()


LIMITS = {
    "files": (resource.RLIMIT_NOFILE, 100, "may have 100 open files", "ulimit -n"),
    "processes": (resource.RLIMIT_NPROC, 20, "may have 20 processes", "ulimit -u"),
    "size": (resource.RLIMIT_FSIZE, 1 << 20, "A file may have 1 MiB", "ulimit -f"),
}


@pytest.mark.parametrize(("kind", "value", "fact", "fix"), LIMITS.values(), ids=LIMITS)
def test_limits(monkeypatch, kind, value, fact, fix):
    real = resource.getrlimit

    def getrlimit(asked):
        return (value, value) if asked == kind else real(asked)

    monkeypatch.setattr(checks.resource, "getrlimit", getrlimit)
    (fault,) = faults_of(checks.limits(2 << 20))
    assert fact in fault
    assert f"Fix: {fix}" in fault


def test_kernel_that_is_old_or_bound(monkeypatch):
    monkeypatch.setattr(checks.room, "can_populate", lambda _mapping: False)
    monkeypatch.setattr(checks, "SO_PEERPIDFD", 9999)
    words = "\n".join(map(str, checks.kernel()))
    assert "no MADV_POPULATE_WRITE" in words
    assert "it is opened by its pid" in words
    assert "FAIL" not in words  # both only help
    monkeypatch.setattr(checks.os, "open", refuse)
    monkeypatch.setattr(checks.os, "pidfd_open", refuse)
    monkeypatch.setattr(checks.os, "access", lambda *_words: False)
    assert len(faults_of(checks.kernel())) == 3


def test_runtime_directory(run_dir):
    assert "not there yet" in str(checks.runtime_directory())
    run_dir.mkdir(mode=0o700)
    assert str(checks.runtime_directory()) == f"ok {run_dir} is ours, mode 0700"
    run_dir.chmod(0o755)
    fault = str(checks.runtime_directory())
    assert fault.endswith(f"mode 0755, others may use it. Fix: chmod 700 {run_dir}")
    run_dir.rmdir()
    run_dir.touch()
    fault = str(checks.runtime_directory())
    assert f"Fix: remove {run_dir}, or set SHMOFFLOAD_RUNTIME_DIR" in fault


def test_leftovers_and_the_command_that_removes_them(session_name, capsys, run_dir):
    path = Path(f"/dev/shm/shmoffload.{session_name}.page")
    path.write_bytes(b"x")
    try:
        ((fact, fix),) = faults(examine(session_name, capsys)[1])
        assert fact == "Dead sessions have left 1 name, 4 KiB"
        assert fix == f"shmoffload clean --session {session_name} --yes"
        with pytest.raises(SystemExit) as caught:
            main(fix.split()[1:])
        assert caught.value.code == 0
    finally:
        path.unlink(missing_ok=True)
    capsys.readouterr()
    assert examine(session_name, capsys)[0] == WELL


@pytest.fixture
def page(session_name):
    """The page of a session that looks alive."""
    config = {"session": {"name": session_name}}
    config["primary"] = {"slots": 1, "block_bytes": 1}
    opened = SessionPage.open_or_create(from_dict(config))
    opened.set(Word.SUPERVISOR_PID, 4711)
    yield opened
    opened.unlink(session_name)
    opened.close()


def test_supervisor_that_is_silent(page, session_name, capsys):
    assert faults(examine(session_name, capsys)[1]) == []
    page.set(Word.SUPERVISOR_HEARTBEAT_NS, time.monotonic_ns())
    assert faults(examine(session_name, capsys)[1]) == []
    page.set(Word.SUPERVISOR_HEARTBEAT_NS, time.monotonic_ns() - 7 * 10**9)
    ((fact, fix),) = faults(examine(session_name, capsys)[1])
    assert f"supervisor of session {session_name} (4711) is silent for 7 s" in fact
    assert fix.startswith("kill -9 4711")


def test_daemon_that_listens_and_one_that_does_not(session_name, capsys, run_dir):
    with runtime_dir.listening(session_name):
        found = examine(session_name, capsys)[1]
        daemon = next(row for row in found if row["check"] == "daemon")
        assert daemon["fact"].endswith(f"(process {os.getpid()}) listens")
        os.unlink(run_dir / f"{session_name}.sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
            deaf.bind(str(run_dir / f"{session_name}.sock"))
        ((fact, _),) = faults(examine(session_name, capsys)[1])
        assert "does not listen" in fact


def path_faults(path, need_bytes=0):
    found = tier_checks.check_paths([tier_checks.Wanted("t", str(path), need_bytes)])
    return faults_of(found)


def test_path_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    assert "/file is no directory" in path_faults(tmp_path / "file")[0]
    assert "/file is no directory" in path_faults(tmp_path / "file/below")[0]


def test_path_that_others_may_write(tmp_path):
    tmp_path.chmod(0o777)
    (fault,) = path_faults(tmp_path)
    assert fault.endswith(f"Fix: chmod 700 {tmp_path}")
    tmp_path.chmod(0o1777)
    assert path_faults(tmp_path) == []


def test_path_that_this_user_may_not_write(tmp_path, monkeypatch):
    monkeypatch.setattr(tier_checks.os, "access", lambda *_words: False)
    (fault,) = path_faults(tmp_path / "tier")
    assert f"Fix: mkdir -p {tmp_path}/tier && chown {os.geteuid()}" in fault


def test_planted_namespace(tmp_path):
    (tmp_path / ("a" * 32)).symlink_to("/")
    (fault,) = path_faults(tmp_path)
    assert "is no directory of this user" in fault


@pytest.mark.parametrize(
    ("stats", "words"),
    [
        (Stats(f_flag=os.ST_RDONLY), "read-only file system"),
        (Stats(f_favail=0), "takes no further file"),
        (Stats(f_bavail=GIB // 4096), "1 GiB free, 2 GiB are needed"),
        (Stats(f_bavail=0), "0 B free, 2 GiB are needed"),
    ],
)
def test_disk_that_does_not_do(tmp_path, monkeypatch, stats, words):
    monkeypatch.setattr(tier_checks.os, "statvfs", lambda _path: stats)
    (fault,) = path_faults(tmp_path, 2 * GIB)
    assert words in fault


def test_key_file(session_name, capsys, config_file, tmp_path):
    path = tmp_path / "key"
    file = config_file(more=f'key_file = "{path}"\nmax_bytes = "1MiB"\n')
    ((fact, fix),) = faults(examine(session_name, capsys, "-c", file)[1])
    assert fact == f"Tier slab: key_file = {path} does not exist"
    subprocess.run(["sh", "-c", fix.partition(": ")[2]], check=True, timeout=60)
    code, found = examine(session_name, capsys, "-c", file)
    assert (code, faults(found)) == (WELL, [])
    (said,) = [row["fact"] for row in found if "key" in row["fact"].split()]
    assert re.fullmatch(
        rf"tier slab: key [0-9a-f]{{16}} of {re.escape(str(path))} can be used", said
    )
    path.chmod(0o644)
    ((fact, fix),) = faults(examine(session_name, capsys, "-c", file)[1])
    assert "has mode 0644, others can reach the key" in fact
    assert fix == f"chmod 600 {path}"


def test_key_file_on_a_mount_that_hangs(monkeypatch):
    monkeypatch.setattr(tier_checks, "TIMEOUT_S", 0.2)
    let_go = threading.Event()
    monkeypatch.setattr(crypt, "read_key", lambda _path: let_go.wait(60) and bytes(32))
    raw = {"type": "memory", "name": "m", "key_file": "/hung/key"}
    raw = {"session": {"name": "s"}, "tier": [raw]}
    raw["primary"] = {"slots": 1, "block_bytes": 1}
    try:
        (check,) = tier_checks.check_keys(from_dict(raw))
    finally:
        let_go.set()
    assert not check.ok
    assert "key_file = /hung/key does not answer within 0.2 s" in check.fact


def test_tiers_share_their_disk(tmp_path, monkeypatch):
    stats = Stats(f_bavail=3 * GIB // 4096)
    monkeypatch.setattr(tier_checks.os, "statvfs", lambda _path: stats)
    wanted = [
        tier_checks.Wanted(name, str(tmp_path / name), 2 * GIB) for name in ("a", "b")
    ]
    (fault,) = faults_of(tier_checks.check_paths(wanted))
    assert "tier b" in fault
    assert "4 GiB are needed by the tiers on this disk" in fault


def test_slab_that_is_there_needs_no_more(
    session_name, capsys, config_file, tmp_path, monkeypatch
):
    region = HeapRegion(2)
    tier = SlabTier()
    size = 64 * region.stride
    config = TierConfig(
        type="slab", name="s", path=str(tmp_path / "tier"), max_bytes=size, min_free=0
    )
    tier.open(config, region, region.namespace)
    stats = Stats(f_bavail=size // 2 // 4096)
    monkeypatch.setattr(tier_checks.os, "statvfs", lambda _path: stats)
    file = config_file(more=f"max_bytes = {size}\nmin_free = 0\n")
    code, found = examine(session_name, capsys, "-c", file)
    tier.close()
    assert (code, faults(found)) == (WELL, [])
    words = [row["fact"] for row in found if row["check"] == "slab"]
    assert f"served by process {os.getpid()}" in words[-1]
    file = config_file(path=tmp_path / "new", more=f"max_bytes = {size}\n")
    assert "are needed" in faults(examine(session_name, capsys, "-c", file)[1])[0][0]


def test_direct_io_that_does_not_work_is_said_and_no_fault(tmp_path, monkeypatch):
    real = os.open

    def without(path, flags, *more, **words):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *more, **words)

    monkeypatch.setattr(tier_checks.os, "open", without)
    found = tier_checks.check_paths([tier_checks.Wanted("t", str(tmp_path))])
    assert faults_of(found) == []
    assert "no O_DIRECT here, buffered I/O instead" in str(found[-1])


def test_hung_mount_is_waited_for_only_so_long(tmp_path, monkeypatch):
    released = threading.Event()
    real = tier_checks._judge

    def judge(one, taken):
        if one.name == "hung":
            released.wait(30)
        return real(one, taken)

    monkeypatch.setattr(tier_checks, "_judge", judge)
    monkeypatch.setattr(tier_checks, "TIMEOUT_S", 2.0)  # enough for the fine one
    wanted = [tier_checks.Wanted(name, str(tmp_path)) for name in ("hung", "fine")]
    found = tier_checks.check_paths(wanted)
    released.set()
    (fault,) = faults_of(found)
    assert "does not answer within 2 s" in fault
    assert [check.name for check in found if check.ok] == ["fine", "fine"]


def test_daemons_file_says_nothing_of_the_primary(session_name, capsys, tmp_path):
    file = tmp_path / "daemon.toml"
    file.write_text('[[tier]]\ntype = "memory"\n')
    code, found = examine(session_name, capsys, "-c", str(file))
    assert code == WELL
    assert "cgroup" not in {row["check"] for row in found}


BAD = {
    "option": (["--jsn"], "unknown option --jsn: did you mean --json?"),
    "no file": (["-c", "/nope.toml"], "/nope.toml cannot be read"),
    "no value": (["-c"], "expected one argument"),
}


@pytest.mark.parametrize(("words", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence(words, sentence, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *words])
    out, err = capsys.readouterr()
    assert (caught.value.code, out, err.count("\n")) == (2, "", 1)
    assert sentence in err


def test_unknown_tier_is_bad_input(config_file):
    with pytest.raises(BadInputError, match="did you mean slab"):
        doctor_command(["-c", config_file(tier="slap")])


@pytest.mark.parametrize("verb", ["doctor", "clean"])
def test_it_costs_little(verb, session_name, tmp_path):
    """CPU of the whole process, best of three: the machine may be busy."""

    def cpu_s():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, ROOT / f"tools/{verb}.py", "--session", session_name],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60.0,
            check=False,
        )
        assert (done.returncode in (WELL, ILL), done.stderr) == (True, "")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(cpu_s() for _ in range(3)) < MAX_CPU_S
