"""The most prefix hits that any eviction order could reach.

Covers: Belady's rule with bypass, request by request, prefix-closed.
Does not cover: real policies (``core.policies``).
Who calls it: plan mode; pure.

After each request the cache keeps, of what it held and what the request brought,
the blocks that are used again soonest. Blocks have one size and each is used at
most once by a request, so no other choice gives more block hits. Of blocks that
are next used by the same request the deepest goes first: a block is never kept
without its prefix, hence block hits are prefix hits and one optimum serves both.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from shmoffload.replay.plan.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Optimum:
    """What the best eviction order comes to.

    Attributes:
        prefix_hits: leading blocks that it holds.
        block_hits: the same number, by the rule above.
        stores: blocks taken from a request that are used again, also those that
            the same request then pushes out.
    """

    prefix_hits: int
    block_hits: int
    stores: int


def optimum(traffic: Traffic, num_slots: int) -> Optimum:
    """Play a whole workload with knowledge of its future; seconds for 10**6 blocks."""
    num_ids = max(1, traffic.num_distinct)
    num_depths = max(1, len(traffic.positions))
    ranks, is_last = _ranks(traffic, num_ids, num_depths)
    held = bytearray(num_ids)
    heap: list[int] = []
    prefix_hits = block_hits = stores = num_held = start = 0
    for number, ids in enumerate(traffic.ids):
        end = start + len(ids)
        is_leading = True
        for block, rank, last in zip(
            ids, ranks[start:end], is_last[start:end], strict=True
        ):
            if held[block]:
                block_hits += 1
                prefix_hits += is_leading
                num_held -= last
            else:
                is_leading = False
                num_held += not last
                stores += not last
            held[block] = not last
            if not last:
                heapq.heappush(heap, rank)
        while num_held > num_slots:
            # What is held is used after this request. Entries of uses that have
            # passed rank behind it, so they are never met here.
            held[-heapq.heappop(heap) % num_ids] = False
            num_held -= 1
        if len(heap) > 4 * num_slots + 4096:
            passed = -(number + 1) * num_depths * num_ids
            heap = [rank for rank in heap if rank <= passed]
            heapq.heapify(heap)
        start = end
    return Optimum(prefix_hits, block_hits, stores)


def _ranks(
    traffic: Traffic, num_ids: int, num_depths: int
) -> tuple[list[int], list[bool]]:
    """Return per access its order of eviction, and whether it is the block's last.

    A rank is -(((request of the next use) * depths + depth) * num_ids + block): what
    is used latest, and of that the deepest, is the smallest.
    """
    lengths = [len(ids) for ids in traffic.ids]
    ids = np.fromiter((i for row in traffic.ids for i in row), np.int64, sum(lengths))
    starts = np.array([0, *accumulate(lengths)], np.int64)
    request = np.repeat(np.arange(len(lengths)), lengths)
    depth = np.arange(len(ids)) - starts[request]
    next_use = _next_use(ids, request)
    assert len(lengths) * num_depths * num_ids < 1 << 62
    ranks = -((next_use * num_depths + depth) * num_ids + ids)
    return ranks.tolist(), (next_use < 0).tolist()


def _next_use(
    ids: npt.NDArray[np.int64], request: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return per access the next request with the same block, -1 if there is none."""
    order = np.argsort(ids, kind="stable")
    following = np.full(len(ids), -1, np.int64)
    is_same = ids[order[:-1]] == ids[order[1:]]
    following[order[:-1][is_same]] = request[order[1:][is_same]]
    return following
