"""Storage that can never work is one sentence, at once; the rest may be tried again."""

import contextlib
import errno
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from executor_kit import HeapPage
from slab_kit import OK, folder_of, open_slab, store

from shmoffload.errors import TierConfigError
from shmoffload.testing.tier_tests import HeapRegion, deadline, key_of
from shmoffload.wire.channel import channel_pair
from shmoffload.wire.config import TierConfig, from_dict
from shmoffload.wire.messages import Hello, decode_from_worker
from shmoffload.worker.serve import EXIT_CONFIG, EXIT_FAILED, Worker
from shmoffload.worker.tiers.fs import FsTier
from shmoffload.worker.tiers.place import take_place
from shmoffload.worker.tiers.slab_index import discard

SLAB_FILES = [
    "lock",
    "slab.bin",
    "probe",
    "index.sqlite",
    "index.sqlite-wal",
    "index.sqlite-shm",
    "index.sqlite-journal",
]


def open_fs(path, region):
    tier = FsTier()
    config = TierConfig(type="fs", name="f", path=str(path), max_bytes="1MiB")
    try:
        tier.open(config, region, region.namespace)
    except BaseException:
        tier.close()
        raise
    return tier


OPEN = {"slab": open_slab, "fs": open_fs}


def refusal(kind, path, region=None):
    """What a tier says when it is opened on ``path``."""
    with pytest.raises(TierConfigError) as caught:
        OPEN[kind](path, region or HeapRegion())
    text = str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in text
    assert not text.startswith("tier "), "the engine puts the tier's name before it"
    assert ": " in text, "what is, and then what to do"
    return text


def plant(path, what):
    if what == "a directory":
        path.mkdir()
        (path / "precious").write_text("")
    elif what == "a symbolic link":
        path.symlink_to("/etc/passwd")
    else:
        os.mkfifo(path)


@pytest.mark.parametrize("what", ["a directory", "a symbolic link", "a pipe"])
@pytest.mark.parametrize(
    ("kind", "name"), [*(("slab", name) for name in SLAB_FILES), ("fs", "lock")]
)
def test_what_has_the_name_of_a_file_of_ours_is_named_and_left(
    tmp_path, kind, name, what
):
    region = HeapRegion()
    OPEN[kind](tmp_path, region).close()
    path = folder_of(tmp_path, region) / name
    path.unlink(missing_ok=True)
    plant(path, what)
    for _ in range(2):  # the second start is no better off
        text = refusal(kind, tmp_path, region)
        assert f"{path} is {what} and not a plain file" in text
        assert "remove it" in text
    assert os.path.lexists(path)


def test_a_directory_among_what_is_discarded_is_named(tmp_path):
    region = HeapRegion()
    config = TierConfig(type="slab", name="s", path=str(tmp_path))
    place = take_place(config, region.namespace)
    (folder_of(tmp_path, region) / "index.sqlite-wal").mkdir()
    with pytest.raises(TierConfigError, match=r"index\.sqlite-wal is a directory"):
        discard(place)
    place.close()


@pytest.mark.parametrize("what", ["a file", "a symbolic link", "a pipe"])
def test_fs_needs_its_directories(tmp_path, what):
    region = HeapRegion()
    open_fs(tmp_path, region).close()
    path = folder_of(tmp_path, region) / "7f"
    path.rmdir()
    if what == "a file":
        path.write_text("")
    elif what == "a symbolic link":
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        path.symlink_to(elsewhere)
    else:
        os.mkfifo(path)
    assert f"{path} cannot be used (Not a directory)" in refusal("fs", tmp_path, region)


def test_a_pipe_in_the_place_of_a_block_is_not_waited_for(tmp_path):
    region = HeapRegion()
    tier = open_fs(tmp_path, region)
    store(tier, region, [key_of(0)])
    name = key_of(0).hex()
    path = folder_of(tmp_path, region) / name[:2] / name
    path.unlink()
    os.mkfifo(path)
    assert [status.name for status in tier.get([key_of(0)], [9], deadline())] == ["BAD"]
    tier.close()


@contextlib.contextmanager
def without_root():
    """Run as somebody whom file modes bind; yields a directory of his."""
    folder = Path(tempfile.mkdtemp(prefix="shmoffload-test-"))
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.chown(folder, 65534, 65534)
            os.seteuid(65534)
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        subprocess.run(["chmod", "-R", "u+rwx", str(folder)], check=True)
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", ["slab.bin", "index.sqlite", "lock"])
def test_a_file_without_permission_is_named(name):
    with without_root() as folder:
        region = HeapRegion()
        open_slab(folder, region).close()
        path = folder_of(folder, region) / name
        path.chmod(0)
        text = refusal("slab", folder, region)
        assert f"{path} cannot be used (Permission denied, mode 0000)" in text
        path.chmod(0o600)
        open_slab(folder, region).close()


