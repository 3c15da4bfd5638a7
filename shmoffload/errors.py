"""What can go wrong in the world, each with the sentence that a person needs.

Covers: exceptions for a full disk, a dead worker, a bad configuration.
Does not cover: our own bugs (those are assertions).
Who calls it: every layer. Nothing here is raised into a scheduler's step; these
leave only from start-up, from ``close`` and from the command line.
"""

from __future__ import annotations

from typing import Final

MAX_SHOWN_CHARS: Final = 80


class ShmoffloadError(Exception):
    """Base of every error of ours; the text says what is and what to type.

    Attributes:
        exit_code: what the command line exits with when this reaches it.
    """

    exit_code = 1


class BadInputError(ShmoffloadError):
    """The person's input cannot be used; nothing was started or changed."""

    exit_code = 2


class ConfigError(BadInputError):
    """A configuration key or value is wrong."""


class TraceError(BadInputError):
    """A file given as a request trace is none."""


class NoSessionError(ShmoffloadError):
    """No live session has the given name."""

    exit_code = 3


class SessionInUseError(BadInputError):
    """Another live engine owns the session name."""


class RegionTooSmallError(BadInputError):
    """Shared memory has less room than the primary region needs."""


class RegionMismatchError(BadInputError):
    """A live region of this session has another geometry than asked for."""


class StartError(ShmoffloadError):
    """The supervisor or a tier's worker could not be started."""


class TierError(ShmoffloadError):
    """A whole tier call failed; it may work later (trips the breaker)."""


class TierConfigError(TierError, BadInputError):
    """A tier cannot work as configured: path, permission, credentials.

    Said once; the tier stays down until its configuration changes.
    """

    exit_code = 2


def cut(text: str) -> str:
    """Return what a person wrote for a sentence about it, not too long."""
    is_short = len(text) <= MAX_SHOWN_CHARS
    return text if is_short else f"{text[: MAX_SHOWN_CHARS - 3]}..."


def shown(value: object) -> str:
    """Return a wrong value as the person wrote it: in JSON, not too long."""
    import json  # here, and not in every worker's start

    try:
        return cut(json.dumps(value))
    except (TypeError, ValueError):
        return cut(repr(value))
