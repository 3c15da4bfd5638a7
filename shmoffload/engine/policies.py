"""The eviction policy that a configuration names.

Covers: built-in policies and those of other packages.
Does not cover: whether the name exists (``wire.config`` has checked it).
Who calls it: engine and tools, at start; any thread; may read package metadata.

A plug-in registers ``[project.entry-points."shmoffload.policies"]`` with a callable
that takes the number of slots and returns a ``shmoffload.core.policies.CachePolicy``.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from shmoffload.core.policies import CachePolicy
from shmoffload.core.policies.registry import BUILT_IN, make_policy
from shmoffload.errors import ConfigError
from shmoffload.wire.config import POLICY_GROUP

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def load_policy(name: str, num_slots: int) -> CachePolicy:
    """Return a new policy for a primary of ``num_slots`` slots.

    Raises:
        ConfigError: no such policy, or the plug-in cannot be used.
    """
    if name not in BUILT_IN:
        for point in entry_points(group=POLICY_GROUP):
            if point.name == name:
                return _plugged_in(point, num_slots)
    return make_policy(name, num_slots)


def _plugged_in(point: EntryPoint, num_slots: int) -> CachePolicy:
    try:
        policy = point.load()(num_slots)
    except Exception as error:
        raise ConfigError(
            f'primary.policy = "{point.name}": {point.value} cannot be used '
            f"({error!r}): repair or remove that package, or take a built-in policy"
        ) from error
    if not isinstance(policy, CachePolicy):
        raise ConfigError(
            f'primary.policy = "{point.name}": {point.value} does not return a '
            f"shmoffload.core.policies.CachePolicy"
        )
    return policy
