"""``python -m shmoffload.supervisor``: an engine's own supervisor.

Covers: the arguments that ``spawn.spawn_embedded`` gives.
Does not cover: the daemon (``shmoffload serve``).
Who calls it: ``spawn.spawn_embedded`` through a shell; never a person.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import sys

from shmoffload.supervisor.loop import Supervisor
from shmoffload.supervisor.setting import own_session, set_title
from shmoffload.supervisor.signals import StopSignals


def main() -> int:
    """Serve the engine at the other end of ``--control-fd``; return the exit code."""
    parser = argparse.ArgumentParser(prog="shmoffload.supervisor")
    parser.add_argument("--session", required=True)
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--worker-command", type=json.loads, default=None)
    arguments = parser.parse_args()
    logging.basicConfig(
        level=logging.WARNING, format="shmoffload supervisor: %(message)s"
    )
    own_session()
    set_title(arguments.session)
    os.set_inheritable(arguments.control_fd, False)
    with StopSignals() as signals:
        supervisor = Supervisor(
            arguments.session, worker_command=arguments.worker_command
        )
        supervisor.add_engine(socket.socket(fileno=arguments.control_fd))
        return supervisor.run(signals)


if __name__ == "__main__":
    sys.exit(main())
