"""What a trace is like, before anything is planned.

Covers: counts, reuse, lengths, bytes for the models that have a name.
Does not cover: hits of a cache (``grid``).
Who calls it: ``shmoffload stats`` and tests; pure.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from shmoffload.replay.plan.models import named_models
from shmoffload.wire.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmoffload.replay.requests import Workload


@dataclass(frozen=True, slots=True)
class TraceStats:
    """Figures of a workload; field names are stable JSON keys.

    Attributes:
        requests: how many.
        span_s: from the first arrival to the last.
        block_tokens: tokens of a block.
        blocks: full blocks of all requests.
        distinct_blocks: different ones among them.
        prefix_hits_attainable: leading blocks that were seen before.
        reuse: the same, by blocks.
        used_once: distinct blocks that only one request has.
        used_once_share: the same, by distinct blocks.
        input_tokens: p50, p99, max of a prompt.
        output_tokens: p50, p99, max.
        blocks_per_request: p50, p99, max of full blocks.
        model_bytes: per named model, the bytes of all distinct blocks.
    """

    requests: int
    span_s: float
    block_tokens: int
    blocks: int
    distinct_blocks: int
    prefix_hits_attainable: int
    reuse: float
    used_once: int
    used_once_share: float
    input_tokens: dict[str, int]
    output_tokens: dict[str, int]
    blocks_per_request: dict[str, int]
    model_bytes: dict[str, int]

    @classmethod
    def of(cls, workload: Workload) -> TraceStats:
        """Return the figures of a workload."""
        requests = workload.requests
        uses = Counter(block for request in requests for block in request.hashes)
        used_once = sum(count == 1 for count in uses.values())
        attainable = workload.attainable_hits()
        return cls(
            requests=len(requests),
            span_s=round(requests[-1].arrival_s - requests[0].arrival_s, 3),
            block_tokens=workload.block_tokens,
            blocks=workload.num_blocks,
            distinct_blocks=len(uses),
            prefix_hits_attainable=attainable,
            reuse=round(attainable / max(1, workload.num_blocks), 6),
            used_once=used_once,
            used_once_share=round(used_once / max(1, len(uses)), 6),
            input_tokens=_spread([r.num_input_tokens for r in requests]),
            output_tokens=_spread([r.num_output_tokens for r in requests]),
            blocks_per_request=_spread([len(r.hashes) for r in requests]),
            model_bytes={
                model.name: len(uses) * model.block_bytes
                for model in named_models(workload.block_tokens)
            },
        )

    def to_json(self) -> dict[str, Any]:
        """Return the figures with their stable keys."""
        return {name: getattr(self, name) for name in self.__slots__}

    def to_table(self, title: str) -> Table:
        """Return the figures as a table for people."""
        table = Table(title=title, show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column(justify="right")
        rows = [
            ("requests", f"{self.requests}"),
            ("span", f"{self.span_s:g} s"),
            (f"blocks of {self.block_tokens} tokens", f"{self.blocks}"),
            ("distinct", f"{self.distinct_blocks}"),
            ("attainable prefix hits", f"{self.prefix_hits_attainable}"),
            ("reuse", f"{self.reuse:.4f}"),
            ("used once", f"{self.used_once} ({self.used_once_share:.1%})"),
            ("input tokens p50 / p99 / max", _listed(self.input_tokens)),
            ("output tokens p50 / p99 / max", _listed(self.output_tokens)),
            ("blocks a request p50 / p99 / max", _listed(self.blocks_per_request)),
            *((f"as {name}", format_size(n)) for name, n in self.model_bytes.items()),
        ]
        for row in rows:
            table.add_row(*row)
        return table


def _spread(values: Sequence[int]) -> dict[str, int]:
    array = np.array(values)
    return {
        name: int(np.percentile(array, percent))
        for name, percent in (("p50", 50), ("p99", 99), ("max", 100))
    }


def _listed(spread: dict[str, int]) -> str:
    return " / ".join(map(str, spread.values()))
