"""The log of what requests asked for and what they got.

Covers: one DEBUG line per request with words of its own on ``shmoffload.trace``,
one WARNING per kind of bad word.
Does not cover: judging words (``core.request_policy``).
Who calls it: ``Engine``, in the scheduler's thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from shmoffload.core.request_policy import Verdict

if TYPE_CHECKING:
    from shmoffload.core.request_policy import RequestAnswer

log = logging.getLogger(__name__)
trace = logging.getLogger("shmoffload.trace")

_MAX_REQ_ID_CHARS: Final = 128


class RequestTrace:
    """Says each thing once."""

    def __init__(self) -> None:
        """Start with nothing said."""
        # Bounded: notes have a fixed set of keys, whatever requests contain.
        self._warned: set[tuple[str, Verdict]] = set()

    def note(self, req_id: str, answer: RequestAnswer) -> None:
        """Log the answer to one request's words; no system call if nobody listens."""
        for note in answer.notes.values():
            kind = (note.key, note.verdict)
            if note.verdict is Verdict.ACCEPTED or kind in self._warned:
                continue
            self._warned.add(kind)
            log.warning(
                "a request's %s was %s (%s); said once, the request goes on",
                note.key,
                note.verdict.value,
                note.why,
            )
        if trace.isEnabledFor(logging.DEBUG):
            words = ", ".join(
                f"{note.key} {note.verdict.value}" + (note.why and f" ({note.why})")
                for note in answer.notes.values()
            )
            trace.debug("request %s: %s", req_id[:_MAX_REQ_ID_CHARS], words)
