"""What is read from a slot table, how fast, and which regions a sweep leaves."""

import os
import random

import pytest

from shmoffload.core.adoption import adopt
from shmoffload.core.manager import TieringOffloadingManager
from shmoffload.core.policies.registry import make_policy
from shmoffload.core.types import LookupResult, ReqContext, make_offload_key
from shmoffload.wire import layout, names
from shmoffload.wire.adopt import find_residents
from shmoffload.wire.config import from_dict
from shmoffload.wire.names import Keep
from shmoffload.wire.region import PrimaryRegion
from shmoffload.wire.session import SessionPage

BLOCK_BYTES = 4096
KEYS = [make_offload_key(b"%032d" % i) for i in range(8)]
PENDING, READY, QUARANTINED = 1, 2, 3


def config_of(session):
    primary = {"slots": 8, "block_bytes": BLOCK_BYTES}
    return from_dict({"session": {"name": session}, "primary": primary})


@pytest.fixture
def region(session_name):
    opened = PrimaryRegion.open(config_of(session_name))
    yield opened
    opened.close()
    names.sweep(session_name, kept_too=True)


def write(region, slot, word, key=KEYS[0], *, num_bytes=BLOCK_BYTES, key_bytes=None):
    key_bytes = len(key) if key_bytes is None else key_bytes
    record = (word, num_bytes, key_bytes, 0, key, 0)
    layout.SLOT_RECORD.pack_into(region._keys, slot * 64, *record)


def test_only_whole_records_are_taken(region):
    write(region, 0, 7 << 8 | READY)
    write(region, 1, 3 << 8 | READY)  # the same key again
    write(region, 2, 1 << 8 | PENDING, KEYS[2])
    write(region, 3, 2 << 8 | QUARANTINED, KEYS[3])
    write(region, 4, 1 << 8 | 77, KEYS[4])
    write(region, 5, 1 << 8 | READY, KEYS[5], num_bytes=BLOCK_BYTES - 1)
    write(region, 6, 1 << 8 | READY, KEYS[6], key_bytes=0xFFFF)
    write(region, 7, 1 << 8 | READY, b"", key_bytes=0)
    found = find_residents(region, check=False)
    assert found.blocks == [(KEYS[0], 0)]
    assert found.generations == [7, 3, 1, 2, 1, 1, 1, 1]
    assert (found.num_dropped, found.num_unfinished) == (4, 3)


def test_a_generation_that_no_engine_reaches_is_damage(region):
    write(region, 0, (1 << 64) - 256 | READY)
    write(region, 1, 5 << 8 | READY, KEYS[1])
    found = find_residents(region, check=False)
    assert found.blocks == [(KEYS[1], 1)]
    assert found.generations[:2] == [0, 5]
    assert found.num_dropped == 1


def test_a_checksum_has_to_be_of_this_key_and_these_bytes(region):
    for slot in range(4):
        region.slot_view(slot)[:] = bytes([slot + 1]) * BLOCK_BYTES
        write(region, slot, 1 << 8 | READY, KEYS[slot])
        header = layout.seal_header(
            KEYS[slot if slot != 1 else 0],
            region.slot_view(slot),
            region.namespace if slot != 2 else bytes(16),
        )
        region.header_view(slot)[: len(header)] = header
    region.slot_view(3)[-1] ^= 1
    found = find_residents(region, check=True)
    assert found.blocks == [(KEYS[0], 0)]
    assert found.num_dropped == 3
    assert len(find_residents(region, check=False).blocks) == 4


def test_a_table_of_garbage_raises_nothing(region):
    rnd = random.Random(1)
    for _ in range(200):
        region._keys[:] = rnd.randbytes(len(region._keys))
        for check in (True, False):
            found = find_residents(region, check=check)
            manager = TieringOffloadingManager(8, [], block_bytes=BLOCK_BYTES)
            policy = make_policy("lru", 8)
            adopt(manager.table, policy, found.blocks, found.generations)
            manager.table.check_integrity()


def test_a_new_region_has_nothing_to_adopt(region):
    assert find_residents(region, check=False).is_empty


def test_sweep_leaves_what_waits_for_an_engine(session_name):
    name = f"shmoffload.{session_name}.region"
    page = SessionPage.open_or_create(config_of(session_name))
    for keep, stays in ((Keep.EVERYBODY, True), (Keep.ENGINES, True), (3, False)):
        region = PrimaryRegion.open(config_of(session_name))
        region.keep(keep)
        region.close()
        assert names.sweep(session_name) == ([] if stays else [name])
    region = PrimaryRegion.open(config_of(session_name))
    region.keep(Keep.ENGINES)
    region.close()
    page.unlink(session_name)
    page.close()  # the daemon has gone
    assert names.sweep(session_name) == [name]
    region = PrimaryRegion.open(config_of(session_name))
    region.keep(Keep.EVERYBODY)
    assert names.sweep(session_name, kept_too=True) == []  # held
    region.close()
    assert names.sweep(session_name) == []
    assert names.sweep(session_name, kept_too=True) == [name]


def test_a_table_stays_only_while_kept_and_uncut(session_name):
    config = config_of(session_name)

    def reopen(*, keep, cut=False):
        region = PrimaryRegion.open(config)
        write(region, 0, 1 << 8 | READY)
        region.set_copies_done(0, 0, 5)
        region.keep(keep)
        region.begin_change()
        if not cut:
            region.end_change()
        region.close()
        region = PrimaryRegion.open(config)
        found = find_residents(region, check=False).blocks
        assert region.copies_done(0, 0) == 0
        assert os.pread(region.fd, 1, layout.SEQUENCE_AT)[0] % 2 == 0
        region.close()
        return len(found)

    assert reopen(keep=Keep.EVERYBODY) == 1
    assert reopen(keep=Keep.EVERYBODY, cut=True) == 0
    assert reopen(keep=Keep.ENGINES) == 1
    assert reopen(keep=Keep.NOBODY) == 0
    names.sweep(session_name)


@pytest.mark.parametrize("policy", ["auto", "arc"])
def test_a_hundred_thousand_slots_are_adopted(policy):
    """Without the pass over the blocks; ``make bench-adopt`` has the time."""
    num = 100_000
    region = PrimaryRegion.__new__(PrimaryRegion)
    region.block_bytes = BLOCK_BYTES
    region._keys = memoryview(bytearray(num * 64))
    region._table = region._keys.cast("Q")
    keys = [make_offload_key(b"%032d" % i) for i in range(num)]
    for slot in range(num):
        write(region, slot, 1 << 8 | (READY if slot % 10 else PENDING), keys[slot])
    order = make_policy(policy, num)
    manager = TieringOffloadingManager(
        num, [], block_bytes=BLOCK_BYTES, policy=order, sink=region
    )
    found = find_residents(region, check=False)
    adopt(manager.table, order, found.blocks, found.generations)
    manager.check_integrity()
    ctx = ReqContext("r")
    manager.on_new_request(ctx)
    hits = [manager.lookup(key, ctx) is LookupResult.HIT for key in keys]
    assert hits == [slot % 10 != 0 for slot in range(num)]
