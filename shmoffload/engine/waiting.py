"""The engine's two waits: until its tiers are up, and for anybody to speak.

Covers: bounded waiting at start and between empty steps.
Does not cover: steps; nothing of a step waits.
Who calls it: ``Engine``, at start and close, in the scheduler's thread.
"""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING

from shmoffload.engine.supervisor_link import LinkState
from shmoffload.errors import StartError, TierConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shmoffload.core.mailbox import MailboxTier
    from shmoffload.engine.supervisor_link import SupervisorLink
    from shmoffload.engine.tier_link import TierLink

WAIT_SLICE_S = 0.05
"""A pidfd or a restart may be what is awaited: look again this often."""


def wait_for_words(
    control: SupervisorLink, links: Sequence[TierLink], *, timeout_s: float
) -> None:
    """Wait until the supervisor or a worker says something."""
    poller = select.poll()
    for fd in (control.fileno(), *(link.fileno() for link in links)):
        if fd >= 0:
            poller.register(fd, select.POLLIN)
    poller.poll(timeout_s * 1000)


def await_tiers(
    tiers: Sequence[MailboxTier],
    links: Sequence[TierLink],
    control: SupervisorLink,
    *,
    pump: Callable[[], None],
    timeout_s: float,
) -> None:
    """Wait until every tier is up, calling ``pump`` whenever somebody spoke.

    Raises:
        TierConfigError: a tier's storage cannot work as configured.
        StartError: a tier is not up in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        pump()
        for tier, link in zip(tiers, links, strict=True):
            if link.hello is not None and link.hello.is_config_error:
                raise TierConfigError(f"tier {tier.name}: {link.hello.error}")
        waiting = [tier.name for tier in tiers if not tier.is_up]
        if not waiting and control.state is LinkState.ATTACHED:
            return
        if time.monotonic() > deadline:
            raise StartError(_late(waiting, tiers, links, timeout_s))
        wait_for_words(control, links, timeout_s=WAIT_SLICE_S)


def _late(
    waiting: list[str],
    tiers: Sequence[MailboxTier],
    links: Sequence[TierLink],
    timeout_s: float,
) -> str:
    said = [
        f"{tier.name}: {link.hello.error}"
        for tier, link in zip(tiers, links, strict=True)
        if link.hello is not None and link.hello.error
    ]
    what = ", ".join(waiting) or "the supervisor"
    why = "; ".join(said) or "see the log above"
    return (
        f"{what} did not come up in {timeout_s:g} s ({why}); raise "
        f"limits.start_timeout_s if the storage is only slow"
    )
