"""Generated workloads: seeded, growing, sharing what they should."""

from shmoffload.replay.generate import MultiTurn, generate


def test_same_seed_same_requests():
    assert generate(MultiTurn(seed=3)) == generate(MultiTurn(seed=3))
    assert generate(MultiTurn(seed=3)).requests != generate(MultiTurn(seed=4)).requests


def test_all_but_new_blocks_are_attainable():
    shape = MultiTurn(num_conversations=5, num_turns=3)
    workload = generate(shape)
    assert len(workload.requests) == 15
    assert workload.attainable_hits() == workload.num_blocks - workload.num_distinct
    arrivals = [request.arrival_s for request in workload.requests]
    assert arrivals[0] == 0
    assert arrivals == sorted(arrivals)
