"""The lives of requests whose ids come again, as their tiers hear of them.

Covers: announcement and last word, parked keys, open stores, what an asking tier
got or was told to be missing (INV-22, 25 to 30).
Does not cover: room and eviction: the primary is large (``test_manager_machine``).
"""

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shmoffload.core.interfaces import SecondaryTierManager
from shmoffload.core.manager import TieringOffloadingManager
from shmoffload.core.types import (
    JobResult,
    LookupResult,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    make_offload_key,
)

IDS = ["a", "b", "c"]
KEYS = [make_offload_key(b"key-%d" % i) for i in range(5)]
ids = st.sampled_from(IDS)
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=3)


class Listener(SecondaryTierManager):
    """Accepts every job; a life of a request is a list of words."""

    def __init__(self, name, policy):
        super().__init__(name)
        self.policy, self.lives, self.open = policy, {}, []
        self.faults = []  # raised by the machine: the manager survives what raises

    def _promise(self, is_kept, text):
        if not is_kept:
            self.faults.append(text)

    def on_new_request(self, ctx):
        lives = self.lives.setdefault(ctx.req_id, [])
        self._promise(
            not lives or lives[-1][-1] == ("finished",), "INV-26: not over yet"
        )
        lives.append([("new",)])
        return RequestOffloadingContext(self.policy)

    def _say(self, ctx, *word):
        lives = self.lives.get(ctx.req_id)
        self._promise(lives, "INV-26: never announced")
        self._promise(lives[-1][-1] != ("finished",), "INV-26: a word after the last")
        lives[-1].append(word)

    def lookup(self, key, ctx):
        return LookupResult.MISS

    def submit_store(self, job):
        self._say(job.req_context, "store", *job.keys)
        self.open.append(job)

    def submit_load(self, job):
        self.faults.append("INV-19: a load, and nobody has anything")

    def on_request_incomplete(self, ctx, keys):
        self._say(ctx, "incomplete", *keys)

    def on_request_finished(self, ctx):
        self._say(ctx, "finished")

    def get_finished_jobs(self):
        done, self.open = self.open, []
        return [JobResult(job.job_id, success=True) for job in done]


