"""Each fault of a tier strikes exactly as it says, and ``clear`` ends all."""

import errno
import os
import subprocess
import sys
import threading
import time

import pytest
from executor_kit import TIMEOUT_S, Rig

from shmoffload.errors import ConfigError, TierConfigError
from shmoffload.testing.faults.control import KINDS, Call, Control, Orders
from shmoffload.testing.faults.tier import BentRegion, FaultyTier
from shmoffload.testing.faults.worker_queue import WorkerQueue
from shmoffload.testing.poll import wait_until
from shmoffload.testing.tier_tests import HeapRegion, TierTests, deadline, key_of
from shmoffload.wire.config import TierConfig, from_dict
from shmoffload.wire.session import TierWord
from shmoffload.worker.registry import check_tier_types, load_tier, tier_types
from shmoffload.worker.tier import BlockStatus

KEYS = [key_of(i) for i in range(6)]
ALL = list(range(6))


class FaultyTierTests(TierTests):
    """Without orders it is the tier inside, whichever that is."""

    tier_class = FaultyTier
    inner = "slab"

    def make_config(self, tmp_path):
        control = Control(tmp_path, inner=self.inner)
        return TierConfig(
            type="faulty",
            name="f",
            path=str(control.folder),
            max_bytes="1MiB",
            min_free=0,
        )


class TestFaultySlab(FaultyTierTests):
    inner = "slab"


class TestFaultyFs(FaultyTierTests):
    inner = "fs"


class TestFaultyMemory(FaultyTierTests):
    inner = "memory"


@pytest.fixture(params=["slab", "fs", "memory"])
def control(request, tmp_path):
    return Control(tmp_path, inner=request.param)


@pytest.fixture
def rig(control):
    with Rig(FaultyTier(), HeapRegion(), path=control.folder, max_blocks=16) as made:
        made.fill(KEYS)
        yield made


def load_all(rig):
    for slot in range(8, 14):
        rig.region.smear(slot)
    failed, removed, _ = rig.run(KEYS, range(8, 14), load=True)
    right = [i for i in ALL if i not in failed]
    assert all(rig.region.holds(8 + i, KEYS[i]) for i in right)
    return failed, removed


def seal_all(rig):
    """As the executor does before it calls ``put``."""
    for slot, key in enumerate(KEYS):
        rig.region.fill(slot, key)


def is_well(rig):
    """Store and load all, whatever is there already."""
    return rig.run(KEYS, ALL) == ([], [], "") and load_all(rig) == ([], [])


@pytest.mark.parametrize(
    ("code", "word"),
    [
        (errno.ENOSPC, TierWord.FAILED_NO_SPACE),
        (errno.EIO, TierWord.FAILED_IO),
        (errno.EMFILE, TierWord.FAILED_NO_FILES),
        (errno.EACCES, TierWord.FAILED_NO_ACCESS),
        (errno.EROFS, TierWord.FAILED_READ_ONLY),
    ],
)
def test_fail_refuses_so_many_calls_with_the_errno(control, rig, code, word):
    control.fail(Call.PUT, code, times=2)
    for num_struck in (1, 2):
        failed, _, error = rig.run(KEYS, ALL)
        assert (failed, error) == (ALL, str(OSError(code, os.strerror(code))))
        assert control.num_struck("fail") == num_struck
        assert rig.word(word) == 6 * num_struck
    assert rig.run(KEYS, ALL) == ([], [], "")
    control.fail(Call.GET, code)
    assert load_all(rig) == (ALL, [])  # refused is not missing
    assert rig.word(word) == 18
    assert is_well(rig)
    assert control.num_struck("fail") == 3


def test_fail_of_the_other_calls_raises(control, rig):
    assert is_well(rig)
    for call, run in (
        (Call.EXISTS, lambda: rig.tier.exists(KEYS, deadline())),
        (Call.DELETE, lambda: rig.tier.delete(KEYS, deadline())),
    ):
        control.fail(call, errno.EIO)
        with pytest.raises(OSError, match="Input/output error"):
            run()
        run()
    assert not any(rig.tier.exists(KEYS, deadline()))


def test_open_is_held_and_then_fails(control):
    control.hold(Call.OPEN)
    control.fail(Call.OPEN, errno.EACCES)
    tier, region, said = FaultyTier(), HeapRegion(), []

    def run():
        config = TierConfig(type="faulty", path=str(control.folder), min_free=0)
        for _ in range(2):
            try:
                said.append(tier.open(config, region, region.namespace))
            except OSError as error:
                said.append(error.errno)

    thread = threading.Thread(target=run)
    thread.start()
    control.wait_held(Call.OPEN)
    assert said == [errno.EACCES]
    control.release()
    thread.join(TIMEOUT_S)
    assert said[1].capacity_bytes > 0
    tier.close()


