"""How far a prompt can be loaded: one KV group, or several that have to agree.

Covers: the scans of full attention and of sliding windows, their common end.
Does not cover: where the keys come from, caps, what is then loaded (``planner``).
Who calls it: ``planner``, scheduler thread. (vLLM ``offloading/scheduler.py``,
0.25 to 0.33.)

Full attention needs every block of the prefix. A window needs only its last
blocks, so it is scanned from the end. PENDING and RETRY make the answer undecided,
and the scan goes on, so that one step starts everything that will be needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shmoffload.core.types import LookupResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shmoffload.core.types import OffloadKey

_HIT = LookupResult.HIT
_MISS = LookupResult.MISS
_RETRY = LookupResult.RETRY


class Match(NamedTuple):
    """Leading blocks that count, and whether the answer stands."""

    num_blocks: int
    is_decided: bool


class GroupKeys(NamedTuple):
    """One KV group: its keys, block by block, and its window (None: no window)."""

    keys: Sequence[OffloadKey]
    window_blocks: int | None = None


def scan_prefix(
    ask: Callable[[OffloadKey], LookupResult], keys: Sequence[OffloadKey]
) -> Match:
    """Count the leading blocks that are there or may come; MISS ends the scan."""
    is_decided = True
    for num, key in enumerate(keys):
        result = ask(key)
        if result is _MISS:
            return Match(num, is_decided)
        if result is not _HIT:
            is_decided = False
    return Match(len(keys), is_decided)


def scan_window(
    ask: Callable[[OffloadKey], LookupResult],
    keys: Sequence[OffloadKey],
    window_blocks: int,
) -> Match:
    """Find the longest prefix whose last ``window_blocks`` blocks are there.

    From the end backwards. MISS and RETRY break a run, PENDING keeps it; a run
    that reaches the start counts although it is shorter than the window.
    """
    run, is_decided = 0, True
    for idx in range(len(keys) - 1, -1, -1):
        result = ask(keys[idx])
        if result is _MISS or result is _RETRY:
            run = 0
        else:
            run += 1
        if result is not _HIT and result is not _MISS:
            is_decided = False
        if run == window_blocks:
            return Match(idx + run, is_decided)
    return Match(run, is_decided)


def match_groups(
    ask: Callable[[OffloadKey], LookupResult], groups: Sequence[GroupKeys]
) -> Match:
    """Return the longest prefix that every group can give.

    Full attention first, then windows, the largest first. Each may shorten the
    end that the others have agreed on; they are asked again until it stands.
    """
    if not groups:
        return Match(0, is_decided=True)
    end = min(len(group.keys) for group in groups)
    in_turn = sorted(groups, key=_by_window)
    is_decided = True
    while True:
        before = end
        for group in in_turn:
            keys = group.keys[:end]
            found = (
                scan_prefix(ask, keys)
                if group.window_blocks is None
                else scan_window(ask, keys, group.window_blocks)
            )
            end = found.num_blocks
            is_decided = is_decided and found.is_decided
        if end in (0, before) or len(groups) == 1:
            return Match(end, is_decided)


def _by_window(group: GroupKeys) -> tuple[bool, int]:
    return group.window_blocks is not None, -(group.window_blocks or 0)
