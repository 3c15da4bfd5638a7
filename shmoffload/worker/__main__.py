"""``python -m shmoffload.worker``: the process of one tier.

Covers: arguments, set-up of the process, exit code.
Does not cover: what it does then (``serve``).
Who calls it: the supervisor, by exec; a person only to look at a crash.

Exit codes: 0 orderly end, 1 failed (may be tried again), 2 cannot work as
configured.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

from shmoffload.errors import ShmoffloadError
from shmoffload.wire import config as wire_config
from shmoffload.wire.channel import Channel
from shmoffload.wire.messages import FromWorker, Hello, encode_frame
from shmoffload.wire.region import PrimaryRegion
from shmoffload.wire.session import SessionPage
from shmoffload.worker import process
from shmoffload.worker.serve import EXIT_CONFIG, EXIT_FAILED, Worker

_HELLO_TIMEOUT_S = 2.0
_NUMBERS = (
    "tier-idx",
    "worker-epoch",
    "engine-epoch",
    "jobs-fd",
    "region-fd",
    "page-fd",
    "config-fd",
)


def main(argv: list[str] | None = None) -> int:
    """Run one worker to its end; return the exit code."""
    parser = argparse.ArgumentParser(prog="shmoffload.worker", allow_abbrev=False)
    for name in _NUMBERS:
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--parent-pid", type=int)
    args = parser.parse_args(argv)
    if not process.die_with_parent(args.parent_pid):
        return EXIT_FAILED  # the supervisor died while we were starting
    os.umask(0o077)
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="shmoffload: %(message)s"
    )
    logging.getLogger("shmoffload").setLevel(logging.INFO)  # a tier's limits
    channel = Channel.from_fd(args.jobs_fd)
    try:
        config = wire_config.decode(process.read_all(args.config_fd))
        tier = config.tier[args.tier_idx]
        process.be_nice(tier.nice)
        process.set_title(config.session.name, tier.name)
        page = SessionPage.from_fd(args.page_fd)
        region = PrimaryRegion.from_fd(args.region_fd)
    except (ShmoffloadError, OSError, IndexError) as error:
        logging.getLogger(__name__).error("%s", error)  # noqa: TRY400
        is_config_error = isinstance(error, ShmoffloadError) and error.exit_code == 2
        hello: list[FromWorker] = [
            Hello(args.worker_epoch, error=str(error), is_config_error=is_config_error)
        ]
        channel.send_wait(encode_frame(hello), timeout_s=_HELLO_TIMEOUT_S)
        return EXIT_CONFIG if is_config_error else EXIT_FAILED
    return Worker(
        channel,
        page,
        region,
        config,
        tier_idx=args.tier_idx,
        engine_epoch=args.engine_epoch,
        worker_epoch=args.worker_epoch,
    ).run()


if __name__ == "__main__":
    # Not sys.exit: a thread inside a hung tier call must not keep the process.
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
