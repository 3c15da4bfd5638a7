"""From what a person types to a checked configuration, before anything starts.

Covers: amounts (percent, blocks, bytes), tier specifications, directories.
Does not cover: the options themselves (``cli.replay``), whether shared memory
suffices (``wire.region`` says when the engine starts).
Who calls it: the command line. Every fault is a ``ConfigError`` of one sentence.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shmoffload.core.types import parse_admit
from shmoffload.errors import ConfigError
from shmoffload.wire.config import closest, from_dict
from shmoffload.wire.layout import stride_of
from shmoffload.wire.sizes import parse_size
from shmoffload.worker.registry import check_tier_types, needs_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmoffload.wire.config import Config

NAMESPACE: Final = "shmoffload replay 1"
"""Never varies: any replay may verify what an earlier one has stored."""
_PERCENT: Final = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_TIER_OPTIONS: Final = ("cap", "name", "policy", "admit")
_POLICIES: Final = ("block_level", "request_level")


@dataclass(frozen=True, slots=True)
class BlockScale:
    """What amounts are measured by.

    Attributes:
        num_distinct: distinct blocks of the workload; 100 %.
        block_bytes: payload of a block.
    """

    num_distinct: int
    block_bytes: int

    def blocks(self, text: str, *, option: str) -> int:
        """Read ``5%`` (rounded down), ``944`` (blocks) or ``64MiB``.

        Raises:
            ConfigError: no amount, or less than a block.
        """
        amount = text.strip()
        if match := _PERCENT.fullmatch(amount):
            count = int(Fraction(match[1]) * self.num_distinct / 100)
        elif amount.isdecimal():
            count = int(amount)
        else:
            try:
                count = parse_size(amount) // stride_of(self.block_bytes)
            except ConfigError as error:
                raise ConfigError(
                    f'{option} "{text}" is no amount: write a percentage of the '
                    f"{self.num_distinct} distinct blocks like 5%, a number of blocks "
                    f"like 944, or bytes like 64MiB"
                ) from error
        if count < 1:
            raise ConfigError(
                f'{option} "{text}" is 0 blocks: give at least 1 block, which takes '
                f"{stride_of(self.block_bytes)} bytes, or a larger percentage of "
                f"{self.num_distinct}"
            )
        return count


def build_config(
    *,
    session: str,
    primary: str,
    tiers: Sequence[str],
    scale: BlockScale,
    policy: str = "auto",
    prefill_s_per_block: float = 0.0,
) -> Config:
    """Check everything that can be checked without starting anything.

    Args:
        session: name of the session.
        primary: amount of the primary.
        tiers: specifications ``TYPE[:DIR][,cap=..][,name=..][,policy=..][,admit=..]``.
        scale: of the workload.
        policy: eviction order of the primary.
        prefill_s_per_block: of the GPU; 0 = whatever a tier has is loaded.

    Raises:
        ConfigError: something is wrong; nothing was started or made.
    """
    wanted = [tier_options(spec, scale) for spec in tiers]
    for spec, tier in zip(tiers, wanted, strict=True):
        if "path" not in tier and needs_path(tier["type"]):
            raise ConfigError(
                f'--tier "{spec}" has no directory: write {tier["type"]}:/some/dir'
            )
    config = from_dict(
        {
            "session": {"name": session, "namespace": NAMESPACE},
            "primary": {
                "block_bytes": scale.block_bytes,
                "slots": scale.blocks(primary, option="--primary"),
                "policy": policy,
            },
            "tier": wanted,
            "limits": {"prefill_s_per_block": prefill_s_per_block},
        }
    )
    check_tier_types(config)
    for checked in config.tier:
        if checked.path is not None:
            _check_directory(Path(checked.path), checked.name)
    return config


def tier_options(spec: str, scale: BlockScale) -> dict[str, Any]:
    """Read one ``TYPE[:DIR][,cap=..][,name=..][,policy=..][,admit=..]``.

    Raises:
        ConfigError: an unknown option, or a wrong value.
    """
    what, *options = spec.split(",")
    kind, _, path = what.partition(":")
    tier: dict[str, Any] = {"type": kind.strip()}
    if not tier["type"]:
        raise ConfigError(f'--tier "{spec}" has no type: write one like slab:/some/dir')
    if path:
        tier["path"] = str(Path(path).expanduser().absolute())
    given: set[str] = set()
    for option in options:
        name, _, value = option.partition("=")
        if name in _TIER_OPTIONS and not value:
            raise ConfigError(f'--tier "{spec}": {name} has no value: write {name}=...')
        if name in given:
            raise ConfigError(f'--tier "{spec}": {name} is given twice: keep one')
        given.add(name)
        if name not in _TIER_OPTIONS:
            near = closest(name, _TIER_OPTIONS, "did you mean {}?", "known are {}")
            raise ConfigError(
                f'--tier "{spec}": unknown option "{option}": {near} '
                f"(TYPE:DIR,cap=100%,name=NAME,policy=block_level,admit=all)"
            )
        if name == "cap":
            num_blocks = scale.blocks(value, option=f"--tier {kind}: cap")
            tier["max_bytes"] = num_blocks * stride_of(scale.block_bytes)
        elif name == "policy" and value not in _POLICIES:
            raise ConfigError(
                f'--tier "{spec}": policy "{value}" is none: write block_level or '
                f"request_level"
            )
        else:
            tier[name] = value
    try:
        parse_admit(tier.get("admit", "all"))
    except ValueError as error:
        raise ConfigError(f'--tier "{spec}": admit = {error}') from error
    return tier


def _check_directory(path: Path, tier: str) -> None:
    """Refuse a directory that can neither be used nor made."""
    there = path
    # os.path and not Path: what we may not look at is not there, and no exception.
    while not os.path.exists(there) and there != there.parent:
        there = there.parent
    if not os.path.isdir(there):
        raise ConfigError(
            f"tier {tier}: {there} is no directory: give one after --tier TYPE:"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"tier {tier}: no permission to write in {there}: give another directory, "
            f"or chmod u+wx that one"
        )
