"""May this process open what an engine needs.

Covers: one check at the start, and its sentence.
Does not cover: a limit that is met later: a hand-over then fails in words
(``supervisor_link``).
Who calls it: ``Engine``, at start; blocks on nothing.

Without it the start fails wherever the limit is met first: in a runtime directory, in
a worker that never comes up, in a hand-over without its descriptors.
"""

from __future__ import annotations

import os
import resource
from typing import Final

from shmoffload.errors import BadInputError

_OF_AN_ENGINE: Final = 16
"""Measured: 6 while it runs, a supervisor 10; the rest is for hand-overs."""
_OF_A_TIER: Final = 2


def check_open_files(num_tiers: int) -> None:
    """Refuse a start that would run out of file descriptors.

    The supervisor is started under the same limit, and needs less.

    Raises:
        BadInputError: so it would; says the limit and the need.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return
    try:
        num_open = len(os.listdir("/proc/self/fd"))
    except OSError:  # not even this one
        num_open = limit
    need = num_open + _OF_AN_ENGINE + _OF_A_TIER * num_tiers
    if need > limit:
        raise BadInputError(
            f"this process may have {limit} files open, {num_open} are; an engine with "
            f"{num_tiers} tiers needs {need} in all: type `ulimit -n {4 * need}` "
            f"before the start"
        )
