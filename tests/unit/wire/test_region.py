"""The primary region in one process: geometry, views, ownership, write order."""

import errno
import os
import resource

import pytest

from shmoffload.core.types import SlotState, make_offload_key
from shmoffload.errors import RegionMismatchError, SessionInUseError, StartError
from shmoffload.wire import layout, names, region_join, room
from shmoffload.wire.config import from_dict
from shmoffload.wire.region import MAX_RANKS, PrimaryRegion

BLOCK_BYTES = 5000
KEY = make_offload_key(b"k" * 32)


def config_of(session, *, slots=7, block_bytes=BLOCK_BYTES, namespace=""):
    return from_dict(
        {
            "session": {"name": session, "namespace": namespace},
            "primary": {"slots": slots, "block_bytes": block_bytes},
        }
    )


@pytest.fixture
def region(session_name):
    opened = PrimaryRegion.open(config_of(session_name))
    yield opened
    opened.unlink()
    opened.close()


def test_geometry_is_page_aligned_and_private(region, session_name):
    assert region.num_slots == 7
    assert region.stride == 2 * 4096 + 4096
    there = os.stat(names.SHM_DIR + names.region_name(session_name))
    assert there.st_mode & 0o777 == 0o600
    assert there.st_size == 4096 + 4096 + 7 * region.stride
    assert there.st_blocks * 512 >= there.st_size  # memory is there, not promised
    assert all(region.address(slot) % 4096 == 0 for slot in range(7))
    assert not os.get_inheritable(region.fd)


def test_views_cover_a_slot_and_no_other(region):
    for slot in range(7):
        region.stride_view(slot)[:] = bytes([slot + 1]) * region.stride
    for slot in range(7):
        assert bytes(region.slot_view(slot)) == bytes([slot + 1]) * BLOCK_BYTES
        assert bytes(region.header_view(slot)) == bytes([slot + 1]) * 4096
        assert region.record(slot) == (0, SlotState.FREE, b"", 0)


@pytest.mark.parametrize("slot", [-1, -7, 7, 1 << 40])
def test_no_slot_outside(region, slot):
    for call in (
        region.slot_view,
        region.stride_view,
        region.header_view,
        region.address,
        region.record,
        lambda slot: region.publish(slot, 1),
        lambda slot: region.set_state(slot, 1, SlotState.FREE),
        lambda slot: region.hand_out(slot, 1, KEY, 1),
    ):
        with pytest.raises(IndexError):
            call(slot)
    assert all(region.record(i)[0] == 0 for i in range(7))


def test_slot_table_says_what_was_written(region):
    region.hand_out(6, 3, KEY, 4999)
    assert region.record(6) == (3, SlotState.PENDING, KEY, 4999)
    region.publish(6, 3)
    assert region.record(6) == (3, SlotState.READY, KEY, 4999)
    region.set_state(6, 3, SlotState.QUARANTINED)
    assert region.record(6) == (3, SlotState.QUARANTINED, KEY, 4999)
    assert region.record(5) == (0, SlotState.FREE, b"", 0)


def test_hand_out_writes_pending_before_the_key(region, monkeypatch):
    region.hand_out(2, 1, KEY, 10)
    region.publish(2, 1)

    def die(*_args):
        raise InterruptedError("SIGKILL between the two writes")

    monkeypatch.setattr("shmoffload.wire.region._WRITE_KEY", die)
    with pytest.raises(InterruptedError):
        region.hand_out(2, 2, make_offload_key(b"n" * 32), 20)
    assert region.record(2) == (2, SlotState.PENDING, KEY, 10)


def test_two_openings_in_one_process_share_the_memory(region, session_name):
    second = PrimaryRegion.open(config_of(session_name))
    region.slot_view(3)[:5] = b"hello"
    assert bytes(second.slot_view(3)[:5]) == b"hello"
    second.close()


def test_joining_keeps_what_is_in_the_slot_table(region, session_name):
    region.hand_out(0, 1, KEY, 10)
    PrimaryRegion.open(config_of(session_name)).close()
    assert region.record(0) == (1, SlotState.PENDING, KEY, 10)


@pytest.mark.parametrize("exclusive", [True, False])
def test_name_that_goes_between_open_and_lock_is_not_joined(
    session_name, monkeypatch, exclusive
):
    others = PrimaryRegion.open(config_of(session_name)) if not exclusive else None
    true_lock, unlinked = names.try_lock, []

    def unlink_first(fd, **how):
        if how["exclusive"] is exclusive and not unlinked:
            unlinked.append(names.unlink_same(names.region_name(session_name), fd))
        return true_lock(fd, **how)

    monkeypatch.setattr(names, "try_lock", unlink_first)
    joined = PrimaryRegion.open(config_of(session_name))
    assert unlinked == [True]
    assert not names.is_unlinked(joined.fd)
    joined.unlink()
    joined.close()
    if others:
        others.close()


