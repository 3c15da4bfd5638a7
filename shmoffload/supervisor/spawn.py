"""How an engine reaches a supervisor: the daemon if there is one, else its own.

Covers: starting an embedded supervisor outside the engine's process tree,
connecting to a daemon, the environment of our child processes.
Does not cover: what is said afterwards (``wire.messages``, control channel).
Who calls it: the engine, at start and after its supervisor died; one thread. Waits
are bounded: a shell's exit (milliseconds), a connect.
"""

from __future__ import annotations

import json
import os
import site
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import shmoffload
from shmoffload.errors import StartError
from shmoffload.supervisor.peer import peer_of
from shmoffload.supervisor.runtime_dir import open_runtime_dir, socket_address
from shmoffload.wire.channel import Channel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmoffload.wire.config import Config

_SHELL_TIMEOUT_S: Final = 10.0
_CONNECT_TIMEOUT_S: Final = 1.0
_CONNECT_PAUSE_S: Final = 0.01
# The shell leaves at once, so the supervisor's parent is init: an inference server
# kills its descendants at shutdown, and the cleaner must not be among them.
_DETACH: Final = '"$0" "$@" </dev/null & exit 0'


def child_env() -> dict[str, str]:
    """Return our environment, in which a child can import this very package."""
    env = dict(os.environ)
    root = str(Path(shmoffload.__file__).resolve().parent.parent)
    if root not in [*site.getsitepackages(), site.getusersitepackages()]:
        # A checkout. Behind what is there: never shadow what the person chose.
        paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
        env["PYTHONPATH"] = os.pathsep.join([*paths, root])
    return env


def python_command(module: str) -> list[str]:
    """Return the command that runs a module of ours, whatever the directory.

    -P: a folder that happens to be the working directory must not be imported.
    """
    return [sys.executable, "-P", "-m", module]


def stderr_or_null() -> int:
    """Return a descriptor for a child's stdout: our stderr if it is open."""
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


def spawn_embedded(
    config: Config, *, worker_command: Sequence[str] | None = None
) -> Channel:
    """Start a supervisor that is no descendant; return our end of its channel.

    The supervisor waits for ``Attach`` on it. That it came up is not awaited: end of
    file on the channel says that it did not.

    Args:
        config: names the session.
        worker_command: what to run instead of ``shmoffload.worker``; for tests.

    Raises:
        StartError: no shell, no process or no descriptor is to be had.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fd = theirs.fileno()
    command = [
        *python_command("shmoffload.supervisor"),
        *("--session", config.session.name, "--control-fd", str(fd)),
    ]
    if worker_command is not None:
        command += ["--worker-command", json.dumps(list(worker_command))]
    try:
        _run_detached(command, fd)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return Channel(ours)


def _run_detached(command: list[str], fd: int) -> None:
    try:
        shell = subprocess.Popen(
            ["/bin/sh", "-c", _DETACH, *command],
            stdin=subprocess.DEVNULL,
            stdout=stderr_or_null(),
            pass_fds=(fd,),
            start_new_session=True,
            env=child_env(),
        )
    except OSError as error:
        raise StartError(
            f"the supervisor cannot be started ({error.strerror}): /bin/sh is "
            f"needed, and room for processes and open files (ulimit -u, -n)"
        ) from error
    try:
        code = shell.wait(_SHELL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        shell.kill()
        shell.wait(_SHELL_TIMEOUT_S)
        raise StartError(
            f"/bin/sh did not start the supervisor within {_SHELL_TIMEOUT_S:.0f} s: "
            f"the machine is overloaded, try again"
        ) from None
    if code:
        raise StartError(f"/bin/sh could not start the supervisor (exit code {code})")


def connect_daemon(session: str) -> Channel | None:
    """Connect to the daemon that serves ``session``; None if none does.

    Raises:
        StartError: the runtime directory or the socket belongs to somebody else, or
            the daemon is there and does not answer: a second supervisor beside it
            would write the same page.
    """
    dir_fd = open_runtime_dir(create=False)
    if dir_fd is None:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        _connect(sock, socket_address(dir_fd, session))
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        sock.close()
        return None
    except OSError as error:
        sock.close()
        raise StartError(
            f'the daemon of session "{session}" does not answer ({error}): end it, or '
            f"choose another session.name"
        ) from error
    finally:
        os.close(dir_fd)
    peer = peer_of(sock)
    if peer.uid != os.geteuid():
        sock.close()
        raise StartError(
            f'the daemon of session "{session}" runs as user {peer.uid}, this process '
            f"as {os.geteuid()}: run both as one user"
        )
    return Channel(sock)


def _connect(sock: socket.socket, address: str) -> None:
    """Connect, and wait a little while the backlog is full: EAGAIN, at once.

    Raises:
        OSError: no daemon, or none that accepts in time.
    """
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    sock.settimeout(_CONNECT_TIMEOUT_S)
    while True:
        try:
            sock.connect(address)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_CONNECT_PAUSE_S)
        else:
            return
