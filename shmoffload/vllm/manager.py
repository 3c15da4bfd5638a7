"""``ShmOffloadingManager``: the engine, as vLLM's scheduler wants to call it.

Covers: vLLM's types to ours and back, where a step begins, the reset fence's
tickets, keeping every exception of ours inside.
Does not cover: deciding (``core``), figures and events (``report``).
Who calls it: vLLM's ``OffloadingConnectorScheduler``, in the scheduler process, one
thread. Only ``shutdown`` waits, at most ``limits.close_timeout_s``.

A step, as far as we rely on it, in vLLM 0.32 and 0.33::

    lookup*  prepare_load*  get_load_source*        (reads first)
    on_schedule_end, prepare_store*, on_request_finished*   (0.32: in this order,
                                                    0.33: on_schedule_end is last)
    complete_*  get_stats  take_events  has_pending_work    (after the forward)

So a step begins with the first read after ``on_schedule_end``. What the later calls
put out leaves at once (``Engine.flush``): if the server goes idle now, no other
call comes that could send it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from typing import TYPE_CHECKING, Final

from vllm.v1.kv_offload import base as vllm_base

from shmoffload.core.types import LookupResult, OffloadPolicy, ReqContext
from shmoffload.core.types import ScheduleEndContext as OurScheduleEndContext
from shmoffload.vllm import release
from shmoffload.vllm.copies.fence import CopyKind, ResetFence
from shmoffload.vllm.copies.slots_spec import SlotsLoadStoreSpec
from shmoffload.vllm.load_sources import LoadSources
from shmoffload.vllm.report import events, metrics
from shmoffload.vllm.stale_offers import StaleOffers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )

    from shmoffload.core.events import OffloadingEvent
    from shmoffload.core.types import OffloadKey, SlotArray
    from shmoffload.engine.handle import Engine
    from shmoffload.vllm.setup.settings import Settings

log = logging.getLogger(__name__)

_HIT: Final = LookupResult.HIT
_HIT_PENDING: Final = LookupResult.HIT_PENDING
_RETRY: Final = LookupResult.RETRY
_VLLM_HIT: Final = vllm_base.LookupResult.HIT
_VLLM_MISS: Final = vllm_base.LookupResult.MISS
_VLLM_HIT_PENDING: Final = vllm_base.LookupResult.HIT_PENDING
_VLLM_RETRY: Final = vllm_base.LookupResult.RETRY

_VLLM_POLICY: Final = {
    ours: release.offload_policy(is_request_level=ours is OffloadPolicy.REQUEST_LEVEL)
    for ours in OffloadPolicy
}

FIRST_STEP_TIMEOUT_S: Final = 10.0
"""How long a fresh server is asked for its first, empty step."""


class ShmOffloadingManager(vllm_base.OffloadingManager):
    """vLLM's ``OffloadingManager`` (0.26 to 0.33) over an ``Engine``.

    No exception leaves it, for one would end the server: what fails is a miss, a
    count in ``vllm:shmoffload_adapter_errors`` and, the first time, a traceback in
    the log. The one exception is ``prepare_load``: see there.

    Args:
        engine: up and running; closed by ``shutdown``.
        settings: what the spec has read.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._lookup = engine.lookup
        self._fence = ResetFence(
            engine.region,
            num_ranks=settings.num_ranks,
            num_store_ranks=1 if settings.is_replicated else settings.num_ranks,
        )
        self._tiers = events.describe_tiers(settings)
        self._metrics = metrics.Metrics(engine, settings)
        self._config_info = metrics.config_info(settings)
        self._gone: list[OffloadingEvent] = []
        self._stale = StaleOffers(may_have_window=settings.may_have_window)
        self._is_shut = False
        self._is_step_over = True
        self._has_events = settings.has_events
        self._has_stepped = False
        self._asked_since_s: float | None = None
        self._sources = LoadSources(engine.manager.table.blocks)

    # Reads ------------------------------------------------------------------------

    def lookup(
        self, key: OffloadKey, req_context: vllm_base.ReqContext
    ) -> vllm_base.LookupResult:
        """Say where a block is; the hot path: no more than one call into the core."""
        try:
            if self._is_step_over:
                self._begin_step()
            answer = self._lookup(key, req_context)
            # Not by a table: an enum's hash is a call, a comparison is none.
            if answer is _HIT:
                return _VLLM_HIT
            if answer is _HIT_PENDING:
                return _VLLM_HIT_PENDING
            if answer is _RETRY:
                return _VLLM_RETRY
            self._metrics.note_miss(key, req_context.req_id)
        except Exception:  # noqa: BLE001  (reported by _failed)
            self._failed("lookup")
        return _VLLM_MISS

    def prepare_load(
        self, keys: Collection[OffloadKey], req_context: vllm_base.ReqContext
    ) -> SlotsLoadStoreSpec:
        """Pin blocks that were answered HIT in this step.

        Raises:
            KeyError: there are no right bytes to read: vLLM asks for a block that
                was never answered HIT. It would load whatever we name, so the
                server has to stop. If the core failed after it said HIT, nothing
                moves any more, and the blocks are still where they were.
        """
        wanted = list(keys)
        try:
            if self._is_step_over:
                self._begin_step()
            self._sources.note(wanted, req_context.req_id)
            self._metrics.forget_misses(req_context.req_id)
        except Exception:  # noqa: BLE001  (reported by _failed)
            self._failed("prepare_load")
        try:
            slots = self._engine.prepare_load(wanted, req_context)
        except KeyError:
            slots = self._unpinned_slots(wanted)
        return SlotsLoadStoreSpec(slots, self._fence.next_ticket(CopyKind.LOAD))

    def get_load_source(
        self, key: OffloadKey, req_context: vllm_base.ReqContext
    ) -> vllm_base.CacheHitSource:
        """Say what a block of the request's last load cost: memory or a tier."""
        try:
            tier = self._sources.tier_of(key, req_context.req_id)
            if tier is None:
                tier = self._engine.load_source(key)
            return self._tiers[tier].source if tier >= 0 else events.FROM_PRIMARY
        except Exception:  # noqa: BLE001  (reported by _failed)
            self._failed("get_load_source")
        return events.FROM_UNKNOWN

    def touch(
        self, keys: Collection[OffloadKey], req_context: vllm_base.ReqContext
    ) -> None:
        """Mark blocks as used without reading them."""
        try:
            self._engine.touch(keys, _our_context(req_context))
        except Exception:  # noqa: BLE001  (reported by _failed)
            self._failed("touch")

    def complete_load(
        self, keys: Collection[OffloadKey], req_context: vllm_base.ReqContext
    ) -> None:
        """Take back the pins of one ``prepare_load``."""
        try:
            self._pass_fence()
            self._engine.complete_load(keys, req_context)
        except Exception:  # noqa: BLE001  (reported by _failed)
            self._failed("complete_load")

    # Stores -----------------------------------------------------------------------

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: vllm_base.ReqContext
    ) -> vllm_base.PrepareStoreOutput | None:
        """Take slots for the absent blocks of an offer; None: no room now."""
        try:
            self._metrics.num_offers += 1
            is_stale = self._stale.are_of(req_context.req_id)
            output = self._engine.prepare_store(() if is_stale else keys, req_context)
            if output is None:
                self._metrics.note_allocation(self._num_absent(keys))
                return None
            ticket = 0
            if output.keys_to_store:
                # vLLM makes a transfer of every output with keys, of no other.
                ticket = self._fence.next_ticket(CopyKind.STORE)
                self._metrics.note_allocation(len(output.keys_to_store))
            return vllm_base.PrepareStoreOutput(
                keys_to_store=list(output.keys_to_store),
                store_spec=SlotsLoadStoreSpec(output.slots, ticket),
                evicted_keys=list(output.evicted_keys),
            )
        except Exception:  # noqa: BLE001  (reported by _failed)
            self._failed("prepare_store")
        return None

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: vllm_base.ReqContext,
        success: bool = True,
    ) -> None:
        """End one ``prepare_store``; the blocks cascade, at once."""
        try:
            self._pass_fence()
            self._engine.complete_store(keys, req_context, success)
            self._engine.flush()
        except Exception:  # noqa: BLE001  (reported by _failed)
            self._failed("complete_store")

    # Requests ---------------------------------------------------------------------

    def on_new_request(
        self, req_context: vllm_base.ReqContext
    ) -> vllm_base.RequestOffloadingContext:
        """Announce a request, with its own words and its blocks' positions."""
        policy = OffloadPolicy.BLOCK_LEVEL
        try:
            policy = self._engine.on_new_request(_our_context(req_context)).policy
        except Exception:  # noqa: BLE001  (reported by _failed)
            self._failed("on_new_request")
        return vllm_base.RequestOffloadingContext(policy=_VLLM_POLICY[policy])

    def on_request_finished(self, req_context: vllm_base.ReqContext) -> None:
        """Take a request's last word; its open stores may still complete."""
        try:
            self._stale.forget(req_context.req_id)
            self._sources.forget(req_context.req_id)
            self._metrics.forget_misses(req_context.req_id)
            self._engine.on_request_finished(req_context)
            self._engine.flush()
        except Exception:  # noqa: BLE001  (reported by _failed)
            self._failed("on_request_finished")

    # Steps ------------------------------------------------------------------------

    def on_schedule_end(self, context: vllm_base.ScheduleEndContext) -> None:
        """End the reads of a step: promotions leave, HITs hold no longer."""
        self._is_step_over = self._has_stepped = True
        try:
            self._stale.began(context.new_req_ids)
            self._stale.restart(context.preempted_req_ids)
            self._engine.on_schedule_end(
                OurScheduleEndContext(
                    tuple(context.new_req_ids), tuple(context.preempted_req_ids)
                )
            )
            self._pass_fence()
        except Exception:  # noqa: BLE001  (reported by _failed)
            self._failed("on_schedule_end")

    def has_pending_work(self) -> bool:
        """Say whether an empty step brings something to an end.

        vLLM asks before it goes idle, so what 0.32 has us put out after
        ``on_schedule_end`` leaves here at the latest. A fresh server is asked for
        one empty step, which brings the zeros of our metrics to ``/metrics``.
        """
        try:
            self._engine.flush()
            return self._engine.has_pending_work() or self._wants_first_step()
        except Exception:  # noqa: BLE001  (reported by _failed)
            self._failed("has_pending_work")
        return False

    def take_events(self) -> Iterable[vllm_base.OffloadingEvent]:
        """Return residency events since the last call, each once."""
        if not self._has_events:
            return ()
        try:
            gone, self._gone = self._gone, []
            return events.to_vllm([*gone, *self._engine.take_events()], self._tiers)
        except Exception:  # noqa: BLE001  (reported by _failed)
            self._failed("take_events")
        return ()

    # Reset ------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Forget the primary, at once.

        A slot that a GPU worker still copies stays unused until every worker has
        passed the transfers prepared so far: 0.32 tells nobody when that is, so our
        workers do, in shared memory.
        """
        try:
            self._sources.clear()
            self._stale.reset()
            if self._has_events:
                self._gone += events.all_gone(self._engine.manager.table)
            # vLLM forgets its transfers as well: none of them is completed to us.
            self._engine.reset_cache(forgets_copies=True)
            self._fence.hold()
            self._metrics.is_fence_held = True
            self._engine.flush()
        except Exception:  # noqa: BLE001  (reported by _failed)
            self._failed("reset_cache")

    def on_reset_flushed(self) -> None:
        """Hear from vLLM (0.33) that no copy of before the reset runs any more."""
        try:
            self._engine.on_reset_flushed()
        except Exception:  # noqa: BLE001  (reported by _failed)
            self._failed("on_reset_flushed")

    # Figures ----------------------------------------------------------------------

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return what has changed since the last call; the first time everything."""
        try:
            return None if self._is_shut else self._metrics.take()
        except Exception:  # noqa: BLE001  (reported by _failed)
            self._failed("get_stats")
        return None

    def config_info(self) -> Sequence[Mapping[str, str | int | float | bool]]:
        """Return the labels of ``vllm:kv_offload_config_info`` (0.33)."""
        return [self._config_info]

    def shutdown(self) -> None:
        """Finish open cascades, stop workers, remove names; bounded."""
        self._is_shut = True
        try:
            self._engine.close()
        except Exception:  # noqa: BLE001  (reported by _failed)
            self._failed("shutdown")

    # Inside -----------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._is_step_over = False
        self._engine.step_begin()
        self._pass_fence()

    def _wants_first_step(self) -> bool:
        if self._has_stepped or self._is_shut:
            return False
        now_s = time.monotonic()
        if self._asked_since_s is None:
            self._asked_since_s = now_s
        return now_s - self._asked_since_s < FIRST_STEP_TIMEOUT_S

    def _pass_fence(self) -> None:
        if self._fence.is_passed():
            self._metrics.is_fence_held = False
            self._engine.on_reset_flushed()

    def _num_absent(self, keys: Collection[OffloadKey]) -> int:
        blocks = self._engine.manager.table.blocks
        return sum(key not in blocks for key in keys)

    def _unpinned_slots(self, keys: Sequence[OffloadKey]) -> SlotArray:
        """Find blocks that were HIT before the core failed; nothing moves now."""
        if self._engine.is_broken:
            with contextlib.suppress(KeyError):
                return self._engine.slots_of(keys)
        log.critical(
            "vLLM wants to load a block that is not readable: it would compute with "
            "wrong bytes, so the server has to stop. Report this, please"
        )
        raise KeyError("a block to load was not answered HIT in this step")

    def _failed(self, method: str) -> None:
        """Count an exception of ours; called while it is handled."""
        if self._metrics.note_error(method) == 1:
            log.error(
                "shmoffload failed in %s: counted, and answered as a miss. Later "
                "failures there are only counted",
                method,
                exc_info=sys.exception(),
            )


def _our_context(req_context: vllm_base.ReqContext) -> ReqContext:
    """Return our view of vLLM's context; block positions are shared, not copied.

    vLLM adds positions as the request grows (since 0.31; none before).
    """
    positions = getattr(req_context, "_offload_key_positions", None)
    return ReqContext(
        req_context.req_id,
        kv_transfer_params=req_context.kv_transfer_params,
        key_positions={} if positions is None else positions,
    )
