"""A random history of the real table, cut at any of its stores, then adopted.

Covers: INV-3 across engines (what is adopted has its own bytes), the sequence number
of a reset, generations that go on rising, no block lost that nobody was touching.
Does not cover: processes and locks (``tests/crash/test_warm_reattach``); the real
manager decides, the real region is written, a cut is an exception before a store.
"""

import contextlib
import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from shmoffload.core.adoption import adopt
from shmoffload.core.manager import TieringOffloadingManager
from shmoffload.core.policies.registry import make_policy
from shmoffload.core.types import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    SlotState,
    make_offload_key,
)
from shmoffload.testing.leaks import new_session_name
from shmoffload.wire import names, region
from shmoffload.wire.adopt import find_residents
from shmoffload.wire.config import from_dict
from shmoffload.wire.layout import HEADER_BYTES, seal_header
from shmoffload.wire.region import PrimaryRegion

NUM_SLOTS = 4
BLOCK_BYTES = 256
KEYS = [make_offload_key(b"key-%d" % i) for i in range(7)]
END = ScheduleEndContext()

key_sets = st.lists(st.sampled_from(KEYS), unique=True, min_size=1, max_size=3)
operations = st.one_of(
    st.tuples(st.just("store"), key_sets),
    st.tuples(st.just("offer"), key_sets),
    st.tuples(st.just("copy"), st.integers(0, 2)),
    st.tuples(st.just("end"), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("load"), key_sets),
    st.tuples(st.just("seal"), st.sampled_from(KEYS)),
    st.tuples(st.just("reset")),
)
histories = st.lists(operations, min_size=1, max_size=12)
ENDLESS = 10**9
MAX_CUTS = 40  # of one history; of a longer one every second or third store


def bytes_of(key):
    return hashlib.shake_128(key).digest(BLOCK_BYTES)


class CutError(Exception):
    """The process dies here."""


class Cutter:
    """Counts stores to shared memory and dies after the last one."""

    def __init__(self, num_left):
        self.num_left = num_left

    def store(self):
        self.num_left -= 1
        if self.num_left < 0:
            raise CutError

    def words(self, view):
        return Words(view, self)


class Words:
    """A view of words; each assignment may be the one that never happens."""

    def __init__(self, view, cutter):
        self.view, self.cutter = view, cutter

    def __getitem__(self, idx):
        return self.view[idx]

    def __setitem__(self, idx, word):
        self.cutter.store()
        self.view[idx] = word

    def release(self):
        self.view.release()


class Life:
    """One engine: what it has read and written, until it is cut or ends."""

    def __init__(self, config, cutter, policy):
        self.region = PrimaryRegion.open(config)
        self.region.own()
        self.region.keep(names.Keep.EVERYBODY)
        order = make_policy(policy, NUM_SLOTS)
        self.manager = TieringOffloadingManager(
            NUM_SLOTS, [], block_bytes=BLOCK_BYTES, policy=order, sink=self.region
        )
        self.num_requests = 0
        self.stores = []  # [ctx, keys, slots, is_copied]
        self.touched = set()  # by the operation that is going on
        self.gone = None  # had at the begin of a reset that is not completed
        self.order, self.cutter = order, cutter

    def adopt(self, *, check):
        found = find_residents(self.region, check=check)
        self.region._table = self.cutter.words(self.region._table)
        self.region._header = self.cutter.words(self.region._header)
        self.touched = set(KEYS)
        adopt(self.manager.table, self.order, found.blocks, found.generations)
        self.touched = set()
        return [key for key, _ in found.blocks]

    def run(self, name, *words):
        getattr(self, name)(*words)
        self.manager.on_schedule_end(END)
        self.manager.check_integrity()
        self.touched = set()

    def request(self):
        self.num_requests += 1
        ctx = ReqContext(f"r{self.num_requests}")
        self.manager.on_new_request(ctx)
        return ctx

    def offer(self, keys):
        ctx = self.request()
        self.touched = set(KEYS)  # anything may be evicted
        granted = self.manager.prepare_store(keys, ctx)
        if granted is not None:
            slots = granted.slots.tolist()
            self.stores.append([ctx, granted.keys_to_store, slots, False])

    def store(self, keys):
        num_stores = len(self.stores)
        self.offer(keys)
        self.copy(num_stores)
        self.end(num_stores, success=True)

    def copy(self, idx):
        if idx < len(self.stores):
            self.stores[idx][3] = True
            for key, slot in zip(*self.stores[idx][1:3], strict=True):
                for half in (slice(0, 128), slice(128, BLOCK_BYTES)):
                    self.cutter.store()
                    self.region.slot_view(slot)[half] = bytes_of(key)[half]

    def end(self, idx, success):
        if idx < len(self.stores):
            ctx, keys, _, is_copied = self.stores.pop(idx)
            self.touched = set(keys)
            self.manager.complete_store(keys, ctx, success and is_copied)
            self.manager.on_request_finished(ctx)

    def load(self, keys):
        ctx = self.request()
        hits = [k for k in keys if self.manager.lookup(k, ctx) is LookupResult.HIT]
        for key, slot in zip(hits, self.manager.prepare_load(hits, ctx), strict=True):
            assert bytes(self.region.slot_view(int(slot))) == bytes_of(key)
        self.manager.complete_load(hits, ctx)
        self.manager.on_request_finished(ctx)

    def seal(self, key):
        """A tier's worker fills the header page, as when the block cascades."""
        with contextlib.suppress(KeyError):
            slot = int(self.manager.table.slots_of([key])[0])
            payload = self.region.slot_view(slot)
            header = seal_header(key, payload, self.region.namespace)
            self.cutter.store()
            self.region.header_view(slot)[:HEADER_BYTES] = header

    def reset(self):
        self.touched = set(KEYS)
        ready = self.readable()
        self.region.begin_change()
        self.gone = ready
        self.manager.reset_cache()
        self.region.end_change()
        self.gone = None

    def slots_of_readable(self):
        keys = self.readable()
        return zip(keys, self.manager.table.slots_of(keys).tolist(), strict=True)

    def readable(self):
        table = self.manager.table
        return {key for key, b in table.blocks.items() if b.state == SlotState.READY}


