"""The manager over mailboxes whose workers answer late, twice, in part, or die.

Covers: epochs, silence and death, what a worker may still touch, the order of
words on a channel, events of what tiers hold (INV-12, 22, 26, 32 to 37).
Does not cover: sockets and processes (``tests/crash``, ``tests/integration``).

A worker here is a list of what it has received and a disk that outlives it. It
moves bytes when it works, also when nobody listens any more.
"""

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

from shmoffload.core.mailbox import MailboxTier
from shmoffload.core.manager import TieringOffloadingManager
from shmoffload.core.types import (
    AnnounceRequest,
    FinishRequest,
    JobMetadata,
    JobReply,
    LookupResult,
    OffloadPolicy,
    ReqContext,
    Residency,
    ScheduleEndContext,
    TierDown,
    TierUp,
    make_offload_key,
)

NUM_KEYS, NUM_SLOTS, MAX_ON_DISK, DEADLINE_S, ENGINE = 8, 4, 5, 30.0, 7
KEYS = [make_offload_key(b"key-%02d" % i) for i in range(NUM_KEYS)]
HIT, MISS = LookupResult.HIT, LookupResult.MISS
READY = 2
GARBAGE = b"garbage"

pick = st.integers(0, 9)
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True)


class Worker:
    """One incarnation: what it was sent, what it has said and nobody has read."""

    def __init__(self, epoch, disk):
        self.epoch, self.disk = epoch, disk
        self.inbox, self.replies = [], []
        self.is_alive, self.is_proven = True, False
        self.is_heard = True  # its end of the channel is read
        self.announced, self.finished = set(), set()

    def receive(self, messages):
        for item in messages:
            if isinstance(item, AnnounceRequest):
                assert item.req_id not in self.announced, "INV-26: announced twice"
                self.announced.add(item.req_id)
                continue
            req_id = (
                item.req_context.req_id
                if isinstance(item, JobMetadata)
                else item.req_id
            )
            assert req_id in self.announced, "INV-26: a word before the first"
            assert req_id not in self.finished, "INV-26: a word after the last"
            if isinstance(item, FinishRequest):
                self.finished.add(req_id)
            elif isinstance(item, JobMetadata):
                self.inbox.append(item)


