"""Hit rate against capacity, per policy: a CSV for programs, a PNG for people.

Covers: the CSV, writing both files.
Does not cover: the figures (``grid``), drawing (``chart``).
Who calls it: ``shmoffload sweep`` and tests; writes two files.
"""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Final

from shmoffload.errors import BadInputError
from shmoffload.replay.plan.chart import Curve, PlotUnavailableError, draw

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shmoffload.replay.plan.grid import Cell

CSV_NAME: Final = "sweep.csv"
PNG_NAME: Final = "sweep.png"
COLUMNS: Final = (
    "policy",
    "primary",
    "primary_blocks",
    "primary_bytes",
    "prefix_hits",
    "prefix_hit_rate",
    "block_hits",
    "optimum_hits",
    "of_optimum",
    "stores",
    "stored_bytes",
)


def write_sweep(cells: Sequence[Cell], folder: Path, *, title: str) -> str:
    """Write ``sweep.csv`` and ``sweep.png`` into a directory, made if missing.

    Returns:
        Why there is no PNG, or "".

    Raises:
        BadInputError: the directory or a file in it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CSV_NAME).write_text(_csv_of(cells))
        try:
            (folder / PNG_NAME).write_bytes(draw(_curves(cells), title=title))
        except PlotUnavailableError as error:
            return str(error)
    except OSError as error:
        raise BadInputError(
            f"{folder} cannot be written ({error.strerror}): give another --out"
        ) from error
    return ""


def _csv_of(cells: Sequence[Cell]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([getattr(cell, name) for name in COLUMNS] for cell in cells)
    return text.getvalue()


def _curves(cells: Sequence[Cell]) -> list[Curve]:
    curves: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        point = (cell.primary_bytes / (1 << 30), cell.prefix_hit_rate)
        curves.setdefault(cell.policy, []).append(point)
    return [Curve(name, sorted(points)) for name, points in curves.items()]