def cut_write_key(cutter):
    """Let the key's half of a hand-out be a store of its own."""
    real = region._WRITE_KEY

    def write(*words):
        cutter.store()
        real(*words)

    region._WRITE_KEY = write
    return real


def live(config, operations, cutter, policy, before):
    """Run one engine; return what it surely left, may not have left, generations."""
    real = cut_write_key(cutter)
    life = Life(config, cutter, policy)
    try:
        found = find_residents(life.region, check=False)
        if before is not None:
            sure, never, generations = before
            assert never is not None or found.generations == generations, (
                "cleared for no reason"
            )
            adopted = {key for key, _ in found.blocks}
            assert sure <= adopted, "lost, though nobody touched it"
            assert never is None or not adopted, "a reset was cut and undone"
            for key, slot in found.blocks:
                assert bytes(life.region.slot_view(slot)) == bytes_of(key)
            checked = find_residents(life.region, check=True)
            assert set(checked.blocks) <= set(found.blocks)
        with contextlib.suppress(CutError):
            keys = life.adopt(check=False)
            life.manager.check_integrity()
            assert life.readable() == set(keys)
            after = find_residents(life.region, check=False)
            assert set(after.blocks) == set(life.slots_of_readable())
            assert all(map(int.__ge__, after.generations, found.generations))
            for operation in operations:
                life.run(*operation)
            life.touched = set()
        is_cut = life.gone is not None
        sure = set() if is_cut else life.readable() - life.touched
        return sure, life.gone, find_residents(life.region, check=False).generations
    finally:
        region._WRITE_KEY = real
        life.region.unlink()
        life.region.close()


def leave(session, first, second, num_stores, policy):
    """Run two engines, the second one cut, and one that looks; return its stores."""
    primary = {"slots": NUM_SLOTS, "block_bytes": BLOCK_BYTES}
    config = from_dict({"session": {"name": session}, "primary": primary})
    cutter = Cutter(num_stores)
    try:
        left = live(config, first, Cutter(ENDLESS), policy, None)
        left = live(config, second, cutter, policy, left)
        live(config, [], Cutter(ENDLESS), policy, left)
    finally:
        names.sweep(session, kept_too=True)
    return num_stores - cutter.num_left


@settings(max_examples=settings().max_examples // 2)
@given(histories, histories, st.sampled_from(["lru", "arc2"]))
def test_adopted_after_any_cut_are_right_bytes_or_nothing(first, second, policy):
    session = new_session_name()
    num_stores = leave(session, first, second, ENDLESS, policy)
    for cut in range(0, num_stores, -(-num_stores // MAX_CUTS)):
        leave(session, first, second, cut, policy)