class WorkerMachine(RuleBasedStateMachine):
    """A manager, two mailboxes, and all the workers that they ever had."""

    manager = None

    @initialize(request_level=st.booleans(), seed=st.sets(st.sampled_from(KEYS)))
    def start(self, request_level, seed):
        policy = OffloadPolicy.REQUEST_LEVEL if request_level else None
        self.tiers = [
            MailboxTier(
                f"t{i}",
                policy=(policy if i == 0 else None) or OffloadPolicy.BLOCK_LEVEL,
                credit_bytes=6 * 64,
                block_bytes=64,
                engine_epoch=ENGINE,
                max_outbox=12,
                events=True,
            )
            for i in range(2)
        ]
        self.manager = TieringOffloadingManager(
            NUM_SLOTS,
            self.tiers,
            block_bytes=64,
            job_deadline_s=DEADLINE_S,
            events=True,
        )
        self.mirrors = {None: set(), 0: set(), 1: set()}
        self.memory = [GARBAGE] * NUM_SLOTS
        self.disks = [dict.fromkeys(seed), {}]
        self.workers = [[], []]  # every incarnation, newest last
        self.now_s, self.num_requests = 0.0, 0
        self.requests, self.stores = {}, []
        for t in range(2):
            self._restart(t)
        self._new()

    def _new(self):
        self.num_requests += 1
        ctx = ReqContext(
            f"r{self.num_requests}", key_positions={k: i for i, k in enumerate(KEYS)}
        )
        self.requests[ctx.req_id] = ctx
        self.manager.on_new_request(ctx)

    def _restart(self, t):
        worker = Worker(len(self.workers[t]) + 1, self.disks[t])
        self.workers[t].append(worker)
        self.tiers[t].feed(
            [Residency(worker.epoch, added=list(worker.disk)), TierUp(worker.epoch)]
        )

    def _request(self, i):
        return list(self.requests.values())[i % len(self.requests)]

    def _slots(self):
        return {b.slot: b for b in self.manager.table.blocks.values()}

    def _free(self):
        table = self.manager.table
        return {*range(table._next_unused, NUM_SLOTS), *table._returned}

    def _picture(self):
        blocks = self.manager.table.blocks.items()
        return (
            [(key, b.state, b.slot, b.pins) for key, b in blocks],
            self._free(),
            [sorted(tier._resident) for tier in self.tiers],
            sorted(self.manager._desk.open),
        )

    # The scheduler's side ---------------------------------------------------------

    @precondition(lambda self: len(self.requests) < 3)
    @rule()
    def new(self):
        self._new()

    @precondition(lambda self: self.requests)
    @rule(i=pick)
    def finish(self, i):
        ctx = self._request(i)
        del self.requests[ctx.req_id]
        self.manager.on_request_finished(ctx)

    @precondition(lambda self: self.requests)
    @rule(i=pick, keys=some_keys)
    def scan(self, i, keys):
        for key in keys:
            was_here = key in self.manager.table.blocks
            answer = self.manager.lookup(key, self._request(i))
            can_give = [t for t in self.tiers if t.is_up and key in t._resident]
            if not was_here and not can_give:
                assert answer is MISS, "INV-36: nobody who lives has it"
            if answer is HIT:
                slot = self.manager.table.blocks[key].slot
                assert self.memory[slot] == key, "INV-37: HIT on other bytes"
            if answer is MISS:
                break

    @precondition(lambda self: self.requests)
    @rule(i=pick, keys=some_keys)
    def offer(self, i, keys):
        ctx = self._request(i)
        granted = self.manager.prepare_store(keys, ctx)
        if granted is not None and granted.keys_to_store:
            slots = granted.slots.tolist()
            self.stores.append((ctx, list(granted.keys_to_store), slots))

    @precondition(lambda self: self.stores)
    @rule(i=pick, ok=st.booleans())
    def stored(self, i, ok):
        self._stored(i, ok=ok)

    def _stored(self, i, *, ok):
        ctx, keys, slots = self.stores.pop(i % len(self.stores))
        for key, slot in zip(keys, slots, strict=True):
            self.memory[slot] = key if ok else GARBAGE
        self.manager.complete_store(keys, ctx, ok)

    @rule(seconds=st.sampled_from([0.0, 0.0, DEADLINE_S + 1]))
    def step(self, seconds):
        self._step(seconds)

    def _step(self, seconds=0.0):
        self.now_s += seconds
        self.manager.advance(self.now_s)
        self.manager.on_schedule_end(ScheduleEndContext())

    @rule()
    def reset(self):
        """Whoever follows the events hears that all is gone, in tiers as well."""
        self.manager.reset_cache()
        for mirror in self.mirrors.values():
            mirror.clear()

    @rule()
    def follow(self):
        self._follow()

    def _follow(self):
        for event in self.manager.take_events():
            keys, mirror = set(event.keys), self.mirrors[event.tier]
            assert len(keys) == len(event.keys), "INV-12: a key twice in an event"
            if not event.is_removed:
                assert not mirror & keys, "INV-12: stored twice"
                mirror |= keys
            elif not event.metadata_only:
                assert keys <= mirror, "INV-12: removed, but never stored"
                mirror -= keys
        ready = {b.key for b in self._slots().values() if b.state == READY}
        assert self.mirrors[None] == ready, "INV-12: of the primary"
        asker = ReqContext("follower")
        for t, tier in enumerate(self.tiers):
            there = {key for key in KEYS if tier.lookup(key, asker) is HIT}
            assert self.mirrors[t] == there, "INV-12: of a tier"

    # The worker's side ------------------------------------------------------------

    @rule(t=st.integers(0, 1))
    def deliver(self, t):
        """Send the outbox, to the newest worker or into the void."""
        messages = self.tiers[t].take_outbox()
        worker = self.workers[t][-1]
        if worker.is_alive and worker.is_heard:
            worker.receive(messages)

    @rule(t=st.integers(0, 1), i=pick, num_bad=st.sampled_from([0, 0, 1, 9]))
    def work(self, t, i, num_bad):
        """One worker of the past or now does one of its jobs, in any order."""
        busy = [w for w in self.workers[t] if w.is_alive and w.inbox]
        if busy:
            worker = busy[i % len(busy)]
            self._do(worker, worker.inbox.pop(i % len(worker.inbox)), num_bad)

    def _do(self, worker, job, num_bad):
        resident = self._slots()
        failed = list(range(len(job.keys)))[:num_bad]
        for idx, (key, slot) in enumerate(
            zip(job.keys, job.slots.tolist(), strict=True)
        ):
            holder = resident.get(slot)
            assert slot not in self._free(), "INV-32, INV-34: it works on a free slot"
            assert holder is None or holder.key == key, "INV-34: and on another's"
            if job.is_promotion:
                assert holder is None or holder.state != READY, "INV-34: readable"
                self.memory[slot] = GARBAGE if idx in failed else key
            elif idx not in failed:
                assert self.memory[slot] == key, "INV-37: a cascade read other bytes"
                worker.disk[key] = None
        removed = tuple(worker.disk)[:1] if len(worker.disk) > MAX_ON_DISK else ()
        for key in removed:
            del worker.disk[key]
        worker.replies.append(
            JobReply(ENGINE, worker.epoch, job.job_id, tuple(failed), removed, "")
        )

    @rule(t=st.integers(0, 1), i=pick, is_twice=st.booleans())
    def hear(self, t, i, is_twice):
        """Read one reply; of a worker that was given up it changes nothing."""
        speaking = [w for w in self.workers[t] if w.replies]
        if not speaking:
            return
        worker = speaking[i % len(speaking)]
        reply = worker.replies.pop(0)
        tier = self.tiers[t]
        if worker is not self.workers[t][-1] or not worker.is_alive:
            before, late = self._picture(), tier.late_replies
            is_open = reply.job_id in tier._open
            tier.feed([reply])
            if not is_open:
                assert tier.late_replies == late + 1, "INV-33: a late reply counts"
                assert self._picture() == before, "INV-33: and changes nothing"
            return
        tier.feed([reply] * (2 if is_twice else 1))

    @rule(t=st.integers(0, 1))
    def go_silent(self, t):
        """End of file: the worker may go on, and so keeps its slots."""
        worker = self.workers[t][-1]
        if worker.is_heard:
            worker.is_heard = False
            open_before = set(self.tiers[t]._open)
            self.tiers[t].feed([TierDown(worker.epoch, dead=False)])
            assert set(self.tiers[t]._open) == open_before, "INV-34: no proof of death"
            assert not self.tiers[t]._resident, "INV-36: it answers MISS from now on"

    @rule(t=st.integers(0, 1))
    def kill(self, t):
        """It touches nothing any more; that it is dead is not proven yet."""
        worker = self.workers[t][-1]
        worker.is_alive = False
        worker.inbox.clear()

    @rule(t=st.integers(0, 1), i=pick)
    def prove(self, t, i):
        """The proof of a death: its jobs have failed, and nobody else's."""
        unproven = [w for w in self.workers[t] if not w.is_alive and not w.is_proven]
        if unproven:
            self._prove(t, unproven[i % len(unproven)])

    def _prove(self, t, worker):
        for earlier in self.workers[t][: worker.epoch]:
            earlier.is_proven = True  # with this one they are dead, too
        if worker is self.workers[t][-1]:
            worker.is_heard = False
        tier, other = self.tiers[t], self.tiers[1 - t]
        later = {j for j, (epoch, _) in tier._open.items() if epoch > worker.epoch}
        others = set(other._open)
        tier.feed([TierDown(worker.epoch, dead=True)])
        assert set(tier._open) == later, "INV-36: whose jobs have failed"
        self.manager.advance(self.now_s)
        left = {i for i, j in self.manager._desk.open.items() if j.tier_idx == t}
        assert left == later, "INV-32: each job is answered, by the proof of death"
        assert set(other._open) <= others, "INV-36: other tiers go on"

    @rule(t=st.integers(0, 1))
    def restart(self, t):
        """Only after the death: two workers never have one storage."""
        if not self.workers[t][-1].is_alive:
            self.workers[t][-1].is_heard = False
            self._restart(t)

    @rule()
    def settle(self):
        self._settle()

    def _settle(self):
        for t in range(2):
            worker = self.workers[t][-1]
            if not (worker.is_heard and worker.is_alive):
                self.kill(t)
                self._prove(t, worker)
                self._restart(t)
            elif len(self.workers[t]) > 1:
                self._prove(t, self.workers[t][-2])
        while self.stores:
            self._stored(0, ok=True)
        for _ in range(4):
            for t, tier in enumerate(self.tiers):
                worker = self.workers[t][-1]
                worker.receive(tier.take_outbox())
                while worker.inbox:
                    self._do(worker, worker.inbox.pop(0), 0)
                tier.feed(worker.replies)
                worker.replies.clear()
            self._step()
        self._follow()
        manager, table = self.manager, self.manager.table
        manager.check_integrity()
        assert not manager._desk.open, "INV-29: jobs left"
        assert not manager.has_pending_work(), "INV-29: work left"
        assert table.num_pending == table.num_quarantined == 0, "INV-29: slots left"
        assert not any(b.pins for b in table.blocks.values()), "INV-29: pins left"
        assert all(not tier.open_store_bytes for tier in self.tiers), "INV-29: credits"

    # Always -----------------------------------------------------------------------

    @invariant()
    def readable_slots_have_their_bytes(self):
        if self.manager is not None:
            self.manager.check_integrity()
            for slot, block in self._slots().items():
                if block.state == READY:
                    assert self.memory[slot] == block.key, "INV-37: other bytes"

    @invariant()
    def credits_are_what_is_open(self):
        if self.manager is not None:
            for tier in self.tiers:
                open_stores = [j for _, j in tier._open.values() if not j.is_promotion]
                num = sum(len(job.keys) for job in open_stores)
                assert tier.open_store_bytes == 64 * num <= 6 * 64, "INV-17: credits"

    @invariant()
    def dead_tiers_hold_nothing(self):
        if self.manager is not None:
            for t, tier in enumerate(self.tiers):
                worker = self.workers[t][-1]
                assert tier.is_up is worker.is_heard, "INV-36: who is up"
                assert tier._resident <= set(worker.disk), "INV-36: what it holds"

    def teardown(self):
        if self.manager is not None:
            for ctx in list(self.requests.values()):
                self.manager.on_request_finished(ctx)
            self.requests = {}
            self._settle()
            assert not self.manager._requests, "INV-29: requests left"
            assert not self.manager._closing, "INV-29: requests left"


def test_worker_machine():
    profile = settings(
        max_examples=2 * settings.default.max_examples, stateful_step_count=40
    )
    run_state_machine_as_test(WorkerMachine, settings=profile)
