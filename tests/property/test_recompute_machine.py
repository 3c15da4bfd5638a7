"""The manager when computing may be quicker than a tier: who waits, what lands.

Covers: the rules of ``test_manager_machine`` with a tier that begins slow: a MISS
whose blocks land, lookups of what is landing, its failures, deadlines and resets.
Does not cover: when a tier counts as slow (``tests/unit/core/test_recompute``).
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from manager_world import MISS, NUM_KEYS, PENDING, ManagerWorld
from test_manager_machine import ManagerMachine, one_key, pick, prefixes

from shmoffload.core.tier_speed import MIN_SAMPLES, SpeedRule

RULE = SpeedRule(prefill_s_per_block=0.001)


class RecomputeMachine(ManagerMachine):
    """One manager; the tier that has blocks was slow so far."""

    @initialize(request_level=st.booleans(), seed=st.sets(one_key, min_size=6))
    def start(self, request_level, seed):
        self.world = ManagerWorld(request_level, seed, speed=RULE)
        for positions in (range(NUM_KEYS), range(NUM_KEYS, 0, -1)):
            self.world.new(positions)
        self._become(5.0)

    def _become(self, seconds):
        world = self.world
        loads = world.manager._desk.speed(1).loads
        loads.forget()
        for _ in range(MIN_SAMPLES):
            loads.note(1, seconds, seconds, now_s=world.now_s)

    @rule(seconds=st.sampled_from([5.0, 5.0, 0.0]))
    def become(self, seconds):
        self._become(seconds)

    @rule(i=pick, prefix=prefixes)
    def ask_twice(self, i, prefix):
        """In one step the same question has the same answer."""
        world = self.world
        if not world.requests:
            return
        first = [world.look(key, self._request(i)) for key in prefix]
        again = [world.look(key, self._request(i)) for key in prefix]
        for key, before, now in zip(prefix, first, again, strict=True):
            is_declined = before is MISS and key in world.tiers[1].held
            if is_declined and not world.tiers[0].held.get(key):
                assert now is not PENDING, f"INV-19: {key} was declined in this step"


def test_recompute_machine():
    profile = settings(
        max_examples=2 * settings.default.max_examples, stateful_step_count=40
    )
    run_state_machine_as_test(RecomputeMachine, settings=profile)
