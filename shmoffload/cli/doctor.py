"""``shmoffload doctor``: can it work on this machine, one line a fact.

Covers: the verb's options, which checks a configuration asks for, ``--json``.
Does not cover: the checks (``cli.checks``, ``cli.tier_checks``,
``cli.process_checks``).
Who calls it: ``cli.main``, ``tools/doctor.py``; under 0.3 s of CPU. Changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING

from shmoffload.cli import checks
from shmoffload.cli.options import Parser
from shmoffload.cli.process_checks import processes
from shmoffload.cli.tier_checks import Wanted, check_keys, check_paths, wanted_of
from shmoffload.cli.unnamed import unnamed_memory
from shmoffload.wire import config as config_
from shmoffload.wire.names import SHM_DIR, is_held, region_name
from shmoffload.wire.region_join import Geometry
from shmoffload.wire.sizes import parse_size
from shmoffload.worker.registry import check_tier_types

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from shmoffload.wire.config import Config


def doctor_command(argv: Sequence[str]) -> int:
    """Look at the machine, and at what a configuration needs of it.

    Returns:
        0 all is well, 1 something has to be done.

    Raises:
        BadInputError: wrong options, or a configuration that cannot be used.
    """
    options = _parse(argv)
    config = None
    if options.config is not None:
        config = config_.load(options.config, tiers_only=True)
        check_tier_types(config)
    found = _examine(config, options)
    if options.json:
        rows = [
            {"check": c.name, "ok": c.ok, "fact": c.fact, "fix": c.fix} for c in found
        ]
        print(json.dumps({"ok": all(c.ok for c in found), "checks": rows}, indent=2))
    else:
        print("\n".join(map(str, found)))
    return 0 if all(check.ok for check in found) else 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "doctor",
        "Can it work here: shared memory, limits, kernel, disks, leftovers, processes.",
        "0 all is well, 1 something has to be done, 2 bad input",
    )
    add = parser.add_argument
    add("-c", "--config", metavar="FILE", help="also what this configuration needs")
    add(
        "--tier-path",
        metavar="DIR",
        action="append",
        default=[],
        help="also this directory; can be given again",
    )
    add("--session", metavar="NAME", help="leftovers and life of this session only")
    add("--json", action="store_true", help="for programs")
    return parser.read(argv)


def _examine(config: Config | None, options: argparse.Namespace) -> list[checks.Check]:
    region = None if config is None else _region_bytes(config)
    largest = None if region is None else max(region, *_file_bytes(config), 0)
    wanted = [Wanted(path, path) for path in options.tier_path]
    found = [*checks.shared_memory(region)]
    if region is not None:
        found += checks.cgroup(region)
    found += checks.limits(largest)
    found += checks.kernel()
    found += check_paths([*([] if config is None else wanted_of(config)), *wanted])
    found += [] if config is None else check_keys(config)
    found.append(checks.runtime_directory())
    found.append(checks.leftovers(options.session))
    found += unnamed_memory(options.session)
    found += checks.sessions(options.session)
    found += processes(options.session)
    return found


def _region_bytes(config: Config) -> int | None:
    """Bytes that the region still has to get; None if the file says nothing of it."""
    if (config.num_slots, config.block_bytes) == (1, 1):
        return None  # a daemon's file: the engine brings the primary
    name = region_name(config.session.name)
    if is_held(name):
        return 0  # it is there, and in use
    geometry = (config.num_slots, config.block_bytes, config.namespace_digest)
    present = 0
    with contextlib.suppress(FileNotFoundError):  # a start adopts or replaces it
        present = os.stat(f"{SHM_DIR}{name}", follow_symlinks=False).st_blocks * 512
    return max(0, Geometry(*geometry).file_bytes - present)


def _file_bytes(config: Config | None) -> list[int]:
    """Sizes of the slabs that a configuration names."""
    return [
        parse_size(tier.max_bytes, key="max_bytes")
        for tier in (() if config is None else config.tier)
        if tier.type == "slab" and tier.max_bytes is not None
    ]
