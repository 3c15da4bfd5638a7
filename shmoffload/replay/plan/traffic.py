"""A workload in the shape that many simulated runs share.

Covers: keys and numbers of blocks, made once.
Does not cover: reading traces (``replay.traces``).
Who calls it: ``drive`` and ``optimum`` read it; plain data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shmoffload.core.types import make_offload_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmoffload.core.types import OffloadKey
    from shmoffload.replay.requests import Workload


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests as lists of blocks, head first.

    Attributes:
        keys: per request; one object per distinct key, so that its hash is
            computed once in all runs.
        ids: the same blocks as numbers, 0 to ``num_distinct`` - 1.
        positions: token position at which the i-th block of any request ends.
        num_blocks: of all requests.
        num_distinct: different ones among them.
        attainable_hits: leading blocks that were seen before.
    """

    keys: Sequence[Sequence[OffloadKey]]
    ids: Sequence[Sequence[int]]
    positions: Sequence[int]
    num_blocks: int
    num_distinct: int
    attainable_hits: int

    @classmethod
    def of(cls, workload: Workload) -> Traffic:
        """Return a workload's traffic."""
        number: dict[bytes, int] = {}
        names: list[OffloadKey] = []
        ids = []
        for request in workload.requests:
            for block in request.hashes:
                if block not in number:
                    number[block] = len(names)
                    names.append(make_offload_key(block))
            ids.append([number[block] for block in request.hashes])
        longest = max(map(len, ids), default=0)
        step = workload.block_tokens
        return cls(
            keys=[[names[i] for i in row] for row in ids],
            ids=ids,
            positions=range(step, (longest + 1) * step, step),
            num_blocks=workload.num_blocks,
            num_distinct=len(names),
            attainable_hits=workload.attainable_hits(),
        )