@pytest.mark.parametrize("call", [Call.PUT, Call.GET, Call.EXISTS, Call.DELETE])
def test_hold_stops_a_call_in_its_middle(control, rig, call):
    assert call is Call.PUT or is_well(rig)
    control.hold(call)
    run = {
        Call.PUT: lambda: rig.tier.put(KEYS, ALL, deadline()),
        Call.GET: lambda: rig.tier.get(KEYS, range(8, 14), deadline()),
        Call.EXISTS: lambda: rig.tier.exists(KEYS, deadline()),
        Call.DELETE: lambda: rig.tier.delete(KEYS, deadline()),
    }
    seal_all(rig)
    for slot in range(8, 14):
        rig.region.smear(slot)
    thread = threading.Thread(target=run[call])
    thread.start()
    control.wait_held(call)
    inner = rig.tier._inner
    there = inner.exists(KEYS, deadline())
    assert there == {
        Call.PUT: [True] * 3 + [False] * 3,
        Call.DELETE: [False] * 3 + [True] * 3,
    }.get(call, [True] * 6)
    if call is Call.GET:
        assert all(rig.region.holds(8 + i, KEYS[i]) for i in range(3))
        assert all(rig.region.is_untouched(11 + i) for i in range(3))
    control.hold(call)  # again: nothing moves
    assert control.is_held(call)
    control.release()
    assert not control.is_held(call)
    thread.join(TIMEOUT_S)
    assert inner.exists(KEYS, deadline()) == [call is not Call.DELETE] * 6
    assert control.num_struck("hold") == 1


def test_who_is_held_again_at_once_is_seen_again(control, rig):
    control.hold(Call.PUT)
    first = rig.submit(KEYS[:3], ALL[:3])
    control.wait_held(Call.PUT)
    control.release()
    control.hold(Call.PUT)  # perhaps before the first has looked
    rig.answer(first)
    second = rig.submit(KEYS[3:], ALL[3:])
    control.wait_held(Call.PUT)
    control.release()
    assert rig.answer(second).failed_idx == b""
    assert control.num_struck("hold") == 2


def test_slow_takes_longer_until_it_is_ended(control, rig):
    seal_all(rig)
    control.slow(Call.PUT, 0.2)
    began_s = time.monotonic()
    rig.tier.put(KEYS[:2], ALL[:2], deadline())
    assert time.monotonic() - began_s >= 0.2
    assert control.num_struck("slow") == 1
    control.slow(Call.GET, 3600)
    thread = threading.Thread(target=lambda: rig.tier.get(KEYS[:2], [8, 9], deadline()))
    thread.start()
    wait_until(
        lambda: control.num_struck("slow") == 2, timeout_s=TIMEOUT_S, what="the get"
    )
    control.slow(Call.GET, 0)
    control.slow(Call.PUT, 0)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert is_well(rig)
    assert control.num_struck("slow") == 2


def test_a_short_write_is_a_torn_block_that_was_said_to_be_whole(control, rig):
    control.short_write()
    assert rig.run(KEYS, ALL) == ([], [], "")
    assert control.num_struck("short_write") == 1
    assert all(rig.region.holds(i, KEYS[i]) for i in ALL)  # not in the primary
    assert load_all(rig) == ([5], [KEYS[5]])
    assert rig.word(TierWord.BLOCKS_BAD) == 1
    assert is_well(rig)  # stored again, whole
    assert rig.word(TierWord.BLOCKS_BAD) == 1


def test_a_flipped_bit_is_found_once(control, rig):
    assert is_well(rig)
    control.flip(times=2)
    assert load_all(rig) == ([5], [KEYS[5]])
    assert load_all(rig) == ([4, 5], [KEYS[4], KEYS[5]])  # 5 is gone, 4 is flipped
    assert control.num_struck("flip") == rig.word(TierWord.BLOCKS_BAD) == 2
    assert is_well(rig)
    assert control.num_struck("flip") == 2


def test_a_get_of_nothing_takes_no_flip(control, rig):
    control.flip()
    assert load_all(rig) == (ALL, KEYS)
    assert control.num_struck("flip") == 0
    assert rig.run(KEYS, ALL) == ([], [], "")
    assert load_all(rig) == ([5], [KEYS[5]])


def test_a_full_disk_stays_full_until_it_is_drained(control, rig):
    control.fill()
    for num_struck in (1, 2):
        assert rig.run(KEYS, ALL)[0] == ALL
        assert control.num_struck("fill") == num_struck
    assert rig.word(TierWord.FAILED_NO_SPACE) == 12
    control.drain()
    assert is_well(rig)


