"""Sizes as people write and read them.

Covers: bytes from text with units, and back; powers of 1024.
Does not cover: amounts relative to something (``replay.settings``).
Who calls it: configuration, command line, tiers' sentences; any thread.
"""

from __future__ import annotations

import re
from typing import Final

from shmoffload.errors import ConfigError, cut

_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)
_UNIT: Final = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def parse_size(text: str | int, *, key: str = "size") -> int:
    """Return bytes for ``65536``, ``"64K"``, ``"64KiB"`` or ``"1.5GiB"``.

    Units are powers of 1024, with or without the i.

    Raises:
        ConfigError: not a size.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(
            f'{key} = "{cut(str(text))}" is not a size: write a number of bytes or '
            f'something like "64KiB" or "1.5GiB"'
        )
    return int(float(match[1]) * (1 << _UNIT[match[2].upper()]))


def format_size(num_bytes: int) -> str:
    """Return bytes in the largest unit that gives at least 1: ``"1.2 GiB"``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
