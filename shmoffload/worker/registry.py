"""Which tier types exist, without importing any of them.

Covers: names of built-in and plugged-in tiers, the early check of a
configuration, the late import of one class.
Does not cover: whether a path works; the worker says so in its ``Hello``.
Who calls it: engine, supervisor and command line (checks), workers (import); any
thread; may read package metadata from disk.

A plug-in registers ``[project.entry-points."shmoffload.tiers"]``. Built-ins are in
a table as well, because a worker that need not read package metadata starts 30 ms
earlier, and a checkout works without being installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from shmoffload.errors import ConfigError, TierConfigError
from shmoffload.wire.config import closest

if TYPE_CHECKING:
    from shmoffload.wire.config import Config
    from shmoffload.worker.tier import Tier

ENTRY_POINT_GROUP: Final = "shmoffload.tiers"
_BUILT_IN: Final = {
    "slab": "shmoffload.worker.tiers.slab:SlabTier",
    "fs": "shmoffload.worker.tiers.fs:FsTier",
    "memory": "shmoffload.worker.tiers.memory:MemoryTier",
    # Of the shipped fault kit: a tier that breaks on purpose. In the table, so that a
    # checkout finds it, and in no list that a person is shown.
    "faulty": "shmoffload.testing.faults.tier:FaultyTier",
}
_FOR_TESTS: Final = frozenset({"faulty"})
_NEEDS_PATH: Final = frozenset({"slab", "fs", "faulty"})


def tier_types() -> tuple[str, ...]:
    """Return the names of all tier types that a person may want, sorted."""
    return tuple(sorted({*_BUILT_IN, *_plugged_in()} - _FOR_TESTS))


def check_tier_types(config: Config) -> None:
    """Refuse unknown types and missing required keys.

    Raises:
        ConfigError: with the closest type that exists, or the key to add.
    """
    for tier in config.tier:
        if tier.type not in _BUILT_IN and tier.type not in (known := tier_types()):
            raise ConfigError(
                f'tier {tier.name}: there is no type "{tier.type}": '
                f"{closest(tier.type, known, 'did you mean {}?', 'known are {}')}"
            )
        if needs_path(tier.type) and not tier.path:
            raise ConfigError(
                f"tier {tier.name}: a {tier.type} tier needs a directory: "
                f'add path = "/some/dir"'
            )


def needs_path(type_name: str) -> bool:
    """Say whether a tier of this type keeps its blocks in a directory."""
    return type_name in _NEEDS_PATH


def load_tier(type_name: str) -> type[Tier]:
    """Import the class of a tier type; in its worker process only.

    Raises:
        TierConfigError: no such type, or its module cannot be imported.
    """
    target = _BUILT_IN.get(type_name) or _plugged_in().get(type_name)
    if target is None:
        raise TierConfigError(
            f'there is no tier type "{type_name}": known are {", ".join(tier_types())}'
        )
    module, _, name = target.partition(":")
    try:
        tier_class: type[Tier] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise TierConfigError(
            f'tier type "{type_name}" cannot be imported ({error}): install what it '
            f"needs into the environment of this worker"
        ) from error
    return tier_class


def _plugged_in() -> dict[str, str]:
    # Here and not above: 20-30 ms that a built-in tier's worker does not pay.
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
