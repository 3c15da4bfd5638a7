"""Made-up traffic for tests of plan mode.

Covers: requests as paths of a small tree, blocks by number.
Does not cover: recorded traces.
Who calls it: tests of plan mode.
"""

import hashlib

from hypothesis import strategies as st

from shmoffload.replay.plan.traffic import Traffic
from shmoffload.replay.requests import ReplayRequest, Workload

BLOCK_TOKENS = 16


def workload_of(*paths):
    """A workload; a block is named by its whole path."""
    return Workload(
        "made up",
        BLOCK_TOKENS,
        [
            ReplayRequest(
                req_id=f"r{i}",
                arrival_s=i / 10,
                num_input_tokens=len(path) * BLOCK_TOKENS + 3,
                num_output_tokens=5,
                hashes=[name_of(path[: n + 1]) for n in range(len(path))],
            )
            for i, path in enumerate(map(tuple, paths))
        ],
    )


def name_of(path):
    return hashlib.blake2b(repr(path).encode(), digest_size=16).digest()


def traffic_of(*paths):
    return Traffic.of(workload_of(*paths))


def paths(*, max_requests, max_length, max_branch=2):
    """Requests that share prefixes, as tuples of branches."""
    one = st.lists(st.integers(0, max_branch), min_size=0, max_size=max_length)
    return st.lists(one.map(tuple), min_size=1, max_size=max_requests)


def returning_paths(*, max_requests, max_paths, max_length):
    """Requests that come again and again, as tuples of branches."""
    one = st.lists(st.integers(0, 1), min_size=1, max_size=max_length).map(tuple)
    pools = st.lists(one, min_size=1, max_size=max_paths, unique=True)
    return pools.flatmap(
        lambda pool: st.lists(
            st.sampled_from(pool), min_size=max_requests // 2, max_size=max_requests
        )
    )
