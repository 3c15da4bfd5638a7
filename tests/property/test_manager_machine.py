"""The manager under every order of calls and answers.

Covers: bytes (what a HIT promises), order of words per tier, reservations, atomic
refusal, waiting that ends, events, and that nothing is left when all is answered.
Does not cover: the order of eviction (``test_eviction_order``), workers and their
epochs (``test_worker_machine``).

The model is ``manager_world``, the equations are in ``audit``.
"""

import pytest
from audit import audit
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from manager_world import DEADLINE_S, HIT, HOLD_S, KEYS, MISS, NUM_KEYS, ManagerWorld

from shmoffload.core.types import ReqContext, make_offload_key

one_key = st.sampled_from(KEYS)
some_keys = st.lists(one_key, min_size=1, max_size=7)
prefixes = st.lists(one_key, min_size=1, max_size=8, unique=True)
priorities = st.sampled_from([0, 0, 0, 1, 3])  # they shape the order, no more
pick = st.integers(0, 9)


class ManagerMachine(RuleBasedStateMachine):
    """One manager, two tiers, up to four live requests."""

    world = None

    @initialize(request_level=st.booleans(), seed=st.sets(one_key, min_size=6))
    def start(self, request_level, seed):
        self.world = ManagerWorld(request_level, seed)
        for positions in (range(NUM_KEYS), range(NUM_KEYS, 0, -1)):
            self.world.new(positions)

    def _may_settle(self):
        """Not all the time, or nothing is ever open for long."""
        world = self.world
        return world.step_idx > world.settled_step + 4 and world.requests

    def _has_requests(self):
        return self.world.requests

    def _request(self, i):
        names = list(self.world.requests)
        return self.world.requests[names[i % len(names)]]

    # Requests -------------------------------------------------------------------

    @precondition(lambda self: len(self.world.requests) < 4)
    @rule(positions=st.permutations(range(NUM_KEYS)), priority=priorities)
    def new(self, positions, priority):
        self.world.new(positions, priority=priority)

    @precondition(_has_requests)
    @rule(i=pick)
    def finish(self, i):
        self.world.finish(self._request(i))

    @rule(i=pick, key=one_key)
    def late_calls(self, i, key):
        """INV-30, INV-14: about strangers and what is not open; only counted."""
        world, manager = self.world, self.world.manager
        counters, stranger = manager.counters, ReqContext(f"stranger-{i}")
        gone = make_offload_key(b"never-seen")
        picture, late = world.picture(), counters.late_calls
        manager.on_request_finished(stranger)
        manager.complete_store([key], stranger)
        manager.complete_load([key], stranger)
        manager.touch([key], stranger)
        assert manager.lookup(key, stranger) is MISS, "INV-30: a stranger's lookup"
        assert manager.prepare_store([key], stranger) is None, "INV-30"
        assert counters.late_calls == late + 5, "INV-30: late calls are counted"
        if world.requests:
            told = [*sorted(world.told), gone]
            with pytest.raises(KeyError):
                manager.prepare_load(told, self._request(i))
        assert world.picture() == picture, "INV-14, INV-30: a late call changed things"

    # Lookups and loads ------------------------------------------------------------

    @precondition(_has_requests)
    @rule(i=pick, prefix=prefixes, ends_step=st.booleans())
    def scan_prefix(self, i, prefix, ends_step):
        for key in prefix:
            if self.world.look(key, self._request(i)) is MISS:
                break
        if ends_step:
            self.world.step()

    @precondition(_has_requests)
    @rule(i=pick, some=some_keys)
    def load(self, i, some):
        told = [key for key in some if key in self.world.told]
        self.world.load(self._request(i), told)

    @precondition(lambda self: self.world.loads)
    @rule(i=pick)
    def complete_load(self, i):
        self.world.complete_load(i)

    # Stores -----------------------------------------------------------------------

    @precondition(_has_requests)
    @rule(i=pick, keys=some_keys)
    def prepare_store(self, i, keys):
        self.world.offer(self._request(i), keys)

    @precondition(lambda self: self.world.stores)
    @rule(i=pick, ok=st.booleans())
    def complete_store(self, i, ok):
        self.world.complete_store(i, ok)

    @precondition(lambda self: self.world.stale_stores)
    @rule()
    def complete_stale_store(self):
        self.world.complete_stale_store()

    # Tiers ------------------------------------------------------------------------

    @precondition(lambda self: any(tier.jobs for tier in self.world.tiers))
    @rule(
        i=pick,
        num_good=st.sampled_from([99, 99, 1, 0, 2]),
        is_collected=st.booleans(),
        is_twice=st.booleans(),
    )
    def answer(self, i, num_good, is_collected, is_twice):
        """In any order, in part, and perhaps twice (INV-33: that only counts)."""
        world = self.world
        open_jobs = [(tier, job_id) for tier in world.tiers for job_id in tier.jobs]
        tier, job_id = open_jobs[i % len(open_jobs)]
        job = tier.jobs[job_id]
        tier.answer(job_id, num_good)
        late = world.manager.counters.late_replies
        if is_twice:
            tier.done.append(tier.done[-1])
        if not is_collected:
            return
        is_live = job_id not in world.lost_jobs
        world.advance(0.0)
        if is_twice:
            assert world.manager.counters.late_replies > late, "INV-16, INV-33"
        if job.is_promotion and is_live:
            ready = world.ready()
            arrived = [key for key in job.keys if key in ready]
            assert arrived == list(job.keys)[:num_good], "INV-23: exactly what came"

    @rule(t=st.integers(0, 1))
    def die(self, t):
        """INV-36: what was open there has failed, elsewhere nothing has."""
        self.world.tiers[t].die()
        self.world.advance(0.0)

    @rule(t=st.integers(0, 1), what=st.sampled_from(["retry", "credit", "broken"]))
    def toggle(self, t, what):
        tier = self.world.tiers[t]
        if what == "credit":
            tier.take_credit(not tier.credit)
        else:
            setattr(tier, what, not getattr(tier, what))

    @rule(seconds=st.sampled_from([0.0, 1.0, HOLD_S + 1, DEADLINE_S + 1]))
    def advance(self, seconds):
        self.world.advance(seconds)

    # Steps ------------------------------------------------------------------------

    @rule()
    def step(self):
        self.world.step()

    @precondition(lambda self: self.world.is_busy())
    @rule()
    def reset(self):
        self.world.reset()

    @precondition(_may_settle)
    @rule()
    def settle(self):
        self.world.settle()

    @precondition(_may_settle)
    @rule(data=st.data())
    def serve_everybody(self, data):
        """INV-20: whatever they wait for, all get an answer, without a timeout."""
        world = self.world
        world.everything_ends()
        waiting = {name: data.draw(prefixes) for name in world.requests}
        names = data.draw(st.permutations(sorted(waiting)))
        for _ in range(6 + 5 * len(waiting)):
            for name in [name for name in names if name in waiting]:
                ctx, answers = world.requests[name], []
                for key in waiting[name]:
                    answers.append(world.look(key, ctx))
                    if answers[-1] is MISS:
                        break
                hits = [a for a in answers if a is not MISS]
                if all(a is HIT for a in hits):
                    world.load(ctx, waiting[name][: len(hits)])
                    del waiting[name]
            world.step()
            for tier in world.tiers:
                for job_id in list(tier.jobs):
                    tier.answer(job_id, 99)
            world.advance(0.0)
            while world.loads:
                world.complete_load(0)
            if not waiting:
                return
        raise AssertionError(f"INV-20: they wait for each other: {waiting}")

    # Invariants -------------------------------------------------------------------

    @invariant()
    def equations_hold(self):
        if self.world is not None:
            audit(self.world)

    @invariant()
    def own_books_are_right(self):
        if self.world is not None:
            self.world.manager.check_integrity()

    def teardown(self):
        if self.world is not None:
            for ctx in list(self.world.requests.values()):
                self.world.finish(ctx)
            self.world.settle()
            for tier in self.world.tiers:
                assert not tier.live, "INV-26: never told of the end"


def test_manager_machine():
    # A run takes 15 ms: more of them than other machines get, for rare orders.
    profile = settings(
        max_examples=4 * settings.default.max_examples, stateful_step_count=40
    )
    run_state_machine_as_test(ManagerMachine, settings=profile)
