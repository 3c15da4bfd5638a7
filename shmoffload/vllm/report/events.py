"""Residency events and load sources, in vLLM's words.

Covers: what vLLM calls our tiers, the core's events as vLLM's ``OffloadingEvent``.
Does not cover: noticing changes (``core.events``), block payloads and publishing
(vLLM's ``OffloadingEventsTracker``).
Who calls it: ``manager``, scheduler thread. Pure.

vLLM forgets a block's payload once it is removed from everywhere it was stored. It
counts a tier only if the tier says that removals follow (``removal_expected``):
ours do, so a block in a tier keeps its payload when the primary drops it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from vllm.v1.kv_offload import base as vllm_base

from shmoffload.core.events import OffloadingEvent
from shmoffload.core.slots import READY
from shmoffload.engine.core_settings import core_settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shmoffload.core.slots import SlotTable
    from shmoffload.vllm.setup.settings import Settings


def _source(name: str) -> vllm_base.CacheHitSource:
    """Return vLLM's word for where a block came from; older ones take the text."""
    enum = getattr(vllm_base, "CacheHitSource", None)
    return name if enum is None else enum(name)


FROM_PRIMARY: Final = _source("host")
FROM_DISK: Final = _source("disk")
FROM_UNKNOWN: Final = _source("external_unspecified")

_SOURCES: Final = {"CPU": FROM_PRIMARY, "STORAGE": FROM_DISK}

# What an event of this vLLM can say: 0.32 has no ``metadata_only``.
_FIELDS: Final = frozenset(
    field.name for field in dataclasses.fields(vllm_base.OffloadingEvent)
)
_HAS_METADATA_ONLY: Final = "metadata_only" in _FIELDS


class TierWords(NamedTuple):
    """What vLLM calls a tier.

    Attributes:
        medium: a ``Medium``; of an unknown kind STORAGE, for there must be one.
        locality: a ``Locality``, or None.
        name: ours, its ``ownership`` in events.
        source: a ``CacheHitSource``; of an unknown kind "unspecified".
        has_events: its blocks are announced.
    """

    medium: Any
    locality: Any
    name: str
    source: Any
    has_events: bool


def describe_tiers(settings: Settings) -> list[TierWords]:
    """Return vLLM's words for the tiers of a configuration, in its order."""
    config = settings.config
    traits = core_settings(config)["traits"]
    return [
        TierWords(
            medium=vllm_base.Medium(trait.medium or "STORAGE"),
            locality=vllm_base.Locality(trait.locality) if trait.locality else None,
            name=tier.name,
            source=_SOURCES.get(trait.medium or "", FROM_UNKNOWN),
            has_events=has_events,
        )
        for tier, trait, has_events in zip(
            config.tier, traits, settings.tier_events, strict=True
        )
    ]


def all_gone(table: SlotTable) -> list[OffloadingEvent]:
    """Return what a reset of the primary drops, to be announced as removed.

    vLLM announces a full clear only if its own reset succeeds; ours is done anyway.
    """
    keys = [block.key for block in table.blocks.values() if block.state == READY]
    return [OffloadingEvent(keys, is_removed=True)] if keys else []


def to_vllm(found: Iterable[OffloadingEvent], tiers: Sequence[TierWords]) -> list[Any]:
    """Return the core's events as vLLM's, in their order."""
    translated = []
    for event in found:
        more: dict[str, Any] = {}
        if event.metadata_only:
            if not _HAS_METADATA_ONLY:
                continue  # never announced, so for this vLLM nothing has gone
            more["metadata_only"] = True
        if event.tier is None:
            medium = vllm_base.Medium.CPU
        else:
            words = tiers[event.tier]
            if not words.has_events:
                continue
            medium = words.medium
            more["locality"] = words.locality
            more["ownership"] = words.name
        if "removal_expected" in _FIELDS:
            more["removal_expected"] = not event.is_removed
        translated.append(
            vllm_base.OffloadingEvent(
                keys=list(event.keys), medium=medium, removed=event.is_removed, **more
            )
        )
    return translated
