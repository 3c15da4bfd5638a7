"""``Engine``: what an inference server embeds.

Covers: start or attach, the manager's calls, steps, close; joining the pure core
with memory and queues.
Does not cover: deciding (``core.manager``), moving bytes between GPU and slots
(the caller does, through ``slot_view``), tier I/O (workers do).
Who calls it: the scheduler process, one thread. Start and close wait, bounded by
``[limits]``; every other call returns without waiting whatever workers do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING, Self

from shmoffload.core.adoption import adopt
from shmoffload.core.interfaces import OffloadingManager
from shmoffload.core.mailbox import MailboxTier
from shmoffload.core.manager import TieringOffloadingManager
from shmoffload.core.slots import FROM_STORE
from shmoffload.core.types import (
    LookupResult,
    NotReadableError,
    RequestOffloadingContext,
)
from shmoffload.engine.core_settings import core_settings
from shmoffload.engine.gauges import Gauges
from shmoffload.engine.guard import Guard
from shmoffload.engine.open_files import check_open_files
from shmoffload.engine.policies import load_policy
from shmoffload.engine.supervisor_link import SupervisorLink
from shmoffload.engine.tier_link import TierLink
from shmoffload.engine.trace import RequestTrace
from shmoffload.engine.traffic import Traffic
from shmoffload.engine.waiting import WAIT_SLICE_S, await_tiers, wait_for_words
from shmoffload.wire.adopt import find_residents
from shmoffload.wire.messages import MAX_EPOCH
from shmoffload.wire.names import Keep, sweep
from shmoffload.wire.region import PrimaryRegion
from shmoffload.wire.session import SessionPage, Word
from shmoffload.worker.registry import check_tier_types

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from types import TracebackType

    from shmoffload.core.events import OffloadingEvent
    from shmoffload.core.policies import CachePolicy
    from shmoffload.core.request_policy import RequestAnswer
    from shmoffload.core.types import (
        OffloadKey,
        PrepareStoreOutput,
        ReqContext,
        ScheduleEndContext,
        SlotArray,
    )
    from shmoffload.wire.config import Config

log = logging.getLogger(__name__)


class Engine(Guard, OffloadingManager):
    """A live offloading engine: the manager's calls, and the step around them.

    Use it as a context manager. In each step of the scheduler call
    ``step_begin``, then the manager's calls, then ``on_schedule_end``; copy
    between GPU and ``slot_view(slot)`` where ``prepare_load`` and
    ``prepare_store`` gave slots.

    Nothing of ours raises into a step. The one exception is a caller's bug:
    ``prepare_load`` of a key that was not answered HIT in this step is a
    NotReadableError.
    Should the core itself fail, the engine says so once and from then on answers
    MISS to everything (``is_broken``).

    Attributes:
        config: as given.
        page: the session page; read it, do not write it.
        manager: the core, for figures; its calls go through the engine.
        is_broken: the core has failed; everything is a miss.
    """

    def __init__(self, config: Config, *, events: bool = False) -> None:
        """Start everything, and wait until every tier is up.

        Args:
            config: of the session.
            events: keep what ``take_events`` returns; somebody has to take it.

        Raises:
            BadInputError: configuration, memory or a tier's storage cannot work
                (a sentence says why); nothing is left behind.
            StartError: a process could not be started or did not answer in
                ``limits.start_timeout_s``; nothing is left behind.
        """
        check_tier_types(config)
        check_open_files(len(config.tier))
        self.config = config
        self._is_closed = False
        self._owns_session = False
        sweep()
        with contextlib.ExitStack() as undo:
            self.page = SessionPage.open_or_create(config)
            undo.callback(self._remove_page)
            self.region = PrimaryRegion.open(
                config, timeout_s=config.limits.start_timeout_s
            )
            undo.callback(self._remove_region)
            self.region.own()
            self._owns_session = True
            self._build_core(events=events)
            self._control = SupervisorLink(
                config,
                engine_epoch=self._epoch,
                region_fd=self.region.fd,
                page_fd=self.page.fd,
            )
            self._traffic = Traffic(
                self.manager, self.tiers, self._links, self._control, self.page
            )
            half = config.limits.close_timeout_s / 2
            undo.callback(self._traffic.stop, timeout_s=half)
            await_tiers(
                self.tiers,
                self._links,
                self._control,
                pump=self._traffic.pump,
                timeout_s=config.limits.start_timeout_s,
            )
            self.region.keep(self._keep())
            self._undo = undo.pop_all()
        self.slot_view = self.region.slot_view

    def _build_core(self, *, events: bool) -> None:
        config, limits = self.config, self.config.limits
        self._epoch = min(self.page.get(Word.ENGINE_EPOCH), MAX_EPOCH) + 1
        self.page.set(Word.ENGINE_EPOCH, self._epoch)
        self.page.set(Word.ENGINE_PID, os.getpid())
        self.page.set(Word.ENGINE_CLOSED, 0)
        self.tiers = [
            MailboxTier(
                tier.name,
                policy=tier.policy,
                credit_bytes=config.credit_bytes,
                block_bytes=config.stride,
                engine_epoch=self._epoch,
                max_outbox=limits.outbox_messages,
                events=events,
            )
            for tier in config.tier
        ]
        self._links = [
            TierLink(tier.name, engine_epoch=self._epoch) for tier in config.tier
        ]
        policy = load_policy(config.primary.policy, config.num_slots)
        self.manager = TieringOffloadingManager(
            config.num_slots,
            self.tiers,
            block_bytes=config.block_bytes,
            policy=policy,
            sink=self.region,
            scan_hold_s=limits.scan_hold_s,
            job_deadline_s=limits.job_deadline_s,
            events=events,
            **core_settings(config),
        )
        self._adopt(policy)
        self._trace = RequestTrace()
        self._gauges = Gauges(config, self.page, self.manager, self.tiers)

    def _adopt(self, policy: CachePolicy) -> None:
        """Take over what an engine before this one has left in the region."""
        check = self.config.primary.check_adopted
        found = find_residents(self.region, check=check)
        if found.is_empty:
            return
        adopt(self.manager.table, policy, found.blocks, found.generations)
        log.info(
            "adopted %d blocks of the engine before; dropped %d %s and %d that were "
            "being written or read at its end",
            len(found.blocks),
            found.num_dropped,
            "without a valid checksum" if check else "with a broken record",
            found.num_unfinished,
        )

    def _keep(self) -> Keep:
        """Return whom the region outlives: its owner is the daemon, if there is one."""
        if self.config.primary.persist:
            return Keep.EVERYBODY
        return Keep.ENGINES if self._control.is_daemon else Keep.NOBODY

    # The step -------------------------------------------------------------------

    def step_begin(self) -> None:
        """Take in what workers and the supervisor have said; set the clock."""
        self._try(self._traffic.pump)

    def on_schedule_end(self, ctx: ScheduleEndContext) -> None:
        """End the step: promotions leave, and whatever else was put out."""
        self._try(self._traffic.pump)
        self._try(self.manager.on_schedule_end, ctx)
        self._try(self._traffic.send)
        self._try(self._gauges.publish, num_steps=1)

    def flush(self) -> None:
        """Send what waits to be sent, now: there may be no step to do it.

        For callers that take in a copy's end after their last step. No wait.
        """
        self._try(self._traffic.send)

    # The manager's calls ----------------------------------------------------------

    def on_new_request(self, ctx: ReqContext) -> RequestOffloadingContext:
        """See ``OffloadingManager.on_new_request``."""
        self._gauges.num_requests += 1
        level = self._try(self.manager.on_new_request, ctx)
        if ctx.kv_transfer_params:
            answer = self.request_answer(ctx.req_id)
            if answer is not None:
                self._trace.note(ctx.req_id, answer)
        return level or RequestOffloadingContext()

    def request_answer(self, req_id: str) -> RequestAnswer | None:
        """Return what became of a request's own words; None once it is over."""
        return self._try(self.manager.request_answer, req_id)

    def lookup(self, key: OffloadKey, ctx: ReqContext) -> LookupResult:
        """See ``OffloadingManager.lookup``. Collects nothing: steps do.

        So answers are stable within a step, and a key costs no look at the page.
        """
        # Not by _try: one more call would cost a third of the lookup.
        try:
            if not self.is_broken:
                return self.manager.lookup(key, ctx)
        except Exception:  # noqa: BLE001  (reported by _break)
            self._break("lookup")
        return LookupResult.MISS

    def prepare_load(self, keys: Sequence[OffloadKey], ctx: ReqContext) -> SlotArray:
        """See ``OffloadingManager.prepare_load``; the one call that may raise."""
        try:
            if not self.is_broken:
                return self.manager.prepare_load(keys, ctx)
        except NotReadableError:  # the caller's bug
            raise
        except Exception:  # noqa: BLE001  (reported by _break)
            self._break("prepare_load")
        raise NotReadableError("the engine is off: nothing is readable")

    def slots_of(self, keys: Iterable[OffloadKey]) -> SlotArray:
        """Return the slots of readable blocks without pinning them.

        For a block that was a HIT when the core failed (``is_broken``): it stays
        where it is, for nothing moves any more. While the core works it may go
        with any call: use ``prepare_load``.

        Raises:
            KeyError: a block is not readable, or the engine is closed.
        """
        if self._is_closed:
            raise KeyError("the engine is closed: nothing is readable")
        return self.manager.table.slots_of(keys)

    def complete_load(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        """See ``OffloadingManager.complete_load``."""
        self._try(self.manager.complete_load, keys, ctx)

    def prepare_store(
        self, keys: Collection[OffloadKey], ctx: ReqContext
    ) -> PrepareStoreOutput | None:
        """See ``OffloadingManager.prepare_store``; collects replies first."""
        self._try(self._traffic.collect_if_signalled)
        return self._try(self.manager.prepare_store, keys, ctx)

    def complete_store(
        self, keys: Collection[OffloadKey], ctx: ReqContext, success: bool = True
    ) -> None:
        """See ``OffloadingManager.complete_store``; collects replies first."""
        self._try(self._traffic.collect_if_signalled)
        self._try(self.manager.complete_store, keys, ctx, success)

    def on_request_finished(self, ctx: ReqContext) -> None:
        """See ``OffloadingManager.on_request_finished``."""
        self._try(self.manager.on_request_finished, ctx)

    def has_pending_work(self) -> bool:
        """See ``OffloadingManager.has_pending_work``."""
        return bool(self._try(self.manager.has_pending_work))

    def reset_cache(self, *, forgets_copies: bool = False) -> None:
        """See ``TieringOffloadingManager.reset_cache``."""
        self._try(self._reset, forgets_copies=forgets_copies)

    def on_reset_flushed(self) -> None:
        """Say that no GPU copy of before ``reset_cache`` runs any more."""
        self._try(self.manager.on_reset_flushed)

    def load_source(self, key: OffloadKey) -> int:
        """Return the tier that a block came from; -1: it was in the primary."""
        source = self._try(self.manager.load_source, key)
        return FROM_STORE if source is None else source

    def touch(self, keys: Collection[OffloadKey], ctx: ReqContext) -> None:
        """See ``OffloadingManager.touch``."""
        self._try(self.manager.touch, keys, ctx)

    def take_events(self) -> list[OffloadingEvent]:
        """See ``OffloadingManager.take_events``; nothing without ``events``."""
        return self._try(self.manager.take_events) or []

    # Outside steps ----------------------------------------------------------------

    def wait_idle(self, timeout_s: float) -> bool:
        """Run empty steps until no job is open; False on time-out. Waits."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.step_begin()
            self._try(self._traffic.send)
            self._try(self._gauges.publish, num_steps=0)
            if not any(tier.num_open_jobs for tier in self.tiers):
                return True
            remaining = deadline - time.monotonic()
            if remaining <= 0 or self.is_broken:
                return False
            slice_s = min(remaining, WAIT_SLICE_S)
            wait_for_words(self._control, self._links, timeout_s=slice_s)

    def close(self) -> None:
        """End the session: finish open cascades, stop workers, remove names.

        Waits at most ``limits.close_timeout_s``. Twice is fine. Whoever calls on
        afterwards gets misses.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            with self._undo:
                self.wait_idle(self.config.limits.close_timeout_s / 2)
                self.page.set(Word.ENGINE_CLOSED, 1)
        finally:
            self.is_broken = True

    def shutdown(self) -> None:
        """End the session; see ``close``."""
        self.close()

    def __enter__(self) -> Self:
        """Return the engine; it is up already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the engine."""
        self.close()

    # Inside -------------------------------------------------------------------------

    def _reset(self, *, forgets_copies: bool) -> None:
        # Cut by a SIGKILL or a failure, it is completed by the next start.
        self.region.begin_change()
        self.manager.reset_cache(forgets_copies=forgets_copies)
        self.region.end_change()

    def _break(self, where: str) -> None:
        super()._break(where)
        with contextlib.suppress(ValueError):  # closed meanwhile
            self.region.begin_change()  # whatever the table says: nobody adopts it

    def _remove_region(self) -> None:
        try:
            self.region.unlink()
        finally:  # a name that stays is swept, a lock that stays refuses starts
            self.region.close()

    def _remove_page(self) -> None:
        control: SupervisorLink | None = getattr(self, "_control", None)
        is_daemons = control is not None and control.is_daemon
        try:
            if self._owns_session and not is_daemons:
                self.page.unlink(self.config.session.name)
        finally:
            self.page.close()
        if not self._owns_session:
            sweep()  # the page may be ours or a live session's: its lock tells
        elif is_daemons:
            sweep(self.config.session.name)  # the daemon may have gone before us
