"""Opening a tier without letting the engine wait for what it held before.

Covers: the thread that opens, how long it is waited for, what it raised.
Does not cover: opening (the tier), what is said meanwhile (``serve``).
Who calls it: ``serve``, main thread, which goes on beating.

A million old blocks take a second to find on an idle machine and half a minute on a
busy one. A tier that cannot be refused any more (``Tier.early_limits``) is up before
they are found; until then it holds nothing and takes nothing.
"""

from __future__ import annotations

import gc
import threading
import time
from typing import TYPE_CHECKING, Final

from shmoffload.errors import TierError

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmoffload.worker.tier import Tier, TierLimits

PATIENCE_S: Final = 1.0
_TURN_S: Final = 0.05


class Opening:
    """One tier's ``open``, on a thread of its own."""

    def __init__(self, tier: Tier, call: Callable[[], TierLimits]) -> None:
        """Start to ``call`` the tier's ``open``."""
        self._tier = tier
        self._call = call
        self._limits: TierLimits | None = None
        self._error: BaseException | None = None
        self._has_ended = threading.Event()
        # A million blocks found again are a million objects that stay: to count
        # them again and again takes longer than to find them.
        gc.disable()
        # A daemon, since nobody can end a call that hangs in the kernel.
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._limits = self._call()
        except BaseException as error:  # noqa: BLE001  (``result`` raises it)
            self._error = error
        gc.freeze()
        gc.enable()
        self._has_ended.set()

    @property
    def has_ended(self) -> bool:
        """The tier's ``open`` has returned or raised."""
        return self._has_ended.is_set()

    def wait(self, on_turn: Callable[[], bool], *, patience_s: float) -> bool:
        """Wait until it has ended or, after ``patience_s``, may be used early.

        Args:
            on_turn: called again and again; True ends the wait.
            patience_s: from which time on early is good enough.

        Returns:
            False when ``on_turn`` ended it.
        """
        late_s = time.monotonic() + patience_s
        while not self._has_ended.wait(_TURN_S):
            if time.monotonic() > late_s and self._tier.early_limits is not None:
                return True
            if on_turn():
                return False
        return True

    def result(self) -> TierLimits:
        """Return the limits; what ``open`` raised is raised here.

        Raises:
            TierConfigError: useless until the configuration changes.
            TierError: did not work now.
            OSError: did not work now.
        """
        if self._error is not None:
            raise self._error
        limits = self._limits or self._tier.early_limits
        if limits is None:
            raise TierError("the tier was not opened")
        return limits
