"""Requests to replay, wherever they come from.

Covers: the request, a workload with its figures.
Does not cover: reading traces (``traces``), making requests up (``generate``).
Who calls it: the replay and its command line; plain data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """One request.

    Attributes:
        req_id: unique in its workload.
        arrival_s: after the first request of the workload.
        num_input_tokens: prompt, the partial last block included.
        num_output_tokens: as recorded; a replay may decode fewer.
        hashes: one per full block of the prompt, head first, prefix-dependent.
    """

    req_id: str
    arrival_s: float
    num_input_tokens: int
    num_output_tokens: int
    hashes: Sequence[bytes]


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival, over blocks of one size.

    Attributes:
        name: what it was read or made from.
        block_tokens: tokens of a block.
        requests: in order of arrival.
    """

    name: str
    block_tokens: int
    requests: Sequence[ReplayRequest]

    @cached_property
    def num_blocks(self) -> int:
        """Full blocks of all requests."""
        return sum(len(request.hashes) for request in self.requests)

    @cached_property
    def num_distinct(self) -> int:
        """Different blocks among them."""
        return len({h for request in self.requests for h in request.hashes})

    def attainable_hits(self, at_start: Collection[bytes] = ()) -> int:
        """Count leading blocks that were seen before, had every store been instant.

        Args:
            at_start: hashes of blocks that a tier holds before the first request.
        """
        seen: set[bytes] = set()
        hits = 0
        for request in self.requests:
            for block in request.hashes:
                if block not in seen and block not in at_start:
                    break
                hits += 1
            seen.update(request.hashes)
        return hits
