"""What the manager's state machine knows of the world around a manager.

Covers: memory, open GPU copies, open jobs, scans, time; the calls that several
rules share, with what each must answer.
Does not cover: the rules (``test_manager_machine``), equations between calls
(``audit``).
Who calls it: ``test_manager_machine``.

GPU stores and promotions write their slot when they *end*. Every assertion names
the invariant that is broken.
"""

from audit import READY
from sim_tier import GARBAGE, SimTier

from shmoffload.core.manager import TieringOffloadingManager
from shmoffload.core.types import (
    LookupResult,
    OffloadPolicy,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)

NUM_KEYS, NUM_SLOTS, HOLD_S, DEADLINE_S = 12, 5, 5.0, 30.0
KEYS = [make_offload_key(b"key-%02d" % i) for i in range(NUM_KEYS)]
HIT, MISS = LookupResult.HIT, LookupResult.MISS
PENDING, RETRY = LookupResult.HIT_PENDING, LookupResult.RETRY


class ManagerWorld:
    """One manager, two tiers, and the truth about them.

    Attributes:
        requests: name -> context of live ones, in order of announcement.
        stores: open GPU stores of now: (context, {key: slot}).
        stale_stores: open GPU stores of before a reset.
        loads: open GPU loads: (context, {key: slot}, keys, resets before it).
        lost_jobs: ids of jobs that lost their meaning: reset, or overdue loads.
        told: keys answered HIT in this step; counted: HIT or PENDING.
        scans: request -> what it counts on; see ``look``.
        landing: keys whose promotion began without anybody who waits for it.
        unclear: keys of which one request was told RETRY: for want of room, or
            because a tier does not know yet; so somebody waits for them, or not.
    """

    def __init__(self, request_level, seed, *, speed=None):
        self.memory = [GARBAGE] * NUM_SLOTS
        asks = OffloadPolicy.REQUEST_LEVEL if request_level else None
        ids = []
        self.tiers = [
            SimTier("t0", self.memory, asks or OffloadPolicy.BLOCK_LEVEL, ids),
            SimTier("t1", self.memory, OffloadPolicy.BLOCK_LEVEL, ids),
        ]
        self.tiers[1].held.update((key, key) for key in seed)
        self.manager = TieringOffloadingManager(
            NUM_SLOTS,
            self.tiers,
            block_bytes=64,
            scan_hold_s=HOLD_S,
            job_deadline_s=DEADLINE_S,
            speed=speed,
            events=True,
        )
        self.now_s, self.num_requests, self.num_resets = 0.0, 0, 0
        self.requests, self.scans = {}, {}
        self.stores, self.stale_stores, self.loads = [], [], []
        self.lost_jobs = set()
        self.told, self.counted, self.mirror = set(), set(), set()
        self.retried, self.landing, self.unclear = set(), set(), set()
        self.step_idx = self.settled_step = 0

    # What is open -----------------------------------------------------------------

    def ready(self):
        blocks = self.manager.table.blocks
        return {key for key, block in blocks.items() if block.state == READY}

    def slot(self, key):
        return self.manager.table.blocks[key].slot

    def open_jobs(self):
        """Jobs that the manager cannot have an answer to, by id."""
        return {
            job_id: job
            for tier in self.tiers
            for job_id, job in (tier.jobs | tier.answered).items()
        }

    def live_loads(self):
        return [
            job
            for job_id, job in self.open_jobs().items()
            if job.is_promotion and job_id not in self.lost_jobs
        ]

    def open_reads(self):
        """Keys under each read of a resident block: GPU loads, cascades."""
        for _, _, keys, num_resets in self.loads:
            if num_resets == self.num_resets:
                yield keys
        for job_id, job in self.open_jobs().items():
            if not job.is_promotion and job_id not in self.lost_jobs:
                yield job.keys

    def pinned(self):
        return {key for keys in self.open_reads() for key in keys}

    def quarantined_slots(self):
        """Slots under work that has lost its meaning."""
        held = {slot for _, slots in self.stale_stores for slot in slots.values()}
        for _, slots, _, num_resets in self.loads:
            if num_resets != self.num_resets:
                held.update(slots.values())
        for job_id, job in self.open_jobs().items():
            if job_id in self.lost_jobs:
                held.update(job.slots.tolist())
        return held

    def is_busy(self):
        return bool(self.open_jobs() or self.stores or self.loads)

    def replay_events(self):
        for event in self.manager.take_events():
            keys = set(event.keys)
            assert len(keys) == len(event.keys), "INV-12: a key twice in an event"
            if not event.is_removed:
                assert not self.mirror & keys, "INV-12: stored twice"
                self.mirror |= keys
            elif not event.metadata_only:
                assert keys <= self.mirror, "INV-12: removed, but never stored"
                self.mirror -= keys

    # Requests ---------------------------------------------------------------------

    def new(self, positions, *, priority=0):
        self.num_requests += 1
        where = dict(zip(KEYS, positions, strict=True))
        words = {"shmoffload": {"priority": priority}} if priority else None
        ctx = ReqContext(f"r{self.num_requests}", words, key_positions=where)
        policy = self.manager.on_new_request(ctx).policy
        assert policy is self.tiers[0].policy, "INV-25: the answer to the announcement"
        self.requests[ctx.req_id] = ctx
        self._note_overdue_tiers()

    def finish(self, ctx):
        del self.requests[ctx.req_id]
        self.scans.pop(ctx.req_id, None)
        self.manager.on_request_finished(ctx)

    # Lookups and loads ------------------------------------------------------------

    def _guarded(self, req_id):
        """What a promotion for this request may not evict."""
        guarded = set(self.told)
        for name in self.requests:
            scan = self.scans.get(name)
            if scan is not None and scan["waits"]:
                guarded |= scan["now"] | scan["before"]
            if name == req_id:
                break  # younger ones may have to yield
        return guarded

    def _scan_of(self, req_id):
        scan = self.scans.get(req_id)
        if scan is None or scan["step"] != self.step_idx:
            scan = self.scans[req_id] = {
                "now": set(),
                "before": scan["now"] if scan else set(),
                "waits": bool(scan and scan["waits"]),
                "deferred": False,
                "step": self.step_idx,
                "time_s": self.now_s,
            }
        return scan

    def look(self, key, ctx):
        """One lookup, checked against what undecided scans count on."""
        before, pinned = self.ready(), self.pinned()
        was_there = key in self.manager.table.blocks
        guarded, scan = self._guarded(ctx.req_id), self._scan_of(ctx.req_id)
        num_loads = [len(tier.loads) for tier in self.tiers]
        answer = self.manager.lookup(key, ctx)
        evicted = before - self.ready()
        assert num_loads == [len(t.loads) for t in self.tiers], "INV-24: in a lookup"
        assert len(evicted) <= 1, "INV-7: more victims than slots wanted"
        assert not evicted & guarded, "INV-21: a scan counted on what was evicted"
        assert not evicted & pinned, "INV-6: a pinned block was evicted"
        if was_there:
            expected = MISS if key in self.landing else PENDING
            if key in before:
                expected = HIT
            is_unclear = answer is MISS and key in self.unclear
            assert answer is expected or is_unclear, (
                "INV-19: what is here is HIT or PENDING"
            )
        if answer is HIT:
            assert self.memory[self.slot(key)] == key, "INV-37: HIT on other bytes"
            self.told.add(key)
        if answer in (HIT, PENDING):
            scan["now"].add(key)
            self.counted.add(key)
        if answer in (PENDING, RETRY):
            scan["waits"] = scan["deferred"] = True
        if answer is RETRY:
            self.retried.add(key)
        return answer

    def load(self, ctx, keys):
        if not keys:
            return
        slots = self.manager.prepare_load(keys, ctx).tolist()
        assert slots == [self.slot(key) for key in keys], "INV-11: slots by key"
        by_key = dict(zip(keys, slots, strict=True))
        self.loads.append((ctx, by_key, keys, self.num_resets))
        if ctx.req_id in self.scans:
            self.scans[ctx.req_id].update(now=set(), before=set(), waits=False)

    def complete_load(self, i):
        # The copy engine works in order, so one request's loads end in order.
        owner = self.loads[i % len(self.loads)][0]
        first = next(load for load in self.loads if load[0] is owner)
        self.loads.remove(first)
        ctx, slots, keys, _ = first
        # Also across a reset: the copy was still running.
        for key, slot in slots.items():
            assert self.memory[slot] == key, "INV-37: a load read other bytes"
        self.manager.complete_load(keys, ctx)

    # Stores -----------------------------------------------------------------------

    def picture(self):
        """Everything that a refusal or a late call must leave as it is."""
        blocks = self.manager.table.blocks.items()
        order = list(self.manager._policy.victims(lambda _: True))
        jobs = [len(tier.stores) + len(tier.loads) for tier in self.tiers]
        return [(k, b.state, b.slot, b.pins) for k, b in blocks], order, jobs

    def offer(self, ctx, keys):
        """One prepare_store, checked: who goes, who comes, who hears of it."""
        table, before = self.manager.table, set(self.manager.table.blocks)
        can_go = self.ready() - self.pinned() - self.counted - set(keys)
        free, picture = table.num_free, self.picture()
        num_stores = len(self.tiers[1].stores)
        for tier in self.tiers:
            tier.offered.setdefault(ctx.req_id, set()).update(keys)
        granted = self.manager.prepare_store(keys, ctx)
        absent = [key for key in dict.fromkeys(keys) if key not in before]
        num_wanted = max(0, len(absent) - free)
        if granted is None:
            assert num_wanted > len(can_go), "INV-8: refused although it fits"
            assert self.picture() == picture, "INV-8, INV-18: a refusal changed things"
            return
        assert granted.keys_to_store == absent, "INV-9, INV-15: what is to be stored"
        assert set(granted.evicted_keys) <= can_go, "INV-6, INV-7: who was evicted"
        assert len(granted.evicted_keys) == num_wanted, "INV-7: how many were evicted"
        assert num_stores == len(self.tiers[1].stores), "INV-18: it did not ask"
        slots = dict(zip(absent, granted.slots.tolist(), strict=True))
        for key, slot in slots.items():
            assert self.slot(key) == slot, "INV-9: slots by key"
        if absent:
            self.stores.append((ctx, slots))

    def complete_store(self, i, ok):
        ctx, slots = self.stores.pop(i % len(self.stores))
        while any(stale[0] is ctx for stale in self.stale_stores):
            self.complete_stale_store()
        for key, slot in slots.items():
            self.memory[slot] = key if ok else GARBAGE
        num_stores = [len(tier.stores) for tier in self.tiers]
        had = [set(tier.got.get(ctx.req_id, ())) for tier in self.tiers]
        self.manager.complete_store(list(slots), ctx, ok)
        ready = self.ready()
        assert all((key in ready) is ok for key in slots), "INV-10: after the store"
        for t, tier in enumerate(self.tiers):
            mine = [j for j in tier.stores[num_stores[t] :] if j.req_context is ctx]
            new, due = [set(job.keys) for job in mine], set(slots) - had[t]
            if not ok:
                assert not new, "INV-17: a job for a store that failed"
            elif self._takes_all(tier, ctx):
                one = [due] if due else []
                assert new == one, "INV-17: one job with exactly its keys"
            else:
                sent = {key for keys in new for key in keys}
                assert sent <= due, "INV-17: a job for other keys"

    def _takes_all(self, tier, ctx):
        """Nothing is lost on the way to the tier, or was: no hole is before it."""
        return not (tier.broken or ctx.req_id in tier.no_credit_for)

    def _note_overdue_tiers(self):
        """A tier that missed a deadline gets nothing for a while."""
        for tier in self.tiers:
            jobs = (tier.jobs | tier.answered).values()
            if any(self.now_s - job.submitted_s >= DEADLINE_S for job in jobs):
                tier.no_credit_for |= tier.live

    def complete_stale_store(self):
        """A copy from before a reset still writes: nobody may have the slot."""
        ctx, slots = self.stale_stores.pop(0)
        for slot in slots.values():
            self.memory[slot] = GARBAGE
        self.manager.complete_store(list(slots), ctx)

    # Time -------------------------------------------------------------------------

    def advance(self, seconds):
        self.now_s += seconds
        self.manager.advance(self.now_s)
        pending = set(self.manager.table.blocks) - self.ready()
        self.landing &= pending
        self.unclear &= pending
        for job_id, job in self.open_jobs().items():
            if job.is_promotion and self.now_s - job.submitted_s >= DEADLINE_S:
                self.lost_jobs.add(job_id)
        self._note_overdue_tiers()

    def step(self):
        num_loads = [len(tier.loads) for tier in self.tiers]
        before = set(self.manager.table.blocks)
        num_evictions = self.manager.counters.evictions
        self.manager.on_schedule_end(ScheduleEndContext())
        begun = set(self.manager.table.blocks) - before
        self.landing |= begun - self.retried
        self.unclear |= begun & self.retried
        if not self.retried:
            evicted = self.manager.counters.evictions - num_evictions
            assert not evicted, "INV-21: evicted for what nobody waits for"
        self.retried.clear()
        for num, tier in zip(num_loads, self.tiers, strict=True):
            owners = [job.req_context.req_id for job in tier.loads[num:]]
            assert len(set(owners)) == len(owners), "INV-24: two load jobs of one"
        self.step_idx += 1
        self.told.clear()
        self.counted.clear()
        for name, scan in list(self.scans.items()):
            scan["before"] = set()
            scanned = scan["step"] == self.step_idx - 1
            if (scanned and not scan["deferred"]) or (
                self.now_s - scan["time_s"] > HOLD_S
            ):
                del self.scans[name]

    def reset(self):
        self.manager.reset_cache()
        self.num_resets += 1
        self.lost_jobs.update(self.open_jobs())
        assert not self.manager.table.blocks, "INV-10: a block outlived a reset"
        self.stale_stores += self.stores
        self.stores = []
        for words in (self.told, self.counted, self.scans, self.mirror):
            words.clear()
        for keys in (self.landing, self.unclear):
            keys.clear()

    def everything_ends(self):
        """Answer all that is open; nothing is in the way."""
        self.settled_step = self.step_idx + 3
        for tier in self.tiers:
            tier.retry = tier.broken = False
            tier.take_credit(has_credit=True)
        while self.loads:
            self.complete_load(0)
        while self.stale_stores:
            self.complete_stale_store()
        while self.stores:
            self.complete_store(0, ok=True)
        for _ in range(3):
            for tier in self.tiers:
                for job_id in list(tier.jobs):
                    tier.answer(job_id, 99)
            self.advance(0.0)
            self.step()

    def settle(self):
        """INV-29, and the quiescent equation if nobody is left."""
        self.everything_ends()
        for tier in self.tiers:
            assert not tier.faults, tier.faults[0]
        manager, table = self.manager, self.manager.table
        assert not manager.has_pending_work(), "INV-29: work left"
        assert not manager._desk.open, "INV-29: jobs left"
        assert table.num_pending == table.num_quarantined == 0, "INV-29: slots left"
        assert not any(b.pins for b in table.blocks.values()), "INV-29: pins left"
        assert table.num_free + len(table.blocks) == NUM_SLOTS, "INV-29: free + idle"
        assert set(manager._requests) == set(self.requests), "INV-29: requests left"
        assert not manager._closing, "INV-29: requests left"
