"""What the control plane counts.

Covers: plain numbers; per tier they are lists, indexed as the tiers are.
Does not cover: bytes and times of workers (the session page).
Who calls it: ``core`` adds, ``engine`` and reports read; scheduler thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

MAX_TENANTS: Final = 64
OTHER_TENANTS: Final = "other"
"""Who is counted together once there are too many tenants."""


@dataclass(slots=True)
class TenantCounters:
    """What one tenant's requests did; in blocks where no other unit is named."""

    requests: int = 0
    stores_prepared: int = 0
    loads: int = 0


@dataclass(slots=True)
class Counters:
    """Totals since the manager was made; in blocks where no other unit is named."""

    num_tiers: int

    hits_primary: int = 0
    """Lookups answered HIT."""
    hits_pending: int = 0
    retries: int = 0
    misses: int = 0
    loads_primary: int = 0
    """Blocks handed to the GPU that had been in the primary."""
    allocation_failures: int = 0
    """Lookups answered MISS because a promotion found no room."""
    promotions_started: int = 0
    promotions_landed: int = 0
    promotions_failed: int = 0
    promotions_dropped: int = 0
    """Queued and never sent: request finished, an older one took over, reset."""
    evictions: int = 0
    stores_prepared: int = 0
    stores_refused: int = 0
    """Calls of ``prepare_store`` answered None for want of room."""
    blocks_not_admitted: int = 0
    """Absent blocks of granted offers that the policy did not want."""
    stores_skipped: int = 0
    """Absent blocks that were not offered ``store_threshold`` times yet."""
    stores_shortened: int = 0
    """Calls of ``prepare_store`` that accepted only a prefix of the offer."""
    stores_failed: int = 0
    parked_dropped: int = 0
    """Parked keys whose write failed or was reset."""
    late_calls: int = 0
    """Calls about something unknown, finished, answered or reset."""
    late_offers: int = 0
    late_replies: int = 0
    foreign_keys: int = 0
    """Replies that named keys which their job does not have."""
    overdue_jobs: int = 0
    resets: int = 0
    tier_errors: int = 0
    """Calls of a tier that raised."""

    hits_tier: list[int] = field(default_factory=list)
    """Promotions started from the tier."""
    loads_tier: list[int] = field(default_factory=list)
    """Blocks handed to the GPU for the first time since the tier gave them."""
    cascade_jobs: list[int] = field(default_factory=list)
    cascade_blocks: list[int] = field(default_factory=list)
    cascade_jobs_failed: list[int] = field(default_factory=list)
    cascade_blocks_failed: list[int] = field(default_factory=list)
    cascade_jobs_dropped: list[int] = field(default_factory=list)
    cascade_blocks_dropped: list[int] = field(default_factory=list)
    cascade_blocks_withheld: list[int] = field(default_factory=list)
    """Not sent because the tier's admission or the request said so."""
    incomplete_keys: list[int] = field(default_factory=list)
    """Offered to a tier that wants whole requests, and never sent to it."""
    promotion_jobs: list[int] = field(default_factory=list)
    promotion_jobs_failed: list[int] = field(default_factory=list)
    promotions_declined: list[int] = field(default_factory=list)
    """Not loaded, since computing was quicker: what a request would have had of the
    tier, once per request."""

    tenants: dict[str, TenantCounters] = field(default_factory=dict)
    """By name, ``MAX_TENANTS`` and ``OTHER_TENANTS`` at most."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if isinstance(getattr(self, name), list):
                setattr(self, name, [0] * self.num_tiers)

    def tenant(self, name: str) -> TenantCounters:
        """Return a tenant's counters, or those of ``OTHER_TENANTS``."""
        tenants = self.tenants
        if name not in tenants and len(tenants) >= MAX_TENANTS:
            name = OTHER_TENANTS
        return tenants.setdefault(name, TenantCounters())
