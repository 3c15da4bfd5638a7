"""A random trace in the order of a scheduler's step.

Covers: requests over a small trie of prefixes that wait, load, store bit by bit,
finish; tiers that answer late, in part, or with failure; resets.
Does not cover: comparing (``twins``).
Who calls it: the differential tests.
"""

import random

NUM_STEPS = 60
MAX_ACTIVE = 4
BLOCK_TOKENS = 16


class _Life:
    """One request's way through the trace."""

    def __init__(self, asker, chain):
        self.asker = asker
        self.chain = chain
        self.is_admitted = False
        self.next_idx = 0
        self.stores = []  # granted numbers whose copy runs
        self.loads = []

    @property
    def is_idle(self):
        return not self.stores and not self.loads


class Trace:
    """Drives ``Twins`` by one seed; ``one_at_a_time``: requests do not overlap."""

    def __init__(self, twins, seed, *, one_at_a_time=False, with_positions=True):
        self.twins = twins
        self.random = random.Random(seed)
        self.max_active = 1 if one_at_a_time else MAX_ACTIVE
        self.with_positions = with_positions
        self.lives = []
        self.leaving = []  # finished, copies still run
        self.num_requests = 0
        self.num_keys = twins.num_slots * 3

    def run(self):
        for tier in range(len(self.twins.our_tiers)):
            for num in range(self.num_keys):
                if self.random.random() < 0.3:
                    self.twins.know(tier, num, "HIT")
        for _ in range(NUM_STEPS):
            self.step()
        self.settle()
        self.drain()

    def step(self):
        chance = self.random.random
        while self.twins.jobs and chance() < 0.5:
            self.answer_one()
        if chance() < 0.2:
            tier = self.random.randrange(len(self.twins.our_tiers))
            verdict = self.random.choice(("RETRY", "HIT", "MISS"))
            self.twins.know(tier, self.random.randrange(self.num_keys), verdict)
        if len(self.lives) < self.max_active and chance() < 0.6:
            self.lives.append(self.new_life())
        for life in list(self.lives):
            if not life.is_admitted:
                self.scan(life)
        ends_early = chance() < 0.5  # vLLM 0.32; 0.33 ends a step last
        if ends_early:
            self.twins.end_step()
        for life in [x for x in self.lives if x.is_admitted]:
            self.run_on(life)
        if not ends_early:
            self.twins.end_step()
        if chance() < 0.03:
            self.settle()
            self.twins.reset()

    def new_life(self):
        """A prefix of one of a few chains that branch: 0 1 2 | 3 4 5 ..., 0 1 6 7."""
        self.num_requests += 1
        start = self.random.choice((0, 0, self.num_keys // 2))
        length = self.random.randint(1, max(2, self.twins.num_slots - 1))
        chain = list(range(start, min(start + length, self.num_keys)))
        fork = self.random.randint(0, len(chain))
        if self.random.random() < 0.5:
            stride = self.num_keys // 3
            chain = chain[:fork] + [(n + stride) % self.num_keys for n in chain[fork:]]
        chain = list(dict.fromkeys(chain))
        ends = {num: (i + 1) * BLOCK_TOKENS for i, num in enumerate(chain)}
        positions = ends if self.with_positions else {}
        return _Life(self.twins.announce(f"r{self.num_requests}", positions), chain)

    def scan(self, life):
        twins, asker = self.twins, life.asker
        hits, waits = [], False
        for num in life.chain:
            answer = twins.lookup(asker, num)
            if answer in {None, "MISS"}:
                break
            if answer == "HIT":
                hits.append(num)
            else:
                waits = True
        if waits:
            if self.random.random() < 0.05:  # aborted while it waits
                self.lives.remove(life)
                twins.finish(asker)
            return
        life.is_admitted = True
        if hits:
            twins.load(asker, hits)
            life.loads.append(hits)
        wants_all = any(tier.wants_all for tier in twins.our_tiers)
        life.next_idx = 0 if wants_all else len(hits)

    def run_on(self, life):
        twins, chance = self.twins, self.random.random
        offer = life.chain[life.next_idx : life.next_idx + self.random.randint(1, 4)]
        if offer and chance() < 0.8:
            granted = twins.store(life.asker, offer)
            if granted is not None and granted is not False:
                life.next_idx += len(offer)
                if granted:
                    life.stores.append(granted)
        if life.loads and chance() < 0.5:
            twins.complete_load(life.asker, life.loads.pop(0))
        if life.stores and chance() < 0.5:
            self.complete_one(life)
        if life.next_idx >= len(life.chain) or chance() < 0.1:
            self.lives.remove(life)
            twins.finish(life.asker)
            self.leaving.append(life)
        for gone in list(self.leaving):
            if gone.stores and chance() < 0.5:
                self.complete_one(gone)
            if gone.loads and chance() < 0.5:
                twins.complete_load(gone.asker, gone.loads.pop(0))
            if gone.is_idle:
                self.leaving.remove(gone)

    def complete_one(self, life):
        granted = list(life.stores.pop(self.random.randrange(len(life.stores))))
        self.random.shuffle(granted)  # workers report keys in any order
        ok = self.random.random() < 0.9
        self.twins.complete_store(life.asker, granted, ok=ok)

    def answer_one(self):
        idx = self.random.randrange(len(self.twins.jobs))
        _, (is_promotion, _, nums), *_ = self.twins.jobs[idx]
        fate = self.random.random()
        if fate < 0.75:
            self.twins.answer(idx, ok=True)
        elif fate < 0.9 and is_promotion and len(nums) > 1:
            arrived = self.random.sample(nums, self.random.randint(1, len(nums) - 1))
            self.twins.answer(idx, ok=False, arrived=arrived)
        else:
            self.twins.answer(idx, ok=False)

    def settle(self):
        """Answer and complete everything; active requests stay active."""
        for life in self.lives + self.leaving:
            while life.loads:
                self.twins.complete_load(life.asker, life.loads.pop(0))
            while life.stores:
                self.complete_one(life)
        self.leaving.clear()
        self.twins.end_step()
        while self.twins.jobs:
            self.twins.answer(0, ok=True)
        self.twins.end_step()

    def drain(self):
        """Finish everybody and push every block out, to see the whole order."""
        for life in self.lives:
            self.twins.finish(life.asker)
        self.settle()
        last = self.twins.announce("last", {})
        for num in range(self.num_keys, self.num_keys + self.twins.num_slots):
            assert self.twins.store(last, [num]) == [num]
