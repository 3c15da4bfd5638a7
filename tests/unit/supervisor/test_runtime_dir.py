"""The runtime directory: whose it is, how long a path may be, one daemon each."""

import fcntl
import os
import socket

import pytest

from shmoffload.errors import SessionInUseError, StartError
from shmoffload.supervisor import runtime_dir, spawn


@pytest.fixture
def where(tmp_path, monkeypatch):
    path = tmp_path / "run"
    monkeypatch.setenv("SHMOFFLOAD_RUNTIME_DIR", str(path))
    return path


def test_the_three_places(monkeypatch):
    monkeypatch.delenv("SHMOFFLOAD_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert str(runtime_dir.runtime_path()) == f"/tmp/shmoffload-{os.geteuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert str(runtime_dir.runtime_path()) == "/run/user/7/shmoffload"
    monkeypatch.setenv("SHMOFFLOAD_RUNTIME_DIR", "/elsewhere")
    assert str(runtime_dir.runtime_path()) == "/elsewhere"


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_made_for_us_alone_whatever_the_umask(where, umask, monkeypatch):
    where = where / "deep" / "er"
    monkeypatch.setenv("SHMOFFLOAD_RUNTIME_DIR", str(where))
    old = os.umask(umask)
    try:
        with runtime_dir.listening("s"):
            for directory in (where, where.parent, where.parent.parent):
                assert directory.stat().st_mode & 0o777 == 0o700
            for name in ("s.lock", "s.sock"):
                assert (where / name).stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(old)


def test_looking_makes_nothing(where):
    assert runtime_dir.open_runtime_dir(create=False) is None
    assert spawn.connect_daemon("s") is None
    assert not where.exists()


def test_symlink_is_refused(where, tmp_path):
    where.symlink_to(tmp_path)
    for create in (True, False):
        with pytest.raises(StartError, match="remove it, or set SHMOFFLOAD_RUNTIME"):
            runtime_dir.open_runtime_dir(create=create)


def test_open_to_others_is_refused(where):
    where.mkdir(mode=0o700)
    where.chmod(0o777)
    with pytest.raises(StartError, match="mode 0777"):
        runtime_dir.open_runtime_dir(create=False)


def test_another_users_directory_is_refused(tmp_path):
    tmp_path.chmod(0o700)
    status = tmp_path.stat()
    assert runtime_dir.directory_fault(status, uid=status.st_uid) == ""
    fault = runtime_dir.directory_fault(status, uid=status.st_uid + 1)
    assert fault == f"belongs to user {status.st_uid}, not to {status.st_uid + 1}"


@pytest.mark.parametrize("depth", [0, 120])
def test_socket_works_whatever_the_length_of_its_path(where, monkeypatch, depth):
    path = where.parent / ("d" * depth or "d")
    monkeypatch.setenv("SHMOFFLOAD_RUNTIME_DIR", str(path))
    with runtime_dir.listening("s") as listener:
        channel = spawn.connect_daemon("s")
        assert channel is not None
        listener.accept()[0].close()
        channel.close()
    assert list(path.iterdir()) == []


def test_one_daemon_a_session(where):
    with runtime_dir.listening("s"):
        with pytest.raises(SessionInUseError, match=f"by process {os.getpid()}"):
            runtime_dir.listening("s").__enter__()
        with runtime_dir.listening("other"):
            pass
    with runtime_dir.listening("s"):
        pass


def test_lock_that_was_removed_meanwhile_is_none(where, monkeypatch):
    """A `clean` between open and flock: both daemons would hold "the" lock."""
    real, removed = runtime_dir._lock, []

    def lock(fd, session):
        real(fd, session)
        if len(removed) < 3:
            (where / "s.lock").unlink()
            removed.append(fd)

    monkeypatch.setattr(runtime_dir, "_lock", lock)
    with runtime_dir.listening("s"):
        assert len(removed) == 3
        with pytest.raises(SessionInUseError):
            runtime_dir.listening("s").__enter__()
    removed.clear()
    monkeypatch.setattr(runtime_dir, "_LOCK_TRIES", 3)
    with pytest.raises(StartError, match="removed again and again"):
        runtime_dir.listening("s").__enter__()


def test_a_look_at_the_lock_does_not_refuse_a_start(where, monkeypatch):
    """`doctor` and `clean` hold it for an instant."""
    where.mkdir(mode=0o700)
    looking = [os.open(where / "s.lock", os.O_CREAT | os.O_RDWR)]
    fcntl.flock(looking[0], fcntl.LOCK_EX)
    monkeypatch.setattr(runtime_dir, "pause", lambda: os.close(looking.pop()))
    with runtime_dir.listening("s"):
        assert not looking


def test_stale_socket_is_replaced(where):
    where.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(where / "s.sock"))
    assert spawn.connect_daemon("s") is None
    with runtime_dir.listening("s"):
        channel = spawn.connect_daemon("s")
        assert channel is not None
        channel.close()
