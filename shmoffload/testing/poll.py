"""Wait for a condition, never for a time.

Covers: one polling loop with a deadline.
Does not cover: what to wait for.
Who calls it: tests, in any process and thread.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05


def wait_until(predicate: Callable[[], T], *, timeout_s: float, what: str) -> T:
    """Call ``predicate`` until it is true and return what it returned.

    Blocks the calling thread for up to ``timeout_s``; the predicate is called at
    least once and once more when the time is up.

    Raises:
        AssertionError: it never became true; names ``what`` and the last answer.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while True:
        is_last = time.monotonic() >= deadline
        answer = predicate()
        if answer:
            return answer
        if is_last:
            raise AssertionError(
                f"waited {timeout_s:g} s in vain for {what}; last answer: {answer!r}"
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
