"""Shows a plan.

Covers: the stable JSON, the table.
Does not cover: the figures (``grid``), CSV and chart (``sweep``).
Who calls it: the command line and tests; pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from shmoffload.wire.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmoffload.replay.plan.grid import Cell, Grid
    from shmoffload.replay.plan.traffic import Traffic


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What a plan came to.

    Attributes:
        traffic: what was replayed.
        grid: what was asked for.
        cells: what came of it.
        described: settings that the report repeats.
    """

    traffic: Traffic
    grid: Grid
    cells: Sequence[Cell]
    described: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return everything with stable keys; the same input gives the same."""
        return {
            "mode": "plan",
            "requests": len(self.traffic.keys),
            "blocks": self.traffic.num_blocks,
            "distinct_blocks": self.traffic.num_distinct,
            "prefix_hits_attainable": self.traffic.attainable_hits,
            "model": {
                "name": self.grid.model.name,
                "block_bytes": self.grid.model.block_bytes,
            },
            "cells": [cell.to_json() for cell in self.cells],
            "settings": self.described,
        }

    def to_tables(self) -> list[Table]:
        """Return one row per cell, and one per tier of a cell."""
        traffic = self.traffic
        table = _table(
            f"{len(traffic.keys)} requests, {traffic.num_blocks} blocks, "
            f"{traffic.num_distinct} distinct, {traffic.attainable_hits} prefix hits "
            f"in unlimited memory; {self.grid.model.name}",
            *("primary", "blocks", "memory", "policy"),
            *("hits", "rate", "of best", "stores"),
        )
        for cell in self.cells:
            table.add_row(
                cell.primary,
                f"{cell.primary_blocks}",
                format_size(cell.primary_bytes),
                cell.policy,
                f"{cell.prefix_hits}",
                f"{cell.prefix_hit_rate:.4f}",
                f"{cell.of_optimum:.1%}",
                f"{cell.stores}",
            )
        return [table, self._tiers()] if self.grid.tiers else [table]

    def _tiers(self) -> Table:
        table = _table(
            "tiers",
            *("primary", "policy", "tier", "hits", "written"),
            *("/ distinct", "promoted", "unread"),
        )
        for cell in self.cells:
            for tier in cell.tiers:
                table.add_row(
                    cell.primary,
                    cell.policy,
                    tier.name,
                    f"{cell.hits_by_source[tier.name]}",
                    format_size(tier.bytes_written),
                    f"{tier.writes_per_distinct:.3f}",
                    format_size(tier.bytes_promoted),
                    f"{tier.never_read_share:.1%}",
                )
        return table


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.collapse_padding, table.pad_edge = True, False
    for head in heads:
        is_name = head in ("policy", "tier")
        table.add_column(head, justify="left" if is_name else "right", no_wrap=True)
    return table
