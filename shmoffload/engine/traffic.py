"""What goes between the core and its workers: replies in, jobs out.

Covers: receiving from the supervisor and all workers, handing a worker's queue
over, sending what the tiers have put out, killing workers that miss deadlines.
Does not cover: one worker's queue (``tier_link``), the supervisor's socket
(``supervisor_link``), the calls of a step (``handle``).
Who calls it: ``Engine``, in the scheduler's thread. Only ``stop`` waits.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

from shmoffload.engine.supervisor_link import Handover, SupervisorLost
from shmoffload.wire.messages import MAX_TEXT_CHARS, WorkerGone
from shmoffload.wire.session import TierWord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmoffload.core.mailbox import MailboxTier
    from shmoffload.core.manager import TieringOffloadingManager
    from shmoffload.engine.supervisor_link import ControlEvent, SupervisorLink
    from shmoffload.engine.tier_link import TierLink
    from shmoffload.wire.session import SessionPage

log = logging.getLogger(__name__)


class Traffic:
    """Everything that is received and sent for one engine."""

    def __init__(
        self,
        manager: TieringOffloadingManager,
        tiers: Sequence[MailboxTier],
        links: Sequence[TierLink],
        control: SupervisorLink,
        page: SessionPage,
    ) -> None:
        """Connect the core's tiers with their links, by index."""
        self._manager = manager
        self._pairs = list(zip(tiers, links, strict=True))
        self._control = control
        self._words = words = page.words
        base = page.tier_base
        self._completion_words = [
            base(i) + TierWord.COMPLETIONS for i in range(len(tiers))
        ]
        self._seen = [words[word] for word in self._completion_words]
        self._pids = [0] * len(tiers)  # of the workers whose death is not told yet
        self._lost_before = [0] * len(tiers)  # jobs, with the workers before this one

    def pump(self) -> None:
        """Receive from everybody: only a receive shows that somebody is gone."""
        now_s = time.monotonic()
        vacant = all(link.is_vacant for _, link in self._pairs)
        for event in self._control.pump(now_s=now_s, workers_gone=vacant):
            self._on_control(event)
        self._collect(now_s)

    def collect_if_signalled(self) -> None:
        """Receive from the workers if one says that it has answered."""
        words, seen = self._words, self._seen
        for i, word in enumerate(self._completion_words):
            if words[word] != seen[i]:
                self._collect(time.monotonic())
                return

    def send(self) -> None:
        """Send what the tiers have put out and what their queues take now."""
        for tier, link in self._pairs:
            # While a queue is full the rest waits in the mailbox, which has a bound.
            link.send(() if link.num_unsent else tier.take_outbox())

    def stop(self, *, timeout_s: float) -> None:
        """Have all workers stopped and reaped, then let go of the queues."""
        if not self._control.detach(timeout_s=timeout_s):
            log.warning("the supervisor did not confirm the end of its workers")
        for _, link in self._pairs:
            link.close()

    def _on_control(self, event: ControlEvent) -> None:
        if isinstance(event, Handover):
            tier, link = self._pairs[event.tier_idx]
            # The supervisor starts a worker only after it reaped the last one, so
            # what is left of that one can be read to its end now.
            tier.feed(link.receive())
            if not link.is_vacant:
                log.error("a worker was handed over beside a live one; refused")
                event.channel.close()
                os.close(event.pidfd)
                return
            link.connect(event.channel, event.pidfd, event.worker_epoch)
            self._pids[event.tier_idx] = event.pid
            self._lost_before[event.tier_idx] = tier.jobs_lost
        elif isinstance(event, WorkerGone):
            self._say_death(event)
        elif isinstance(event, SupervisorLost):
            for tier, link in self._pairs:
                tier.feed(link.receive())
                tier.feed(link.abandon())

    def _say_death(self, gone: WorkerGone) -> None:
        """Tell a death in one sentence, with what it cost and what comes next."""
        if not 0 <= gone.tier_idx < len(self._pairs):
            return
        tier, link = self._pairs[gone.tier_idx]
        pid = self._pids[gone.tier_idx]
        if not pid or gone.worker_epoch != link.worker_epoch:
            return  # said before, or never heard of
        self._pids[gone.tier_idx] = 0
        tier.feed(link.receive())  # reaped, so the proof is here: its jobs have failed
        has_said = link.hello is not None and link.hello.error  # why; once is enough
        log.log(
            logging.INFO if has_said else logging.WARNING,
            "tier %s: worker %d %s; %d of its jobs failed; all that the tier holds is "
            "a miss until the next worker is up",
            tier.name,
            pid,
            " ".join(gone.reason[:MAX_TEXT_CHARS].split()),
            tier.jobs_lost - self._lost_before[gone.tier_idx],
        )

    def _collect(self, now_s: float) -> None:
        for i, (tier, link) in enumerate(self._pairs):
            self._seen[i] = self._words[self._completion_words[i]]
            inputs = link.receive()
            if inputs:
                tier.feed(inputs)
        self._manager.advance(now_s)
        for tier_idx in self._manager.take_overdue_tiers():
            self._control.kill_worker(
                tier_idx,
                self._pairs[tier_idx][1].worker_epoch,
                reason="did not answer a job before its deadline",
                now_s=now_s,
            )
