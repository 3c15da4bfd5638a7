"""F40: a start without enough memory is a sentence, never a SIGBUS at first touch.

Each system call's refusal: ``tests/unit/wire/test_region``; ``doctor``'s lines:
``tests/unit/cli/test_doctor``.
"""

import json
import logging
import os
import subprocess
import sys

import pytest
from late_faults_kit import WAIT_S, inside_tmpfs, python_env
from region_kit import OPEN, PRELUDE, STAY, config_of, our_names, running

from shmoffload.wire import room
from shmoffload.wire.region import PrimaryRegion

pytestmark = [pytest.mark.timeout(300), pytest.mark.shm]

# 127 slots: 1 MiB and a page. The small region of the prelude: half of that.
ONE_MIB = """
config = from_dict({"session": {"name": sys.argv[1]},
                    "primary": {"slots": 127, "block_bytes": 4096}})
"""
ATTEMPT = f"""
from shmoffload.errors import RegionTooSmallError
def attempt():
    try:
        {OPEN.strip()}
    except RegionTooSmallError as error:
        say(error.exit_code, error)
"""
# For who may not mount: what the full tmpfs was measured to say.
PRETEND = """
import errno
free = type("Free", (), dict(f_bavail=64, f_frsize=4096, f_blocks=64, f_flag=0,
                             f_files=0, f_favail=0))
os.fstatvfs = lambda fd: free
def no_room(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
os.posix_fallocate = no_room
"""


def run_in_256k(code, session):
    """Run code where /dev/shm has 256 KiB; return the process's end and lines."""
    inside = inside_tmpfs("size=256K")
    code = PRELUDE + ("" if inside else PRETEND) + code
    done = subprocess.run(
        [*(inside or []), sys.executable, "-c", code, session],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env=python_env(),
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.splitlines()


def test_f40_one_mib_on_256_kib(session_name):
    """Asked and free bytes, the knob; nothing left; exit code 2 and no signal."""
    left = f"say([n for n in os.listdir('/dev/shm') if {session_name!r} in n])\n"
    said, names_left = run_in_256k(f"{ONE_MIB}{ATTEMPT}attempt()\n{left}", session_name)
    assert said.startswith("2 /dev/shm has 262144 bytes free")
    assert "the primary region needs 1052672 bytes" in said
    assert "remount,size=" in said or "--shm-size" in said or "sizeLimit" in said
    assert "primary.slots" in said
    assert names_left == "[]"


def test_f40_room_that_another_process_was_quicker_to_take(session_name):
    """The look was fine; the allocation says no, not the first touch."""
    code = (
        "free = type('Free', (), dict(f_bavail=1 << 40, f_frsize=1, f_blocks=1))\n"
        "os.fstatvfs = lambda fd: free\n"
        f"attempt()\nsay([n for n in os.listdir('/dev/shm') if {session_name!r} in n])"
    )
    said, names_left = run_in_256k(f"{ONE_MIB}{ATTEMPT}{code}", session_name)
    assert "needs 1052672 bytes" in said
    assert names_left == "[]"


def test_f40_a_command_ends_with_a_sentence(tmp_path):
    inside = inside_tmpfs("size=256K")
    code = "from shmoffload.cli import main\nmain(['demo'])"
    done = subprocess.run(
        [
            *(inside or []),
            sys.executable,
            "-c",
            code if inside else f"import os\n{PRETEND}{code}",
        ],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env=python_env(TMPDIR=str(tmp_path)),
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("shmoffload: /dev/shm has ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_f40_dockers_default_is_too_little_and_doctor_says_so():
    inside = inside_tmpfs("size=64M")
    pretend = "import os\nreal = os.statvfs\n" + (
        "os.statvfs = lambda p: free if p == '/dev/shm' else real(p)\n"
        "free = type('Free', (), dict(f_bavail=16384, f_frsize=4096, f_blocks=16384,"
        " f_flag=0, f_files=0, f_favail=0))\n"
    )
    code = "from shmoffload.cli import main\nmain(['doctor', '--json'])"
    done = subprocess.run(
        [
            *(inside or []),
            sys.executable,
            "-c",
            code if inside else pretend + code,
        ],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env=python_env(),
    )
    assert done.returncode == 1, done.stderr
    checks = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    memory = checks["shared memory"]
    assert not memory["ok"]
    assert "64 MiB" in memory["fact"]
    assert memory["fix"]


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
def test_f40_what_shared_memory_refuses_is_said(session_name, options, then, words):
    inside = inside_tmpfs(options)
    if inside is None:  # what needs no mount
        then, words = "ulimit -f 0", "ulimit -f unlimited"
    code = """
from shmoffload.errors import BadInputError
for start in (SessionPage.open_or_create, PrimaryRegion.open):
    try:
        start(config)
    except BadInputError as error:
        say(error.exit_code, error)
say([name for name in os.listdir("/dev/shm") if sys.argv[1] in name])
"""
    done = subprocess.run(
        [
            *(inside or []),
            *("sh", "-c", f'{then} && exec "$@"', "sh"),
            *(sys.executable, "-c", PRELUDE + code, session_name),
        ],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env=python_env(),
    )
    assert done.returncode == 0, done.stderr
    page, region, left = done.stdout.splitlines()
    for said in (page, region):
        assert said.startswith("2 ")
        assert words in said
    assert left == "[]"


def test_f40_the_cgroups_limit_is_warned_about_before_a_page_is_touched(
    session_name, monkeypatch, caplog
):
    """Another limit than the tmpfs's: the kernel kills who passes it."""
    order = []
    real = room.populate
    monkeypatch.setattr(room, "cgroup_headroom", lambda: 100 << 10)
    monkeypatch.setattr(room, "populate", lambda m: order.append(len(caplog.records)))
    with caplog.at_level(logging.WARNING):
        region = PrimaryRegion.open(config_of(session_name))
    real(region._mapping)
    assert order == [1]
    assert "memory limit of this cgroup" in caplog.text
    region.unlink()
    region.close()


def test_f40_joining_without_the_kernels_help_changes_no_byte(session_name):
    """Linux before 5.14 does not populate: the slow way reads only."""
    old_kernel = "room._MADV_POPULATE_WRITE = 9999\n"  # EINVAL, as there
    region = PrimaryRegion.open(config_of(session_name))
    try:
        block = os.urandom(4096)
        for slot in range(64):
            region.slot_view(slot)[:] = block
        with running(f"{old_kernel}{OPEN}{STAY}", session_name) as joiner:
            inode = int(joiner.stdout.readline())
            assert inode == os.fstat(region.fd).st_ino
            assert all(bytes(region.slot_view(slot)) == block for slot in range(64))
    finally:
        region.unlink()
        region.close()
    assert our_names(session_name) == []
