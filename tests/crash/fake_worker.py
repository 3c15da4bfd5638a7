"""A worker without a tier: says hello, beats, leaves on end of file.

FAKE_WORKER in the environment changes it: ``refuse`` (exit code 2), ``crash`` (exit
code 1 at once), ``deaf`` (ignores SIGTERM and end of file), ``mute`` (never opens).
"""

import argparse
import ctypes
import os
import signal
import sys
import time

import setproctitle

from shmoffload.wire.channel import Channel, ChannelClosedError
from shmoffload.wire.config import decode
from shmoffload.wire.messages import Hello, Resident, encode_frame
from shmoffload.wire.session import SessionPage, TierWord

ARGUMENTS = (
    "tier-idx parent-pid worker-epoch engine-epoch jobs-fd region-fd page-fd config-fd"
)
PR_SET_PDEATHSIG = 1


def main():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parser = argparse.ArgumentParser()
    for name in ARGUMENTS.split():
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    mode = os.environ.get("FAKE_WORKER", "")
    if mode in ("refuse", "crash"):
        sys.exit(2 if mode == "refuse" else 1)
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    config = decode(os.read(args.config_fd, 1 << 20))
    tier = config.tier[args.tier_idx]
    setproctitle.setproctitle(f"shmoffload: {config.session.name} {tier.name}")
    page = SessionPage.from_fd(args.page_fd)
    os.fstat(args.region_fd)
    jobs = Channel.from_fd(args.jobs_fd)
    if mode != "mute":
        hello = [
            Hello(args.worker_epoch),
            Resident(args.worker_epoch, [], is_last=True),
        ]
        jobs.send(encode_frame(hello))
        page.set_tier(args.tier_idx, TierWord.WORKER_READY, args.worker_epoch)
    while True:
        page.set_tier(args.tier_idx, TierWord.HEARTBEAT_NS, time.monotonic_ns())
        try:
            jobs.wait(timeout_s=config.limits.heartbeat_s)
            jobs.receive()
        except ChannelClosedError:
            if mode != "deaf":
                sys.exit(0)
            time.sleep(config.limits.heartbeat_s)


if __name__ == "__main__":
    main()