def test_clear_ends_all_and_keeps_the_counts(control, rig):
    control.fail(Call.PUT, errno.EIO)
    assert rig.run(KEYS, ALL)[0] == ALL
    control.fail(Call.PUT, errno.EIO, times=3)
    control.fail(Call.GET, errno.EIO)
    control.slow(Call.PUT, 3600)
    control.hold(Call.GET)
    control.short_write(times=2)
    control.flip(times=2)
    control.fill()
    control.clear()
    struck = {kind: control.num_struck(kind) for kind in KINDS}
    assert is_well(rig)
    assert {kind: control.num_struck(kind) for kind in struck} == struck
    assert struck.pop("fail") == 1
    assert not any(struck.values())


def test_clear_takes_back_what_the_process_is_told(tmp_path, monkeypatch):
    """No tier obeys meanwhile: it would leave, and this process with it."""
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    control = Control(tmp_path)
    control.exit(3)
    control.say(b"one")
    control.narrow(1)
    control.hang_up()
    control.clear()
    Orders(tmp_path, is_over=lambda: False).obey(WorkerQueue())
    assert left == []
    assert not any(control.num_struck(kind) for kind in KINDS)


def test_close_ends_every_hold(control, rig):
    control.hold(Call.PUT)
    job_id = rig.submit(KEYS, ALL)
    control.wait_held(Call.PUT)
    rig.tier._is_over.set()
    assert rig.answer(job_id).failed_idx == b""


def test_exit_leaves_with_the_code_also_while_held(tmp_path):
    control = Control(tmp_path, inner="memory")
    control.hold(Call.OPEN)
    code = f"""
from shmoffload.testing.faults.tier import FaultyTier
from shmoffload.testing.tier_tests import HeapRegion
from shmoffload.wire.config import TierConfig, from_dict
region = HeapRegion()
config = TierConfig(type="faulty", name="f", path={str(tmp_path)!r})
FaultyTier().open(config, region, region.namespace)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            control.wait_held(Call.OPEN)
            control.exit(7)
            assert process.wait(TIMEOUT_S) == 7
            assert not control.is_held(Call.OPEN)  # whoever was is dead
            assert control.num_struck("exit") == 1
        finally:
            process.kill()


def test_what_several_threads_take_is_taken_once(control, rig):
    assert is_well(rig)
    control.fail(Call.GET, errno.EIO, times=5)
    refused = []

    def run(slot):
        for _ in range(5):
            got = rig.tier.get(KEYS[:1], [slot], deadline())
            refused.append(got == [BlockStatus.FAIL])

    threads = [threading.Thread(target=run, args=(slot,)) for slot in range(8, 12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert (len(refused), sum(refused)) == (20, 5)
    assert control.num_struck("fail") == 5


def test_a_tier_that_nobody_orders_about_needs_no_driver(tmp_path):
    region = HeapRegion()
    tier = load_tier("faulty")()
    config = TierConfig(
        type="faulty",
        name="f",
        path=str(tmp_path / "new"),
        max_bytes="1MiB",
        min_free=0,
    )
    tier.open(config, region, region.namespace)
    try:
        region.fill(0, KEYS[0])
        assert tier.put(KEYS[:1], [0], deadline()) == [BlockStatus.OK]
        assert (tmp_path / "new" / "store" / region.namespace.hex()).is_dir()
    finally:
        tier.close()
    assert "faulty" not in tier_types()  # no word for people who mistype


def test_a_faulty_tier_is_configured_as_any_other():
    base = {
        "session": {"name": "s", "namespace": "n"},
        "primary": {"block_bytes": 4096, "slots": 2},
    }
    check_tier_types(from_dict(base | {"tier": [{"type": "faulty", "path": "/x"}]}))
    with pytest.raises(ConfigError, match="a faulty tier needs a directory"):
        check_tier_types(from_dict(base | {"tier": [{"type": "faulty"}]}))


def test_no_faulty_tier_within_a_faulty_tier(tmp_path):
    Control(tmp_path, inner="faulty")
    region = HeapRegion()
    config = TierConfig(type="faulty", name="f", path=str(tmp_path))
    tier = FaultyTier()
    with pytest.raises(TierConfigError, match="name a real tier"):
        tier.open(config, region, region.namespace)
    tier.close()


def test_a_cut_slot_reads_as_half_written_until_it_is_mended():
    region = HeapRegion()
    bent = BentRegion(region)
    region.fill(3, KEYS[3])
    whole = bytes(region.stride_view(3))
    half = region.stride // 2
    bent.cut(3)
    assert bytes(bent.stride_view(3)) == whole[:half] + bytes(region.stride - half)
    assert bytes(bent.header_view(3)) == bytes(len(bent.header_view(3)))
    assert bent.address(3) != region.address(3)
    assert bytes(region.stride_view(3)) == whole
    bent.mend(3)
    assert bytes(bent.slot_view(3)) == bytes(region.slot_view(3))
    assert bent.address(3) == region.address(3)