@pytest.mark.parametrize("kind", OPEN)
def test_a_directory_without_permission_is_named(kind):
    with without_root() as folder:
        folder.chmod(0o500)
        for path in (folder, folder / "deeper" / "still"):
            assert "cannot be used (Permission denied): give path" in refusal(
                kind, path
            )


@pytest.mark.parametrize("kind", OPEN)
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("a\0b", r"'a\x00b' has a NUL in it: give path a directory"),
        ("/tmp/" + "x" * 300, "cannot be used (File name too long)"),
        ("/tmp" + "/d" * 5000, "cannot be used (File name too long)"),
        ("/proc/1/fd/0/there", "cannot be used ("),
        ("/dev/null/there", "cannot be used (Not a directory)"),
        ("/proc/there", "cannot be used (No such file or directory)"),
    ],
)
def test_a_path_that_can_never_be_is_a_sentence(kind, path, words):
    text = refusal(kind, path)
    assert words in text
    assert len(text) < 500


def test_a_path_of_1500_levels_is_no_recursion(tmp_path):
    deep = tmp_path / "d"
    path = f"{deep}{'/d' * 1500}"
    try:
        region = HeapRegion()
        tier = open_fs(path, region)
        assert store(tier, region, [key_of(0)]) == [OK]
        tier.close()
        assert "SQLite takes at most 504 bytes of path" in refusal("slab", path)
    finally:
        subprocess.run(["rm", "-rf", str(deep)], check=True)


@pytest.mark.parametrize(
    "code",
    ["EISDIR", "ENXIO", "EACCES", "EPERM", "EROFS", "ENOTDIR", "ENAMETOOLONG", "ELOOP"],
)
@pytest.mark.parametrize("name", ["lock", "slab.bin", "index.sqlite", "ab"])
def test_what_the_system_will_always_say_is_a_sentence(
    tmp_path, monkeypatch, code, name
):
    number = getattr(errno, code)
    real = os.open

    def refuse(path, *args, **kwargs):
        if path == name:
            raise OSError(number, os.strerror(number), path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    text = refusal("fs" if name == "ab" else "slab", tmp_path)
    assert f"/{name} cannot be used ({os.strerror(number)})" in text


@pytest.mark.parametrize("code", ["EIO", "EMFILE", "ENOMEM"])
def test_what_may_pass_is_tried_again(tmp_path, monkeypatch, code):
    number = getattr(errno, code)
    real = os.open

    def refuse(path, *args, **kwargs):
        if path == "slab.bin":
            raise OSError(number, os.strerror(number), path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match=os.strerror(number)):
        open_slab(tmp_path, HeapRegion())


def test_the_limit_of_file_size_is_named(tmp_path, monkeypatch):
    def too_large(*_):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "posix_fallocate", too_large)
    assert "ulimit -f" in refusal("slab", tmp_path)


def test_a_full_disk_keeps_no_finished_slab_from_its_start(tmp_path, monkeypatch):
    region = HeapRegion()
    tier = open_slab(tmp_path, region)
    store(tier, region, [key_of(0)])
    tier.close()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        patch.setattr(os, "pwrite", full)
        tier = open_slab(tmp_path, region)
    assert tier.get([key_of(0)], [9], deadline()) == [OK]
    assert not (folder_of(tmp_path, region) / "probe").exists()
    tier.close()


# What the worker makes of it --------------------------------------------------------


@pytest.fixture
def worker():
    config = from_dict(
        {
            "session": {"name": "t"},
            "primary": {"slots": 2, "block_bytes": 4096},
            "tier": [{"type": "memory", "name": "m"}],
        }
    )
    engine, ours = channel_pair()
    page = HeapPage()
    made = Worker(
        ours, page, HeapRegion(), config, tier_idx=0, engine_epoch=1, worker_epoch=2
    )
    yield made, engine
    engine.close()
    ours.close()


def test_a_refusal_is_said_in_hello_and_not_in_the_log_too(worker, caplog):
    made, engine = worker
    error = TierConfigError("the disk is a rock: give path a disk")
    assert made._refuse(error, is_config_error=True) == EXIT_CONFIG
    (hello,) = decode_from_worker(engine.receive())
    assert hello == Hello(2, error=str(error), is_config_error=True)
    assert caplog.records == []


def test_what_nobody_heard_or_may_pass_is_logged(worker, caplog):
    made, engine = worker
    assert made._refuse(OSError("EIO"), is_config_error=False) == EXIT_FAILED
    assert caplog.messages == ["tier m: EIO"]
    engine.close()
    made._refuse(TierConfigError("a rock"), is_config_error=True)
    assert caplog.messages == ["tier m: EIO", "tier m: a rock"]
