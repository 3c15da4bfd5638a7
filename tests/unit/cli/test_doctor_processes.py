"""``doctor`` names who is stopped or stuck, and nobody else's processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import setproctitle

from shmoffload.cli import process_checks
from shmoffload.cli.process_checks import LOOKS, processes
from shmoffload.testing.poll import wait_until
from shmoffload.wire.config import from_dict
from shmoffload.wire.session import SessionPage, TierState, TierWord, Word

WELL = "ok no process of ours is stopped or hangs"
ENGINE, SUPERVISOR, WORKER = 11, 12, 13
SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)
CLONE_VFORK = 0x4000


@pytest.fixture
def page(session_name):
    """The page of a session that looks alive, with one tier."""
    opened = SessionPage.open_or_create(
        from_dict(
            {
                "session": {"name": session_name},
                "primary": {"slots": 1, "block_bytes": 1},
                "tier": [{"type": "memory", "name": "mem"}],
            }
        )
    )
    opened.set(Word.ENGINE_PID, ENGINE)
    opened.set(Word.SUPERVISOR_PID, SUPERVISOR)
    opened.set_tier(0, TierWord.WORKER_PID, WORKER)
    yield opened
    opened.unlink(session_name)
    opened.close()


class FakeProc:
    """A /proc with three processes of a session and one stranger."""

    def __init__(self, root, session):
        self.root, self.session = root, session
        self.make(1, "systemd", page=False)
        self.make(ENGINE, "VLLM::EngineCor")
        self.make(SUPERVISOR, "shmoffload: abc")
        self.make(WORKER, "shmoffload: abc")

    def make(self, pid, comm, *, state="S", io_state="S", page=True):
        """One process with a main thread and an I/O thread."""
        folder = self.root / str(pid)
        (folder / "fd").mkdir(parents=True, exist_ok=True)
        for thread in (pid, pid + 1000):
            (folder / f"task/{thread}").mkdir(parents=True, exist_ok=True)
        (folder / "comm").write_text(comm)
        self.set(pid, state, io_state)
        if page and not (folder / "fd/7").is_symlink():
            name = f"/dev/shm/shmoffload.{self.session}.page"
            (folder / "fd/7").symlink_to(name)
            (folder / "fd/8").symlink_to("socket:[123]")

    def set(self, pid, state, io_state="S", *, switches=5):
        folder = self.root / str(pid)
        comm = (folder / "comm").read_text()
        line = f"{pid} ({comm}) {{}} 1 1 1 0 -1 4194560 1 2 3"
        (folder / "stat").write_text(line.format(state))
        for thread, its in ((pid, state), (pid + 1000, io_state)):
            (folder / f"task/{thread}/status").write_text(
                f"Name:\t{comm}\nState:\t{its} (words)\n"
                f"voluntary_ctxt_switches:\t{switches}\n"
                f"nonvoluntary_ctxt_switches:\t1\n"
            )


@pytest.fixture
def proc(page, session_name, tmp_path, monkeypatch):
    monkeypatch.setattr(process_checks, "_PROC", tmp_path)
    monkeypatch.setattr(process_checks.time, "sleep", lambda _s: None)
    return FakeProc(tmp_path, session_name)


def lines(session):
    return [str(check) for check in processes(session)]


def test_all_is_well(proc, session_name):
    assert lines(session_name) == [WELL]


@pytest.mark.parametrize(
    ("pid", "who"),
    [
        (ENGINE, "The engine"),
        (SUPERVISOR, "The supervisor"),
        (WORKER, "The worker of tier mem"),
    ],
)
def test_stopped(proc, session_name, pid, who):
    proc.set(pid, "T")
    who = f"{who} of session {session_name} (process {pid})"
    assert lines(session_name) == [f"FAIL: {who} is stopped. Fix: kill -CONT {pid}"]
    proc.set(pid, "t")
    (line,) = lines(session_name)
    assert line.startswith(f"FAIL: {who} is held by a debugger. Fix: end the debugger")


def test_hanging_in_the_kernel_is_any_thread_and_more_than_a_moment(
    proc, session_name, monkeypatch
):
    proc.set(WORKER, "S", io_state="D")
    (line,) = lines(session_name)
    who = f"The worker of tier mem of session {session_name} (process {WORKER})"
    assert line.startswith(f"FAIL: {who} hangs in the kernel. Fix: mend its storage")

    looks = []

    def sleep(_s):
        looks.append(1)
        if len(looks) == LOOKS - 1:
            proc.set(WORKER, "S", io_state="S")  # it was a slow disk

    monkeypatch.setattr(process_checks.time, "sleep", sleep)
    assert lines(session_name) == [WELL]
    assert len(looks) == LOOKS - 1
    looks.clear()
    assert lines(session_name) == [WELL]
    assert looks == [], "nothing to look at twice, nothing to wait for"


def test_a_disk_at_work_is_no_hang(proc, session_name, monkeypatch):
    """Some thread waits for it at every look, but it has run since the last one."""
    proc.set(WORKER, "S", io_state="D")
    looks = []

    def sleep(_s):
        looks.append(1)
        proc.set(WORKER, "S", io_state="D", switches=5 + len(looks))

    monkeypatch.setattr(process_checks.time, "sleep", sleep)
    assert lines(session_name) == [WELL]
    assert looks == [1]


def test_killed_and_not_gone_is_what_the_supervisor_says(proc, page, session_name):
    page.set_tier(0, TierWord.STATE, TierState.STUCK)
    proc.set(WORKER, "D", io_state="D")
    (line,) = lines(session_name)
    assert f"The worker of tier mem of session {session_name} (process 13)" in line
    assert "was killed and is not gone. Fix: mend its storage" in line


def test_who_is_not_ours_is_left_out(proc, session_name, monkeypatch):
    proc.set(1, "D", io_state="D")
    proc.make(2, "bash", state="T", page=False)
    assert lines(session_name) == [WELL]
    # A pid of the page may be another process in this pid namespace.
    proc.set(ENGINE, "T")
    for link in (proc.root / f"{ENGINE}/fd").iterdir():
        link.unlink()
    assert lines(session_name) == [WELL]
    proc.set(WORKER, "T")
    mine = os.geteuid()
    monkeypatch.setattr(process_checks.os, "geteuid", lambda: mine + 1)
    assert lines(session_name) == [WELL]


def test_worker_of_a_session_that_is_gone(proc, session_name):
    proc.make(14, "shmoffload: old", state="T", page=False)
    assert lines(session_name) == [WELL]
    found = " ".join(lines(None))
    assert "A process of a session that is gone (process 14) is stopped" in found
    proc.session = "old"
    proc.make(15, "shmoffload: old", state="T")
    assert lines("old") == [
        "FAIL: A process of session old (process 15) is stopped. Fix: kill -CONT 15"
    ]


def test_process_that_ends_while_it_is_looked_at(proc, session_name):
    (proc.root / f"{WORKER}/task/{WORKER}/status").unlink()
    proc.make(16, "shmoffload: abc", state="T")
    (proc.root / "16/stat").unlink()
    assert lines(session_name) == [WELL]


@pytest.mark.skipif(SYS_CLONE is None, reason="its number is not known here")
def test_a_real_wait_in_the_kernel_is_found(session_name):
    """A parent waits like that for a child that shares its place (CLONE_VFORK)."""
    code = (
        "import ctypes, os, setproctitle, signal, sys\n"
        f"setproctitle.setproctitle('shmoffload: {session_name} mem')\n"
        "libc = ctypes.CDLL(None)\n"
        f"if libc.syscall({SYS_CLONE}, {CLONE_VFORK} | signal.SIGCHLD, 0, 0, 0, 0):\n"
        "    sys.exit()\n"
        "print('up', flush=True)\n"
        "sys.stdin.read()\n"
        "os._exit(0)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout.readline() == b"up\n"
        who = f"(process {parent.pid}) hangs in the kernel"
        assert any(who in line for line in lines(None))
        parent.stdin.close()
        parent.wait(60)
        assert not any(who in line for line in lines(None))


def test_a_real_process_is_found_stopped_and_goes_on(page, session_name):
    """The fix that is printed is the one that works."""
    assert setproctitle.getproctitle(), "what gives workers their titles"
    code = (
        "import setproctitle, sys\n"
        f"setproctitle.setproctitle('shmoffload: {session_name} mem')\n"
        "print('up', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[page.fd],
    ) as child:
        try:
            assert child.stdout.readline() == b"up\n"
            page.set_tier(0, TierWord.WORKER_PID, child.pid)
            assert lines(session_name) == [WELL]
            child.send_signal(signal.SIGSTOP)
            stat = Path(f"/proc/{child.pid}/stat")
            wait_until(
                lambda: stat.read_text().rpartition(") ")[2][0] == "T",
                timeout_s=30,
                what="the stop",
            )
            (line,) = lines(session_name)
            who = f"The worker of tier mem of session {session_name}"
            assert line.startswith(f"FAIL: {who} (process {child.pid}) is stopped")
            fix = line.partition("Fix: ")[2]
            subprocess.run(fix.split(), check=True, timeout=30)
            wait_until(
                lambda: lines(session_name) == [WELL], timeout_s=30, what="its going on"
            )
        finally:
            child.kill()
