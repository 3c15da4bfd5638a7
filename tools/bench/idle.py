#!/usr/bin/env python3
"""What does an idle session cost? CPU of all its processes after a replay.

Covers: engine, supervisor and workers, from /proc, over a minute.
Does not cover: what they cost under load (``shmoffload replay --live``).
Who calls it: ``make bench-idle``; a person.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from shmoffload.engine import Engine
from shmoffload.replay.generate import MultiTurn, generate
from shmoffload.replay.live import LoopSettings
from shmoffload.replay.report import Hooks, replay_on
from shmoffload.replay.settings import BlockScale, build_config
from shmoffload.wire.session import TierWord, Word

MAX_SHARE = 0.01
BLOCK_BYTES = 64 * 1024


def cpu_s(pid: int) -> float:
    """User and system seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def processes(engine: Engine) -> dict[str, int]:
    """Name the processes of a session."""
    pids = {"engine": os.getpid(), "supervisor": engine.page.get(Word.SUPERVISOR_PID)}
    for i, tier in enumerate(engine.tiers):
        pids[tier.name] = engine.page.get_tier(i, TierWord.WORKER_PID)
    return pids


def main() -> int:
    """Replay, rest, and report; 1 when resting costs too much."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    rest_s = parser.parse_args().seconds
    workload = generate(MultiTurn())
    with tempfile.TemporaryDirectory() as folder:
        config = build_config(
            session=f"idle-{os.getpid()}",
            primary="20%",
            tiers=[f"slab:{folder}/slab,cap=100%", f"fs:{folder}/fs,cap=100%"],
            scale=BlockScale(workload.num_distinct, BLOCK_BYTES),
        )
        with Engine(config) as engine:
            settings = LoopSettings()
            report = replay_on(engine, workload, settings, hooks=Hooks(), described={})
            pids = processes(engine)
            before = {name: cpu_s(pid) for name, pid in pids.items()}
            time.sleep(rest_s)
            spent = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
    share = sum(spent.values()) / rest_s
    result = {"ok": report.ok, "seconds": rest_s, "cpu_s": spent, "share": share}
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    return 0 if report.ok and share < MAX_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