def test_view_of_a_closed_region_is_safe(session_name):
    opened = PrimaryRegion.open(config_of(session_name))
    view = opened.slot_view(0)
    opened.unlink()
    opened.close()
    opened.close()
    view[:3] = b"abc"
    assert bytes(view[:3]) == b"abc"
    with pytest.raises(ValueError, match="released"):
        opened.slot_view(0)


def test_second_engine_is_refused_and_the_first_undisturbed(region, session_name):
    late = PrimaryRegion.open(config_of(session_name))
    region.own()
    region.hand_out(0, 1, KEY, 10)
    refusal = f'session "{session_name}" is in use by process {os.getpid()}: '
    with pytest.raises(SessionInUseError, match=refusal):
        late.own()
    late.close()
    with pytest.raises(SessionInUseError, match=refusal):
        PrimaryRegion.open(config_of(session_name))
    assert region.record(0) == (1, SlotState.PENDING, KEY, 10)


def test_a_region_that_another_engine_used_is_not_taken(region, session_name):
    late = PrimaryRegion.open(config_of(session_name))
    region.own()
    region.close()
    with pytest.raises(SessionInUseError, match="taken by another engine"):
        late.own()
    late.unlink()
    late.close()


def test_dead_owner_with_a_living_worker_gets_a_new_region(region, session_name):
    region.own()
    os.close(region._owner_fd)  # the engine died; this mapping is its worker's
    region._owner_fd = -1
    fresh = PrimaryRegion.open(config_of(session_name), timeout_s=0.2)
    region.slot_view(0)[:4] = b"late"
    assert bytes(fresh.slot_view(0)[:4]) == bytes(4)
    region.unlink()  # a late close of the old one does not take the new name
    assert os.path.exists(names.SHM_DIR + names.region_name(session_name))
    fresh.unlink()
    fresh.close()
    names.sweep(session_name)


def test_region_of_a_dead_session_is_cleared(session_name):
    first = PrimaryRegion.open(config_of(session_name))
    first.own()
    first.hand_out(0, 1, KEY, 10)
    first.close()
    second = PrimaryRegion.open(config_of(session_name))
    assert second.record(0) == (0, SlotState.FREE, b"", 0)
    second.own()
    second.close()
    third = PrimaryRegion.open(config_of(session_name, slots=9))
    assert third.num_slots == 9
    third.own()
    third.unlink()
    third.close()


@pytest.mark.parametrize(
    "other", [{"slots": 8}, {"block_bytes": 4999}, {"namespace": "other"}]
)
def test_another_geometry_is_refused(region, session_name, other):
    with pytest.raises(RegionMismatchError, match="7 blocks of 5000 bytes"):
        PrimaryRegion.open(config_of(session_name, **other))


@pytest.mark.parametrize("word", [3, 4], ids=["slots", "block bytes"])
def test_a_damaged_size_is_a_header_that_does_not_hold(region, word):
    """Too large to be packed: a start makes another region, in words if not."""
    os.pwrite(region.fd, (2**64 - 4096).to_bytes(8, "little"), word * 8)
    with pytest.raises(StartError, match="no primary region"):
        PrimaryRegion.from_fd(os.dup(region.fd))


def test_from_fd_believes_only_a_header_that_holds(region):
    worker = PrimaryRegion.from_fd(os.dup(region.fd))
    region.slot_view(1)[:2] = b"ok"
    assert bytes(worker.slot_view(1)[:2]) == b"ok"
    assert (worker.num_slots, worker.block_bytes) == (7, BLOCK_BYTES)
    assert worker.namespace == region.namespace
    worker.unlink()  # not its maker: no name goes
    worker.close()
    for at in (0, 8, 16, 24, 32, 40, 48, 64):
        true = os.pread(region.fd, 1, at)
        os.pwrite(region.fd, bytes([true[0] ^ 0x41]), at)
        with pytest.raises(StartError, match="no primary region"):
            PrimaryRegion.from_fd(os.dup(region.fd))
        os.pwrite(region.fd, true, at)
    PrimaryRegion.from_fd(os.dup(region.fd)).close()


def test_link_and_foreign_file_at_the_name_are_refused(session_name, tmp_path):
    path = names.SHM_DIR + names.region_name(session_name)
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    os.symlink(target, path)
    with pytest.raises(StartError, match="remove it, or choose another"):
        PrimaryRegion.open(config_of(session_name))
    os.unlink(path)
    assert target.read_bytes() == b"precious"
    if os.geteuid() != 0:
        return
    with open(path, "wb"):
        os.chown(path, 12345, 12345)
    with pytest.raises(StartError, match="remove it, or choose another"):
        PrimaryRegion.open(config_of(session_name))
    assert names.sweep(session_name) == []
    os.unlink(path)


def test_populate_without_the_kernels_help_changes_no_byte(
    session_name, region, monkeypatch
):
    region.stride_view(2)[:] = b"x" * region.stride
    monkeypatch.setattr(room, "_MADV_POPULATE_WRITE", 9999)
    joined = PrimaryRegion.open(config_of(session_name))
    assert bytes(joined.stride_view(2)) == b"x" * region.stride
    joined.close()


