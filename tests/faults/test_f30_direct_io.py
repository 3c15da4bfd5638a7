"""F30: O_DIRECT that is refused, at once or at a write, costs speed and no store.

A block's stride is a multiple of a page whatever its size, so only an address, or a
disk that changes its mind, can be refused; both are here, on a disk and on a tmpfs.
"""

import errno
import logging
import mmap
import os

import engine_kit as kit
import pytest
from executor_kit import Rig
from faults_kit import faulty, make_config
from late_faults_kit import WAIT_S, patched, tmpfs_folder, word
from worker_kit import WorkerRig

from shmoffload.cli import main
from shmoffload.engine import Engine
from shmoffload.testing.faults.control import Call
from shmoffload.testing.poll import wait_until
from shmoffload.testing.tier_tests import HeapRegion, key_of
from shmoffload.wire.session import TierWord
from shmoffload.worker.tiers.fs import FsTier
from shmoffload.worker.tiers.slab import SlabTier

NUM = 6
REFUSES_LATER = """
import fcntl
real = os.pwritev
def pwritev(fd, views, offset):  # not at the probe, which is one stride long
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT and len(views) > 1:
        raise OSError(errno.EINVAL, "Invalid argument")
    return real(fd, views, offset)
os.pwritev = pwritev
"""


class ShiftedRegion(HeapRegion):
    """A region whose slots begin ``shift`` bytes behind a page."""

    def __init__(self, shift, **kwargs):
        super().__init__(**kwargs)
        self.shift = shift
        self.num_slots -= 1

    def stride_view(self, slot):
        assert 0 <= slot < self.num_slots
        start = slot * self.stride + self.shift
        return self._view[start : start + self.stride]


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request, tmp_path):
    if request.param == "disk":
        yield tmp_path
    else:
        with tmpfs_folder() as made:
            yield made


def takes_direct(folder, stride, shift):
    """Ask the system itself, as a tier has to: with this stride at this address."""
    path = folder / "ask"
    with mmap.mmap(-1, stride + 4096) as mapping, memoryview(mapping) as view:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            try:
                with view[shift : shift + stride] as piece:
                    return os.pwritev(fd, [piece], 0) == stride
            finally:
                os.close(fd)
        except OSError:
            return False
        finally:
            path.unlink(missing_ok=True)


def warnings_of(caplog):
    records = [r for r in caplog.records if r.levelno >= logging.WARNING]
    return [record.getMessage() for record in records]


@pytest.mark.parametrize("tier_class", [SlabTier, FsTier])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("block_bytes", [4096, 4096 + 512, 3000])
def test_f30_any_block_size_at_any_address_is_stored(
    folder, caplog, block_bytes, shift, tier_class
):
    region = ShiftedRegion(shift, num_slots=24, block_bytes=block_bytes)
    expected = takes_direct(folder, region.stride, shift)
    with Rig(tier_class(), region, path=folder / "t") as rig:
        is_slab = tier_class is SlabTier
        assert rig.tier.direct_io == (is_slab and expected)
        keys = [key_of(i) for i in range(NUM)]
        rig.fill(keys)
        assert rig.run(keys, range(NUM)) == ([], [], "")
        assert rig.run(keys, range(10, 10 + NUM), load=True) == ([], [], "")
        assert all(region.holds(10 + i, key) for i, key in enumerate(keys))
        rig.wait_for(TierWord.DIRECT_IO, is_slab and expected)
        assert rig.word(TierWord.BLOCKS_FAILED) == 0
    if is_slab and not expected:
        (said,) = warnings_of(caplog)
        assert "O_DIRECT does not work here" in said
    else:
        assert warnings_of(caplog) == []


@pytest.mark.parametrize("block_bytes", [4096, 4096 + 512, 3000])
def test_f30_a_disk_that_refuses_later_costs_one_warning(
    session_name, tmp_path, capfd, block_bytes
):
    """A real worker and its real region: the probe passes, then long writes do not."""
    slab = {"type": "slab", "path": str(tmp_path), "max_bytes": "4MiB", "nice": 0}
    with WorkerRig(session_name, block_bytes=block_bytes, **slab) as rig:
        rig.ready(wrap=patched(REFUSES_LATER))
        assert rig.word(TierWord.DIRECT_IO) == takes_direct(
            tmp_path, rig.region.stride, 0
        )
        for start in (0, NUM):
            keys = [key_of(start + i) for i in range(NUM)]
            for slot, key in enumerate(keys):
                rig.fill(slot, key)
            assert rig.run(keys, range(NUM)) == ([], "")
            assert rig.run(keys, range(30, 30 + NUM), load=True) == ([], "")
            assert all(rig.holds(30 + i, key) for i, key in enumerate(keys))
        assert rig.word(TierWord.DIRECT_IO) == 0
        assert rig.word(TierWord.BLOCKS_FAILED) == 0
    assert capfd.readouterr().err.count("O_DIRECT does not work here") == 1


@pytest.mark.timeout(300)
def test_f30_a_tier_whose_stores_all_fail_is_no_healthy_tier(
    session_name, control, capsys
):
    """It answers, beats and stays empty: ``status`` goes red, and green again."""

    def status():
        with pytest.raises(SystemExit) as ended:
            main(["status", "--session", session_name])
        return ended.value.code, capsys.readouterr().out

    with Engine(make_config(session_name, [faulty(control)], slots=32)) as engine:
        # The supervisor says UP a moment after the engine knows it.
        wait_until(lambda: status()[0] == 0, timeout_s=WAIT_S, what="green")
        control.fail(Call.PUT, errno.EINVAL, times=10_000)
        numbers = iter(range(1000))

        def is_backing_off():
            kit.store(engine, kit.request(engine, "r"), kit.keys_of(next(numbers), 1))
            assert engine.wait_idle(WAIT_S)
            return word(engine, TierWord.BACKING_OFF)

        wait_until(is_backing_off, timeout_s=WAIT_S, what="the breaker")
        assert word(engine, TierWord.BLOCKS_WRITTEN) == 0
        code, said = status()
        assert (code, "tier faulty takes no stores now" in said) == (1, True)
        assert ": degraded, " in said
        control.clear()
        wait_until(
            lambda: not is_backing_off(), timeout_s=WAIT_S, what="the probe store"
        )
        assert status()[0] == 0
