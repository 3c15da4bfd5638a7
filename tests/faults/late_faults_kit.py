"""What the tests of faults F29 onward share: places, processes, worker patches."""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import engine_kit as kit
from supervisor_kit import names_of, pids_of

from shmoffload.engine import supervisor_link
from shmoffload.supervisor.spawn import spawn_embedded
from shmoffload.testing.poll import wait_until
from shmoffload.wire.session import TierWord

WAIT_S = 60
TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent

# A worker whose modules are patched before it starts, see ``patched``.
_WORKER = """
import errno, os, re, signal, sys, threading, time
from shmoffload.worker import __main__
tier_idx = int(re.search("--tier-idx[= ]([0-9]+)", " ".join(sys.argv))[1])
def die(*_args): os.kill(os.getpid(), signal.SIGKILL)
{patch}
sys.exit(__main__.main())
"""
_ENGINE = """
import os, signal, sys
sys.path[:0] = {kits!r}
import engine_kit as kit
from shmoffload.engine import Engine
def say(*words): print(*words, flush=True)
def hear(): return sys.stdin.readline().strip()
"""


def patched(patch):
    """Return a ``wrap`` for ``WorkerRig.start``: the worker runs ``patch`` first."""
    code = _WORKER.format(patch=patch)
    return lambda command: [sys.executable, "-c", code, *command[3:]]


def patch_workers(monkeypatch, patch):
    """Let the workers of every engine that is started now run ``patch`` first.

    It knows ``tier_idx``, ``die`` and the usual modules.
    """
    command = [sys.executable, "-c", _WORKER.format(patch=patch)]
    monkeypatch.setattr(
        supervisor_link,
        "spawn_embedded",
        functools.partial(spawn_embedded, worker_command=command),
    )


def python_env(**more):
    """Return an environment in which a child finds this checkout."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


@contextlib.contextmanager
def engine_process(code, *words, env=(), **popen):
    """Run ``code`` with ``kit``, ``Engine``, ``say`` and ``hear``; killed at the end.

    ``words`` are its ``sys.argv[1:]``.
    """
    prelude = _ENGINE.format(kits=[str(TESTS / "integration")])
    with subprocess.Popen(
        [sys.executable, "-c", prelude + code, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=python_env(**dict(env)),
        **popen,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def hear(process):
    """Return the next line that an engine process says; waits for it."""
    line = process.stdout.readline()
    assert line, "the engine's process ended"
    return line.strip()


def tell(process, words):
    process.stdin.write(f"{words}\n")
    process.stdin.flush()


def inside_tmpfs(options, *, at="/dev/shm"):
    """Return the words that run a command where ``at`` is a small tmpfs of its own.

    None for a user who may not mount, not even in a user namespace.
    """
    mount = (
        f"mount --make-rprivate / && mount -t tmpfs -o {options} tmpfs {at} && "
        'exec "$@"'
    )
    if not shutil.which("unshare"):
        return None
    how = "-m" if os.geteuid() == 0 else "-rm"
    inside = ["unshare", how, "sh", "-c", mount, "sh"]
    done = subprocess.run([*inside, "true"], capture_output=True)
    return None if done.returncode else inside


class SmallDisk:
    """A folder that takes so many bytes and no more, for a worker's ``os.write``.

    A tmpfs for who may mount; for others the worker's writes are counted: they come
    back short and then fail, as a real full disk's do.

    Attributes:
        folder: the disk.
        patch: what the worker has to run first, see ``patched``.
    """

    _COUNTED = """
real = os.write
def write(fd, data):
    if not os.readlink(f"/proc/self/fd/{{fd}}").startswith({folder!r}):
        return real(fd, data)
    free = int(open({count!r}).read())
    if free == 0:
        raise OSError(errno.ENOSPC, "No space left on device")
    done = real(fd, data[:free])
    open({count!r}, "w").write(str(free - done))
    return done
os.write = write
"""

    def __init__(self, folder, num_bytes):
        self.folder, self.patch = folder, ""
        self._count = folder.with_suffix(".free")
        folder.mkdir()
        self._is_mounted = os.geteuid() == 0 and self._mount(f"size={num_bytes}")
        if not self._is_mounted:
            names = {"folder": str(folder), "count": str(self._count)}
            self.patch = self._COUNTED.format(**names)
            self._count.write_text(str(num_bytes))

    def _mount(self, options):
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)]
        return subprocess.run(command, capture_output=True).returncode == 0

    def grow(self, num_bytes):
        """Give it another size."""
        if self._is_mounted:
            assert self._mount(f"remount,size={num_bytes}")
        else:
            self._count.write_text(str(num_bytes))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._is_mounted:
            wait_until(
                lambda: subprocess.run(["umount", str(self.folder)]).returncode == 0,
                timeout_s=10,
                what="the unmount",
            )


@contextlib.contextmanager
def tmpfs_folder():
    """A directory on a tmpfs, for whoever may not mount."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="not-ours-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def wait_nothing_left(session):
    """Wait until no process and no name of a session is left."""
    wait_until(
        lambda: not names_of(session) and not pids_of(session),
        timeout_s=WAIT_S,
        what=f"the end of {names_of(session)} {pids_of(session)}",
    )


def word(engine, which, tier_idx=0):
    return engine.page.get_tier(tier_idx, which)


def pids(engine):
    """Return the worker processes of an engine, as the page names them."""
    num_tiers = len(engine.tiers)
    return [word(engine, TierWord.WORKER_PID, i) for i in range(num_tiers)]


def wait_up(engine):
    """Step until every tier is up."""
    wait_until(
        lambda: kit.step(engine) or all(tier.is_up for tier in engine.tiers),
        timeout_s=WAIT_S,
        what="all tiers to be up",
    )


def files_in(folder):
    """Return path -> bytes of every file below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def finish_all(engine):
    """End the requests that are still open."""
    for req_id in list(engine.manager._book.live):
        engine.on_request_finished(kit.ReqContext(req_id))
    kit.step(engine)


class Prompted:
    """A worker's queue that first says what the test wants it to say."""

    def __init__(self, channel):
        self._channel = channel
        self.frames = []

    def __getattr__(self, name):
        return getattr(self._channel, name)

    def receive(self):
        return self.frames.pop(0) if self.frames else self._channel.receive()
