"""Names in /dev/shm: who holds one, what a sweep takes."""

import os

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