def test_populate_refused_leaves_no_name(session_name, monkeypatch):
    monkeypatch.setattr(room, "_MADV_POPULATE_WRITE", 9999)
    monkeypatch.setattr(room.errno, "EINVAL", 0)  # so that it is no old kernel
    with pytest.raises(room.RegionTooSmallError, match="the kernel refuses"):
        PrimaryRegion.open(config_of(session_name))
    assert not os.path.exists(names.SHM_DIR + names.region_name(session_name))


@pytest.mark.parametrize(
    ("variables", "docker", "fix"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, True, "emptyDir with medium: Memory"),
        ({}, True, "--shm-size="),
        ({}, False, "mount -o remount,size="),
    ],
)
def test_too_small_says_the_fix_of_the_place(
    session_name, monkeypatch, variables, docker, fix
):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(room.Path, "exists", lambda _self: docker)
    with pytest.raises(room.RegionTooSmallError, match=fix) as caught:
        PrimaryRegion.open(config_of(session_name, slots=1 << 40))
    needed = region_join.Geometry(1 << 40, BLOCK_BYTES, b"").file_bytes
    assert f"needs {needed} bytes" in str(caught.value)
    assert "bytes free" in str(caught.value)


@pytest.mark.parametrize(
    ("code", "limit", "kind", "words"),
    [
        (errno.EFBIG, 4096, room.RegionTooSmallError, "4096 bytes at most.*ulimit -f"),
        (errno.EFBIG, -1, room.RegionTooSmallError, "bytes free"),
        (errno.ENOSPC, -1, room.RegionTooSmallError, "bytes free"),
        (errno.EDQUOT, -1, room.RegionTooSmallError, "bytes free"),
        (errno.EOPNOTSUPP, -1, StartError, "has to be a tmpfs"),
    ],
)
def test_each_refusal_of_memory_has_its_sentence_and_leaves_no_name(
    session_name, monkeypatch, code, limit, kind, words
):
    def refuse(*_args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    with pytest.raises(kind, match=words):
        PrimaryRegion.open(config_of(session_name))
    assert not os.path.exists(names.SHM_DIR + names.region_name(session_name))


def test_an_engine_owns_its_region_without_room_for_its_pid(region, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    region.own()


def test_cgroup_without_head_room_is_warned_about(session_name, monkeypatch, caplog):
    monkeypatch.setattr(room, "cgroup_headroom", lambda: 1000)
    opened = PrimaryRegion.open(config_of(session_name))
    opened.unlink()
    opened.close()
    assert "the memory limit of this cgroup leaves 0 MiB" in caplog.text


def test_stride_view_is_a_block_with_its_header(region):
    region.slot_view(4)[:] = os.urandom(BLOCK_BYTES)
    header = layout.seal_header(KEY, region.slot_view(4), region.namespace)
    region.header_view(4)[: len(header)] = header
    whole = region.stride_view(4)
    assert layout.header_matches(
        whole[-4096:], KEY, whole[:BLOCK_BYTES], region.namespace
    )


def test_words_of_copies_are_one_per_rank_and_kind(region, session_name):
    words = [(rank, kind) for rank in range(MAX_RANKS) for kind in (0, 1)]
    assert all(region.copies_done(*word) == 0 for word in words)
    for number, word in enumerate(words, start=1):
        region.set_copies_done(*word, number)
    second = PrimaryRegion.open(config_of(session_name))
    assert [second.copies_done(*word) for word in words] == list(range(1, 257))
    second.set_copies_done(MAX_RANKS - 1, 1, 2**63)
    assert region.copies_done(MAX_RANKS - 1, 1) == 2**63
    assert all(region.record(slot) == (0, SlotState.FREE, b"", 0) for slot in range(7))
    assert bytes(region.slot_view(0)) == bytes(BLOCK_BYTES)
    second.close()
    fd = os.dup(region.fd)
    handed = PrimaryRegion.from_fd(fd)  # its header still holds
    assert handed.copies_done(3, 1) == 8
    handed.close()


@pytest.mark.parametrize("word", [(-1, 0), (MAX_RANKS, 0), (0, -1), (0, 2)])
def test_no_word_of_copies_outside(region, word):
    with pytest.raises(IndexError, match="has no word"):
        region.copies_done(*word)
    with pytest.raises(IndexError, match="has no word"):
        region.set_copies_done(*word, 1)


@pytest.mark.parametrize("slots", [7, 9])
def test_words_of_copies_begin_anew_when_all_others_are_gone(session_name, slots):
    dead = PrimaryRegion.open(config_of(session_name))
    dead.own()
    dead.set_copies_done(0, 0, 5)
    dead.set_copies_done(MAX_RANKS - 1, 1, 6)
    dead.close()  # without unlink, as a SIGKILL leaves it
    reused = PrimaryRegion.open(config_of(session_name, slots=slots))
    reused.own()
    assert reused.copies_done(0, 0) == reused.copies_done(MAX_RANKS - 1, 1) == 0
    reused.unlink()
    reused.close()
