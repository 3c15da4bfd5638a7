"""vLLM's tiering manager and ours give the same answers to the same calls.

Runs where vLLM is installed (``tools/vllm_env.sh``), skips elsewhere. More traces:
``SHMOFFLOAD_DIFFERENTIAL_SEEDS=1000``.
"""

import os
from collections import Counter

import pytest
from random_trace import Trace
from twins import DifferenceError, Twins
from vllm_kit import HAS_PROVISIONAL_RANKS

from shmoffload.core.cascades import Cascades
from shmoffload.core.policies.arc import ArcPolicy
from shmoffload.core.policies.lru import LruPolicy
from shmoffload.core.policies.registry import make_policy
from shmoffload.core.promotions import Promotions
from shmoffload.core.stores import GpuStores
from shmoffload.core.types import JobResult

NUM_SEEDS = int(os.environ.get("SHMOFFLOAD_DIFFERENTIAL_SEEDS", "60"))
TIERS = [(False,), (False, False), (True, False)]
AT_LEAST = {  # per trace, so that a trace that compares nothing is seen
    "lookup HIT": 40,
    "lookup HIT_PENDING": 20,
    "lookup MISS": 10,
    "lookup RETRY": 5,
    "load": 5,
    "store": 10,
    "store refused": 0.3,
    "victim": 5,
    "cascade": 10,
    "promotion": 5,
}
MOST_AVOIDED = 0.1 if HAS_PROVISIONAL_RANKS else 0.25


def run(seeds, *, policy="lru", one_at_a_time=False):
    """Run traces; return what was compared and what was stepped around."""
    compared, avoided = Counter(), Counter()
    for seed in seeds:
        num_slots = 5 + seed % 6
        twins = Twins(
            num_slots,
            wants_all=TIERS[seed % 3],
            policy=policy,
            ours=make_policy(policy, num_slots),
        )
        try:
            Trace(twins, seed, one_at_a_time=one_at_a_time).run()
        except DifferenceError as err:
            raise DifferenceError(f"seed {seed}: {err}") from None
        compared += twins.compared
        avoided += twins.avoided
    return compared, avoided


@pytest.mark.timeout(900)
@pytest.mark.parametrize("one_at_a_time", [False, True])
@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_same_calls_same_answers(policy, one_at_a_time):
    compared, avoided = run(
        range(NUM_SEEDS), policy=policy, one_at_a_time=one_at_a_time
    )
    for what, per_trace in AT_LEAST.items():
        assert compared[what] >= per_trace * NUM_SEEDS, (what, compared)
    assert avoided.total() <= MOST_AVOIDED * compared.total(), (avoided, compared)


def _forget_order(monkeypatch):
    monkeypatch.setattr(LruPolicy, "finish", lambda self, ctx: None)


def _ignore_ghosts(monkeypatch):
    monkeypatch.setattr(ArcPolicy, "observe", lambda self, key, ctx: None)


def _count_a_pending_block_as_used(monkeypatch):
    access = LruPolicy.access
    monkeypatch.setattr(
        LruPolicy,
        "access",
        lambda self, key, ctx, *, is_ready=True: access(self, key, ctx),
    )


def _keep_the_pins_of_a_failed_cascade(monkeypatch):
    apply = Cascades.apply
    monkeypatch.setattr(
        Cascades,
        "apply",
        lambda self, job, result: apply(self, job, result) if result.success else None,
    )


def _keep_all_of_a_partial_promotion(monkeypatch):
    apply = Promotions.apply

    def changed(self, job, result):
        if result.successful_keys:
            result = JobResult(result.job_id, True)
        apply(self, job, result)

    monkeypatch.setattr(Promotions, "apply", changed)


def _keep_a_failed_store(monkeypatch):
    complete = GpuStores.complete
    monkeypatch.setattr(
        GpuStores,
        "complete",
        lambda self, keys, ctx, *, success: complete(self, keys, ctx, success=True),
    )


def _drop_parked_keys(monkeypatch):
    monkeypatch.setattr(Cascades, "park", lambda self, request, block: None)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("plant", "policy"),
    [
        (_forget_order, "lru"),
        (_ignore_ghosts, "arc"),
        (_count_a_pending_block_as_used, "lru"),
        (_keep_the_pins_of_a_failed_cascade, "lru"),
        (_keep_all_of_a_partial_promotion, "arc"),
        (_keep_a_failed_store, "lru"),
        (_drop_parked_keys, "lru"),
    ],
)
def test_planted_difference_is_found(plant, policy, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(DifferenceError):
        run(range(max(NUM_SEEDS, 60)), policy=policy)
