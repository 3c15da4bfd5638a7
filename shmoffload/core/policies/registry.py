"""The policies that come with us, by name.

Covers: names and factories of built-in policies.
Does not cover: plug-ins (``engine.policies``; the core reads no package metadata).
Who calls it: engine, replay, tests; any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shmoffload.core.policies.arc import ArcPolicy
from shmoffload.core.policies.auto import AutoPolicy
from shmoffload.core.policies.lru import LruPolicy
from shmoffload.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmoffload.core.policies import CachePolicy


def _lru(_num_slots: int) -> LruPolicy:
    return LruPolicy()


BUILT_IN: Final[dict[str, Callable[[int], CachePolicy]]] = {
    "auto": AutoPolicy,
    "lru": _lru,
    "arc": ArcPolicy,
    "arc2": ArcPolicy.published,
}


def make_policy(name: str, num_slots: int) -> CachePolicy:
    """Return a new built-in policy for a primary of ``num_slots`` slots.

    Raises:
        ConfigError: there is none of that name.
    """
    factory = BUILT_IN.get(name)
    if factory is None:
        raise ConfigError(
            f'there is no eviction policy "{name}": known are {", ".join(BUILT_IN)}'
        )
    return factory(num_slots)
