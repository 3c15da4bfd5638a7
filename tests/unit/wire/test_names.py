"""Names in /dev/shm: who holds one, what a sweep takes."""

import errno
import os

import posix_ipc
import pytest

from shmoffload.errors import BadInputError, RegionTooSmallError, StartError
from shmoffload.wire import names


def test_lock_tells_who_is_alive(session_name):
    name = names.page_name(session_name)
    assert not names.is_held(name)
    fd = names.open_name(name)
    assert not names.is_held(name)
    assert names.try_lock(fd, exclusive=False)
    assert names.is_held(name)
    assert not names.is_held(name, exclusively=True)
    assert session_name in names.live_sessions()
    assert names.sweep(session_name) == []
    assert names.try_lock(fd, exclusive=True)
    assert names.is_held(name, exclusively=True)
    os.close(fd)
    assert session_name not in names.live_sessions()
    assert names.sweep(session_name) == [name[1:]]


def test_sweep_of_one_session_spares_the_others(session_name):
    other = session_name + "x"
    for session in (session_name, other):
        os.close(names.open_name(names.region_name(session)))
    assert names.sweep(session_name) == [f"shmoffload.{session_name}.region"]
    assert names.sweep(other) == [f"shmoffload.{other}.region"]


def test_who_opened_a_swept_name_sees_it(session_name):
    fd = names.open_name(names.region_name(session_name))
    assert not names.is_unlinked(fd)
    names.sweep(session_name)
    assert names.is_unlinked(fd)
    assert not names.unlink_same(names.region_name(session_name), fd)
    os.close(fd)


def test_names_are_close_on_exec_and_private(session_name):
    fd = names.open_name(names.owner_name(session_name))
    assert not os.get_inheritable(fd)
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    assert names.unlink_same(names.owner_name(session_name), fd)
    os.close(fd)


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (errno.EROFS, BadInputError, "is mounted read-only: type `mount -o remount,rw"),
        (errno.ENOSPC, RegionTooSmallError, "takes no further file .*nr_inodes"),
        (errno.EDQUOT, RegionTooSmallError, "takes no further file .*quota"),
        (errno.ENOENT, BadInputError, "there is no /dev/shm: type"),
        (errno.EACCES, BadInputError, "may make no file in /dev/shm: type `chmod"),
        (errno.ELOOP, StartError, "it is a link, or another user's; remove it"),
        (errno.EMFILE, StartError, "raise the limit .ulimit -n"),
        (errno.EIO, StartError, "cannot be opened: .*Input/output error"),
    ],
)
def test_each_refusal_of_shared_memory_has_its_sentence(
    session_name, monkeypatch, code, kind, words
):
    def refuse(*_args, **_kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(posix_ipc, "SharedMemory", refuse)
    with pytest.raises(kind, match=words) as caught:
        names.open_name(names.page_name(session_name))
    assert caught.value.exit_code == (1 if kind is StartError else 2)


def test_a_name_that_is_there_and_not_for_us_is_anothers(session_name, monkeypatch):
    name = names.page_name(session_name)
    os.close(names.open_name(name))

    def refuse(*_args, **_kwargs):
        raise posix_ipc.PermissionsError("No permission")

    with monkeypatch.context() as patch:
        patch.setattr(posix_ipc, "SharedMemory", refuse)
        with pytest.raises(StartError, match="it is a link, or another user's"):
            names.open_name(name)
    assert names.sweep(session_name) == [name[1:]]


def test_without_shared_memory_no_session_is_live(monkeypatch, tmp_path):
    monkeypatch.setattr(names, "SHM_DIR", str(tmp_path / "none"))
    assert list(names.live_sessions()) == []
    assert names.sweep() == []
