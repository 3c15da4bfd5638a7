"""Nothing of ours raises into a scheduler's step.

Covers: calling into the core, and switching it off once it has failed.
Does not cover: which calls those are (``handle``).
Who calls it: ``Engine``, in the scheduler's thread.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Guard:
    """Holds whether the core may still be used.

    Attributes:
        is_broken: the core has failed, or the engine is closed: all is a miss.
    """

    is_broken = False

    def _try(
        self, call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs
    ) -> _R | None:
        """Call into the core; None once it has failed, now or before."""
        try:
            if not self.is_broken:
                return call(*args, **kwargs)
        except Exception:  # noqa: BLE001  (reported by _break)
            self._break(call.__name__)
        return None

    def _break(self, where: str) -> None:
        """Stop using the core after it failed: a miss is right, a guess is not.

        Called while the exception is being handled.
        """
        log.critical(
            "shmoffload failed in %s and is off: everything is a miss from here",
            where,
            exc_info=sys.exception(),
        )
        self.is_broken = True
