"""From the configuration to what the core is told of it.

Covers: traits of tiers, switches of the manager.
Does not cover: checking (``wire.config``).
Who calls it: ``Engine``, once, at its start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypedDict

from shmoffload.core.offers import OfferRule
from shmoffload.core.tier_speed import SpeedRule
from shmoffload.core.types import TierTraits, parse_admit
from shmoffload.wire.layout import blocks_a_piece

if TYPE_CHECKING:
    from shmoffload.wire.config import Config, TierConfig

_PLACES: Final = {
    "slab": ("STORAGE", "LOCAL"),
    "fs": ("STORAGE", "LOCAL"),
    "memory": ("CPU", "LOCAL"),
}
"""Type -> medium, locality. Of a plug-in nothing is known: every filter means it."""


class CoreSettings(TypedDict):
    """Keywords of ``TieringOffloadingManager``."""

    traits: list[TierTraits]
    max_cascade_share: float
    accept_prefix: bool
    offer_rule: OfferRule
    speed: SpeedRule


def core_settings(config: Config) -> CoreSettings:
    """Return what a configuration says of requests, tiers and room."""
    return {
        "traits": [_traits(tier) for tier in config.tier],
        "max_cascade_share": config.limits.max_cascade_share,
        "accept_prefix": config.primary.accept_prefix,
        "offer_rule": OfferRule(
            config.primary.store_threshold, config.primary.max_tracker_size
        ),
        "speed": SpeedRule(
            deadline_min_s=config.limits.job_deadline_min_s,
            piece_blocks=blocks_a_piece(config.stride),
            prefill_s_per_block=config.limits.prefill_s_per_block,
        ),
    }


def _traits(tier: TierConfig) -> TierTraits:
    medium, locality = _PLACES.get(tier.type, (None, None))
    return TierTraits(
        medium=tier.medium or medium,
        locality=tier.locality or locality,
        level=tier.policy,
        withheld=parse_admit(tier.admit),
    )
