"""A store that keeps failing is not asked again at once.

Covers: counting failed calls, back-off, one probe. Pure: time comes in.
Does not cover: loads (they fail on their own and cost nothing when absent).
Who calls it: the store thread.
"""

from __future__ import annotations

from typing import Final

_FAILURES_TO_OPEN: Final = 3
_FIRST_BACKOFF_S: Final = 0.5
_MAX_BACKOFF_S: Final = 30.0


class Breaker:
    """Closed: ask. Open: do not ask before ``retry_at_s``; then one call probes."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._backoff_s = 0.0
        self.retry_at_s = 0.0

    @property
    def is_open(self) -> bool:
        """Calls fail again and again, and none has succeeded since."""
        return self._num_failures >= _FAILURES_TO_OPEN

    def allows(self, *, now_s: float) -> bool:
        """Say whether a call may be made now."""
        return not self.is_open or now_s >= self.retry_at_s

    def on_result(self, *, ok: bool, now_s: float) -> bool:
        """Count a call's outcome; True when the breaker has just opened."""
        if ok:
            self._num_failures = 0
            self._backoff_s = 0.0
            return False
        self._num_failures += 1
        if self._num_failures < _FAILURES_TO_OPEN:
            return False
        self._backoff_s = min(
            max(self._backoff_s * 2, _FIRST_BACKOFF_S), _MAX_BACKOFF_S
        )
        self.retry_at_s = now_s + self._backoff_s
        return self._num_failures == _FAILURES_TO_OPEN
