"""One started worker process: exec, signals, reaping.

Covers: the descriptors that a worker inherits, its command line, its death.
Does not cover: when to start or end it (``life``), telling anybody (``keeper``).
Who calls it: ``keeper.TierKeeper``, in the supervisor's main and only thread: a
worker's PDEATHSIG means the death of the *thread* that started it. Nothing waits,
except for the exec itself (about a millisecond).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import TYPE_CHECKING

from shmoffload.supervisor.spawn import child_env, python_command, stderr_or_null
from shmoffload.wire.channel import Channel, channel_pair
from shmoffload.wire.config import encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmoffload.wire.config import Config


def default_worker_command() -> list[str]:
    """Return the command of the real worker, without its arguments."""
    return python_command("shmoffload.worker")


class WorkerProcess:
    """A worker that was started and is not reaped yet.

    Attributes:
        pid: of the process.
        pidfd: readable when it is dead; closed by ``reap``.
    """

    def __init__(self, popen: subprocess.Popen[bytes], pidfd: int) -> None:
        """Take over a started process; use ``start``."""
        self._popen = popen
        self.pid = popen.pid
        self.pidfd = pidfd

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        config: Config,
        *,
        tier_idx: int,
        worker_epoch: int,
        engine_epoch: int,
        region_fd: int,
        page_fd: int,
    ) -> tuple[WorkerProcess, Channel]:
        """Start a worker; return it with the engine's end of its jobs channel.

        No end of the channel stays open here once the caller has sent and closed
        the engine's: a copy kept by anybody would hide both deaths.

        Raises:
            OSError: no process or descriptor is to be had; nothing is left.
        """
        engine_end, worker_end = channel_pair()
        config_fd = -1
        try:
            config_fd = _memory_file(encode(config))
            numbers = {
                "tier-idx": tier_idx,
                "parent-pid": os.getpid(),
                "worker-epoch": worker_epoch,
                "engine-epoch": engine_epoch,
                "jobs-fd": worker_end.fileno(),
                "region-fd": region_fd,
                "page-fd": page_fd,
                "config-fd": config_fd,
            }
            process = cls(
                *_exec(
                    [*command, *(f"--{key}={value}" for key, value in numbers.items())],
                    (worker_end.fileno(), region_fd, page_fd, config_fd),
                )
            )
        except BaseException:
            engine_end.close()
            raise
        finally:
            worker_end.close()
            if config_fd >= 0:
                os.close(config_fd)
        return process, engine_end

    def terminate(self) -> None:
        """Ask it to end in order."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it; also one that is stopped (SIGSTOP)."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # By pidfd: it cannot hit another process that got the pid. A dead worker is
        # no error: its pidfd is readable, and it is reaped next.
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> int | None:
        """Collect its end; None while it lives. Closes ``pidfd``."""
        code = self._popen.poll()
        if code is not None:
            os.close(self.pidfd)
            self.pidfd = -1
        return code


def _memory_file(data: bytes) -> int:
    """Return a descriptor to read ``data`` from; not a pipe, nobody has to feed it."""
    fd = os.memfd_create("shmoffload-config")
    try:
        os.write(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError:
        os.close(fd)
        raise
    return fd


def _exec(
    command: Sequence[str], fds: tuple[int, ...]
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a process that inherits ``fds``; return it with its pidfd."""
    popen = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stderr_or_null(),
        pass_fds=fds,
        # Its own group: Ctrl-C in a terminal is for the daemon, which then ends its
        # workers in order. Not a session: that would undo nice (see ``setting``).
        process_group=0,
        env=child_env(),
    )
    try:
        return popen, os.pidfd_open(popen.pid)
    except OSError:
        popen.kill()
        popen.wait()
        raise
