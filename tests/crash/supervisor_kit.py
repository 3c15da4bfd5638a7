"""What the supervisor's crash tests share: configuration, processes, names."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from fake_engine import LONG_S

from shmoffload.testing.poll import wait_until
from shmoffload.wire import names

HERE = Path(__file__).parent
TOML = """
[session]
name = "{name}"
[primary]
block_bytes = 4096
slots = 4
[[tier]]
type = "memory"
name = "one"
[[tier]]
type = "memory"
name = "two"
[limits]
heartbeat_s = 0.05
hung_after_s = {hung_after_s}
restart_backoff_s = {backoff_s}
restart_backoff_max_s = {backoff_s}
start_timeout_s = {start_timeout_s}
"""


def toml(name, *, backoff_s=0.1, hung_after_s=30, start_timeout_s=30):
    return TOML.format(
        name=name,
        backoff_s=backoff_s,
        hung_after_s=hung_after_s,
        start_timeout_s=start_timeout_s,
    )


def is_alive(pid):
    """Say whether a thread of it is left; the first one may be dead before others."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


def wait_gone(pids, *, timeout_s=LONG_S):
    wait_until(
        lambda: not any(is_alive(pid) for pid in pids),
        timeout_s=timeout_s,
        what=f"the end of {pids}",
    )


def sweep_to_end(session, *, kept_too=False):
    """Sweep until no name of a session whose processes are dead is left.

    A lock may outlive its process for an instant: whoever reads its /proc entry just
    then holds its memory, and with it the descriptor.
    """

    def is_clean():
        names.sweep(session, kept_too=kept_too)
        return names_of(session) == []

    wait_until(is_clean, timeout_s=LONG_S, what="locks of processes that still end")


def names_of(session):
    return [name for name in os.listdir("/dev/shm") if f".{session}." in name]


def pids_of(session):
    """Return the processes that have the session's name in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if session.encode() in re.split(rb"[ \0]", line):
                found.append(int(entry.name))
    return found


def num_fds(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def descendants(pid):
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found = {pid}
    while (
        more := {child for child, parent in parents.items() if parent in found} - found
    ):
        found |= more
    return found


def cpu_ticks(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def start_engine_process(tmp_path, session_name, *arguments):
    """Return (process, pids); the process attached and has its workers."""
    file = tmp_path / "engine.toml"
    file.write_text(toml(session_name))
    engine = subprocess.Popen(
        [sys.executable, str(HERE / "fake_engine.py"), str(file), *arguments],
        stdout=subprocess.PIPE,
    )
    return engine, json.loads(engine.stdout.readline())


def end_process(process):
    process.kill()
    process.wait()
    process.stdout.close()