class RequestsMachine(RuleBasedStateMachine):
    """Three ids, two tiers; stores may end long after their request."""

    manager = None

    @initialize(first_asks=st.booleans())
    def start(self, first_asks):
        levels = OffloadPolicy.REQUEST_LEVEL, OffloadPolicy.BLOCK_LEVEL
        self.tiers = [
            Listener("t0", levels[0] if first_asks else levels[1]),
            Listener("t1", levels[1]),
        ]
        self.manager = TieringOffloadingManager(64, self.tiers, block_bytes=64)
        self.live = {}  # id -> its life: context, offered, what must have come
        self.lives = []
        self.stores = []  # (life, keys)
        self.stale = []  # of before a reset
        self.late = 0

    @rule(req_id=ids)
    def announce(self, req_id):
        is_again = req_id in self.live
        is_early = any(life["id"] == req_id for life, _ in self.stores)
        ctx = self.live[req_id]["ctx"] if is_again else ReqContext(req_id)
        policy = self.manager.on_new_request(ctx).policy
        assert policy is self.tiers[0].policy, "INV-25"
        if not is_again:
            for life in self.lives:
                if life["id"] == req_id:  # if it is not over yet, it is now
                    life["excused"] |= life["offered"]
            life = {"id": req_id, "ctx": ctx, "offered": set(), "excused": set()}
            self.live[req_id] = life
            self.lives.append(life)
        if is_again:
            self.late += 1
        assert is_early or self.manager.counters.late_calls >= self.late, "INV-30"

    @rule(req_id=ids)
    def finish(self, req_id):
        life = self.live.pop(req_id, None)
        late = self.manager.counters.late_calls
        self.manager.on_request_finished(life["ctx"] if life else ReqContext(req_id))
        if life is None:
            assert self.manager.counters.late_calls == late + 1, "INV-30"

    @rule(req_id=ids, keys=some_keys)
    def offer(self, req_id, keys):
        life = self.live.get(req_id)
        late = self.manager.counters.late_offers
        granted = self.manager.prepare_store(
            keys, life["ctx"] if life else ReqContext(req_id)
        )
        if life is None:
            assert granted is None, "INV-30: an offer of nobody"
            assert self.manager.counters.late_offers == late + 1, "INV-30"
            return
        life["offered"].update(keys)
        if granted.keys_to_store:
            self.stores.append((life, list(granted.keys_to_store)))

    @precondition(lambda self: self.stores)
    @rule(i=st.integers(0, 9), ok=st.booleans())
    def complete(self, i, ok):
        life, keys = self.stores.pop(i % len(self.stores))
        # A copy engine works in order: what a reset has left ends first.
        while any(stale["id"] == life["id"] for stale, _ in self.stale):
            stale, old = self.stale.pop(0)
            self.manager.complete_store(old, stale["ctx"])
        if not ok:  # nobody who waits for it gets it
            for waiting in self.lives:
                waiting["excused"] |= waiting["offered"] & set(keys)
        self.manager.complete_store(keys, life["ctx"], ok)

    @rule()
    def step(self):
        self.manager.advance(0.0)
        self.manager.on_schedule_end(ScheduleEndContext())

    @rule()
    def reset(self):
        self.manager.reset_cache()
        self.stale += self.stores
        self.stores = []
        for life in self.lives:
            life["excused"] |= life["offered"]

    @invariant()
    def tiers_know_who_lives(self):
        if self.manager is None:
            return
        for tier in self.tiers:
            assert not tier.faults, tier.faults[0]
        self.manager.check_integrity()
        asking = self.tiers[0].policy is OffloadPolicy.REQUEST_LEVEL
        remembered = self.manager._request_level_tiers
        tracked = {*self.manager._requests, *self.manager._closing}
        assert set(remembered) == (tracked if asking else set()), "INV-25"
        assert all(tiers == [self.tiers[0]] for tiers in remembered.values()), "INV-25"
        parked = {
            request.ctx.req_id
            for block in self.manager.table.blocks.values()
            for request in block.waiters or ()
        }
        open_ids = {life["id"] for life, _ in self.stores} | parked
        assert set(self.manager._requests) == set(self.live), "INV-27"
        assert set(self.manager._closing) <= open_ids, "INV-27: kept for nothing"
        for tier in self.tiers:
            for req_id, lives in tier.lives.items():
                is_over = lives[-1][-1] == ("finished",)
                assert is_over is (req_id not in tracked), "INV-26: the last word"

    def teardown(self):
        if self.manager is None:
            return
        for req_id in list(self.live):
            self.finish(req_id)
        while self.stale:
            life, keys = self.stale.pop(0)
            self.manager.complete_store(keys, life["ctx"])
        while self.stores:
            life, keys = self.stores.pop()
            self.manager.complete_store(keys, life["ctx"])
        self.step()
        assert not self.manager._closing, "INV-29"
        assert not self.manager.has_pending_work(), "INV-29"
        for tier in self.tiers:
            assert not tier.faults, tier.faults[0]
            for req_id, lives in tier.lives.items():
                models = [model for model in self.lives if model["id"] == req_id]
                assert len(lives) == len(models), "INV-26: one life each"
                for life, model in zip(lives, models, strict=True):
                    self._check_life(tier, life, model)

    @staticmethod
    def _check_life(tier, life, model):
        words = [word for word, *_ in life]
        assert words.count("finished") == words.count("new") == 1, "INV-26"
        assert words.count("incomplete") <= 1, "INV-22: told twice"
        if tier.policy is OffloadPolicy.REQUEST_LEVEL:
            stored = [key for word, *keys in life if word == "store" for key in keys]
            missing = {k for word, *keys in life if word == "incomplete" for k in keys}
            assert len(set(stored)) == len(stored), "INV-22: a key came twice"
            came_or_not = set(stored) | missing
            assert came_or_not == model["offered"], "INV-22: neither came nor missing"
            assert missing <= model["excused"], "INV-22: missing for no reason"
            assert not set(stored) & missing, "INV-22: came, and said to be missing"
        else:
            assert "incomplete" not in words, "INV-22: it did not ask"


def test_requests_machine():
    run_state_machine_as_test(RequestsMachine)
