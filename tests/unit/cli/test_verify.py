"""Scrubbing a disk tier: it finds what is wrong, all of it, and repairs only that."""

import errno
import json
import os
import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from shmoffload.cli import main
from shmoffload.cli.verify import verify_command
from shmoffload.errors import BadInputError, TierError
from shmoffload.testing.tier_tests import HeapRegion, deadline, key_of
from shmoffload.wire.config import TierConfig
from shmoffload.wire.layout import HEADER_BYTES, namespace_digest
from shmoffload.worker import scrub as scrub_
from shmoffload.worker.tier import BlockStatus
from shmoffload.worker.tiers.fs import FsTier
from shmoffload.worker.tiers.slab import SlabTier

ROOT = Path(__file__).parents[3]
OK, MISS, BAD, FAIL = BlockStatus
RIGHT, WRONG = 0, 1
NUM = 8
KEYS = [key_of(i) for i in range(NUM)]


class Disk:
    """A tier's path with ``NUM`` blocks in it, and ways to spoil them."""

    def __init__(self, kind, path, region=None):
        self.kind, self.path = kind, path
        self.region = region or HeapRegion(NUM)
        self.folder = path / self.region.namespace.hex()
        tier = self.open()
        for i, key in enumerate(KEYS):
            self.region.fill(i, key)
        assert tier.put(KEYS, range(NUM), deadline()) == [OK] * NUM
        tier.close()

    def open(self):
        tier = {"slab": SlabTier, "fs": FsTier}[self.kind]()
        config = TierConfig(
            type=self.kind,
            name="t",
            path=str(self.path),
            max_bytes=NUM * self.region.stride,
            min_free=0,
        )
        tier.open(config, self.region, self.region.namespace)
        return tier

    def statuses(self):
        """What the tier itself answers; the framework's check comes behind."""
        tier = self.open()
        try:
            return tier.get(KEYS, range(NUM), deadline())
        finally:
            tier.close()

    def where(self, i):
        """File and offset of a block."""
        if self.kind == "fs":
            name = KEYS[i].hex()
            return self.folder / name[:2] / name, 0
        with sqlite3.connect(self.folder / "index.sqlite") as db:
            row = db.execute("SELECT slot FROM blocks WHERE key = ?", (KEYS[i],))
            (slot,) = row.fetchone()
        db.close()
        return self.folder / "slab.bin", slot * self.region.stride

    def read(self, i):
        path, at = self.where(i)
        with path.open("rb") as file:
            file.seek(at)
            return file.read(self.region.stride)

    def write(self, i, data, at=0):
        path, start = self.where(i)
        with path.open("r+b") as file:
            file.seek(start + at)
            file.write(data)

    def flip(self, i, at):
        self.write(i, bytes([self.read(i)[at] ^ 0x10]), at)

    def everything(self):
        """All that a look must not change."""
        return {
            str(path): (path.stat().st_mtime_ns, path.read_bytes())
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and not path.name.endswith(("-wal", "-shm"))
        }


@pytest.fixture(params=["slab", "fs"])
def disk(request, tmp_path):
    return Disk(request.param, tmp_path)


@pytest.fixture
def files(tmp_path):
    return Disk("fs", tmp_path)


@pytest.fixture
def slab(tmp_path):
    return Disk("slab", tmp_path)


def verify(disk, capsys, *options, path=None):
    """Exit code and the only directory of ``--json``."""
    code = verify_command([str(path or disk.path), "--json", *options])
    seen = json.loads(capsys.readouterr().out)
    assert seen["ok"] == (code == RIGHT)
    (directory,) = seen["directories"]
    return code, directory


def test_whole_tier_is_right_and_untouched(disk, capsys):
    before = disk.everything()
    code, seen = verify(disk, capsys)
    assert (code, seen["type"], seen["blocks"], seen["bad_blocks"]) == (
        RIGHT,
        disk.kind,
        NUM,
        0,
    )
    assert seen["bytes"] == NUM * disk.region.stride
    assert verify(disk, capsys, path=disk.folder)[0] == RIGHT
    assert disk.everything() == before
    assert disk.statuses() == [OK] * NUM


def spoil_payload(disk):
    disk.flip(0, 3000)
    return "wrong checksum"


def spoil_header(disk):
    disk.flip(0, disk.region.stride - 4096 + HEADER_BYTES - 1)
    return "damaged header"


def spoil_key(disk):
    disk.write(0, disk.read(1))
    return "another block's header"


def spoil_namespace(disk):
    other = HeapRegion(1, namespace=namespace_digest("others"))
    other.fill(0, KEYS[0])
    disk.write(0, bytes(other.stride_view(0)))
    return "another block's header"


def spoil_size(disk):
    """A header of the right key for a smaller block at the stride's end."""
    small = HeapRegion(1, block_bytes=100)
    small.fill(0, KEYS[0])
    disk.write(0, bytes(small.header_view(0)), disk.region.stride - 4096)
    return "wrong length"


def spoil_padding(disk):
    disk.flip(0, disk.region.block_bytes)
    return "damaged padding"


def spoil_the_rest_of_the_page(disk):
    disk.flip(0, disk.region.stride - 1)
    return "damaged header"


SPOILS = [
    spoil_payload,
    spoil_header,
    spoil_key,
    spoil_namespace,
    spoil_size,
    spoil_padding,
    spoil_the_rest_of_the_page,
]


@pytest.mark.parametrize("spoil", SPOILS)
def test_bad_block_is_found_and_left_then_put_aside(disk, capsys, spoil):
    reason = spoil(disk)
    before = disk.everything()
    code, seen = verify(disk, capsys)
    assert (code, seen["bad_by_reason"], seen["repaired"]) == (WRONG, {reason: 1}, 0)
    assert seen["first_bad"] == [{"block": KEYS[0].hex(), "reason": reason}]
    assert disk.everything() == before

    code, seen = verify(disk, capsys, "--repair")
    assert (code, seen["repaired"]) == (WRONG, 1)
    code, seen = verify(disk, capsys)
    assert (code, seen["blocks"]) == (RIGHT, NUM - 1)
    assert disk.statuses() == [MISS] + [OK] * (NUM - 1)


def test_two_swapped_blocks(disk, capsys):
    first, second = disk.read(0), disk.read(1)
    disk.write(0, second)
    disk.write(1, first)
    seen = verify(disk, capsys, "--repair")[1]
    assert seen["bad_by_reason"] == {"another block's header": 2}
    assert disk.statuses() == [MISS, MISS] + [OK] * (NUM - 2)


def test_every_single_flip_is_found(disk, capsys):
    """A bit anywhere in payload, padding and header page."""
    chance = random.Random(5)
    header_at = disk.region.stride - 4096
    for _ in range(150):
        i, at = chance.randrange(NUM), chance.randrange(disk.region.stride)
        if chance.random() < 0.2:
            at = header_at + chance.randrange(HEADER_BYTES)
        disk.flip(i, at)
        code, seen = verify(disk, capsys)
        assert (code, seen["bad_blocks"]) == (WRONG, 1), (i, at)
        disk.flip(i, at)
    assert verify(disk, capsys)[0] == RIGHT


def test_quarantined_file_is_kept_for_a_look(files, capsys):
    spoiled = files.where(0)[0]
    spoil_payload(files)
    data = spoiled.read_bytes()
    verify(files, capsys, "--repair")
    quarantine = files.folder / "quarantine"
    assert (quarantine / spoiled.name).read_bytes() == data
    assert quarantine.stat().st_mode & 0o777 == 0o700
    files.open().close()  # a tier does not mind
    assert (quarantine / spoiled.name).exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: os.truncate(path, 5000), "wrong length"),
        (lambda path: os.truncate(path, 8192), "damaged header"),
        (lambda path: os.truncate(path, 0), "wrong length"),
        (lambda path: path.write_bytes(path.read_bytes() * 2), "wrong length"),
        (lambda path: (path.unlink(), path.symlink_to("/dev/zero")), "no plain file"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "no plain file"),
        (lambda path: (path.unlink(), path.mkdir()), "no plain file"),
    ],
)
def test_file_that_is_not_whole(files, capsys, change, reason):
    change(files.where(0)[0])
    code, seen = verify(files, capsys, "--repair")
    assert (code, seen["bad_by_reason"]) == (WRONG, {reason: 1})
    assert verify(files, capsys)[0] == RIGHT
    assert files.statuses() == [MISS] + [OK] * (NUM - 1)


def test_file_under_another_keys_name(files, capsys):
    path = files.where(0)[0]
    name = key_of(99).hex()
    (files.folder / name[:2] / name).write_bytes(path.read_bytes())
    seen = verify(files, capsys)[1]
    assert (seen["blocks"], seen["bad_by_reason"]) == (
        NUM + 1,
        {"another block's header": 1},
    )


def test_strangers_are_counted_and_left_alone(files, capsys):
    stranger = files.where(0)[0].parent / "notes.txt"
    stranger.write_text("mine")
    code, seen = verify(files, capsys, "--repair")
    assert (code, seen["strangers"], seen["blocks"]) == (RIGHT, 1, NUM)
    assert stranger.read_text() == "mine"


def test_slab_that_was_cut(slab, capsys):
    os.truncate(slab.folder / "slab.bin", (NUM - 2) * slab.region.stride)
    code, seen = verify(slab, capsys, "--repair")
    assert (code, seen["bad_by_reason"]) == (WRONG, {"wrong length": 2})
    assert slab.statuses().count(OK) == NUM - 2


def test_row_that_is_none_of_ours(slab, capsys):
    with sqlite3.connect(slab.folder / "index.sqlite") as db:
        db.execute("UPDATE blocks SET key = 'text' WHERE key = ?", (KEYS[0],))
    db.close()
    code, seen = verify(slab, capsys, "--repair")
    assert (code, seen["bad_blocks"], seen["repaired"]) == (WRONG, 1, 1)
    assert slab.statuses() == [MISS] + [OK] * (NUM - 1)


def lose_index(folder):
    (folder / "index.sqlite").unlink()


def spoil_index(folder):
    (folder / "index.sqlite").write_bytes(b"garbage" * 1000)


def swap_index(folder):
    with sqlite3.connect(folder / "index.sqlite") as db:
        db.execute("UPDATE meta SET value = ? WHERE name = 'namespace'", (b"x" * 16,))
    db.close()


def spoil_stride(folder):
    with sqlite3.connect(folder / "index.sqlite") as db:
        db.execute("UPDATE meta SET value = 4097 WHERE name = 'stride'")
    db.close()


@pytest.mark.parametrize("spoil", [lose_index, spoil_index, swap_index, spoil_stride])
def test_without_its_index_a_slab_is_read_by_headers(slab, capsys, spoil):
    spoil_payload(slab)
    spoil_place = slab.where(1)
    spoil(slab.folder)
    code, seen = verify(slab, capsys, "--repair")
    assert (code, seen["blocks"], seen["repaired"]) == (WRONG, NUM, 0)
    assert seen["bad_by_reason"] == {"wrong checksum": 1}
    assert "the index cannot be used" in seen["notes"][0]
    assert spoil_place[0].exists()


def test_empty_slab(slab, capsys):
    lose_index(slab.folder)
    (slab.folder / "slab.bin").write_bytes(bytes(NUM * slab.region.stride))
    code, seen = verify(slab, capsys)
    assert (code, seen["blocks"]) == (RIGHT, 0)
    assert seen["notes"][-1] == "no block was found in the slab"


def test_planted_index_is_not_followed(slab, capsys, tmp_path):
    lose_index(slab.folder)
    (slab.folder / "index.sqlite").symlink_to(tmp_path / "elsewhere")
    assert verify(slab, capsys)[1]["blocks"] == NUM
    assert not (tmp_path / "elsewhere").exists()


def test_rows_after_a_kill_are_seen(slab, capsys):
    """What is only in the write-ahead log counts: nobody has closed the index."""
    tier = slab.open()
    extra = key_of(77)
    slab.region.fill(0, extra)
    try:
        tier.put([extra], [0], deadline())
        wal = (slab.folder / "index.sqlite-wal").read_bytes()
        main = (slab.folder / "index.sqlite").read_bytes()
    finally:
        tier.close()
    (slab.folder / "index.sqlite-wal").write_bytes(wal)
    (slab.folder / "index.sqlite").write_bytes(main)
    code, seen = verify(slab, capsys)
    assert (code, seen["blocks"]) == (RIGHT, NUM)
    tier = slab.open()
    assert tier.exists([extra], deadline()) == [True]
    tier.close()


def test_served_tier_is_refused(disk, capsys):
    tier = disk.open()
    try:
        with pytest.raises(BadInputError, match=f"served by process {os.getpid()}"):
            verify_command([str(disk.path)])
    finally:
        tier.close()
    assert verify(disk, capsys)[0] == RIGHT


def test_while_it_reads_no_worker_can_start(disk, monkeypatch, capsys):
    from shmoffload.errors import TierConfigError
    from shmoffload.worker.tiers import place

    monkeypatch.setattr(place, "LOCK_WAIT_S", 0.0)
    monkeypatch.setattr(place.take_place, "__kwdefaults__", {"timeout_s": 0.0})
    seen = []
    real = scrub_._checksum

    def checksum(*words):
        if not seen:
            with pytest.raises(TierConfigError, match="is in use") as caught:
                disk.open()
            seen.append(caught.value)
        return real(*words)

    monkeypatch.setattr(scrub_, "_checksum", checksum)
    assert verify(disk, capsys)[0] == RIGHT
    assert seen


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("{tmp}", "has no namespace of a tier in it"),
        ("{tmp}/nope", "cannot be read .No such file"),
        ("{tmp}/file", "cannot be read .Not a directory"),
        ("{tmp}/\0", "cannot be read"),
        ("", "cannot be read"),
    ],
)
def test_no_tier_is_bad_input(tmp_path, path, words):
    (tmp_path / "file").touch()
    with pytest.raises(BadInputError, match=words):
        verify_command([path.format(tmp=tmp_path)])


def test_only_what_has_our_marks_is_a_namespace(tmp_path):
    (tmp_path / ("a" * 32)).mkdir()  # no lock in it
    (tmp_path / ("b" * 32)).symlink_to("/")
    (tmp_path / ("c" * 31)).mkdir()
    with pytest.raises(BadInputError, match="has no namespace"):
        verify_command([str(tmp_path)])


def test_disk_that_does_not_read_is_a_bad_block(disk, monkeypatch, capsys):
    def fail(*_words):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(scrub_, "_checksum", fail)
    code, seen = verify(disk, capsys)
    assert code == WRONG
    assert seen["bad_by_reason"] == {"unreadable (Input/output error)": NUM}


def test_our_own_trouble_is_not_the_blocks(disk, monkeypatch):
    def fail(*_words):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(scrub_, "_checksum", fail)
    with pytest.raises(TierError, match=r"cannot be read on .*Too many open files"):
        verify_command([str(disk.path), "--repair"])
    monkeypatch.undo()
    assert disk.statuses() == [OK] * NUM


def test_blocks_are_read_in_pieces(disk, monkeypatch, capsys):
    asked = []
    real = os.pread

    def pread(fd, size, at):
        asked.append(size)
        return real(fd, size, at)

    monkeypatch.setattr(scrub_, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(scrub_.os, "pread", pread)
    assert verify(disk, capsys)[0] == RIGHT
    assert max(asked) <= 4096  # a header page; blocks have 5000 bytes


def test_list_is_bounded_and_the_screen_says_so(disk, monkeypatch, capsys):
    monkeypatch.setattr(scrub_, "MAX_LISTED", 2)
    for i in range(NUM):
        disk.flip(i, 0)
    assert verify_command([str(disk.path)]) == WRONG
    out = capsys.readouterr().out
    assert f"{NUM} blocks" in out
    assert f"{NUM} bad ({NUM} wrong checksum)" in out
    assert out.count("  bad  ") == 2
    assert f"  and {NUM - 2} more\n" in out
    assert "Add --repair" in out


def test_two_namespaces_are_two_directories(tmp_path, capsys):
    Disk("fs", tmp_path)
    other = Disk("slab", tmp_path, HeapRegion(NUM, namespace=namespace_digest("b")))
    other.flip(3, 17)
    assert verify_command([str(tmp_path), "--json"]) == WRONG
    found = json.loads(capsys.readouterr().out)["directories"]
    assert sorted((one["type"], one["bad_blocks"]) for one in found) == [
        ("fs", 0),
        ("slab", 1),
    ]


def test_wrong_options(capsys):
    for words, sentence in (
        (["verify"], "are required: DIR"),
        (["verify", "/tmp", "--rapair"], "did you mean --repair?"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2
        assert sentence in capsys.readouterr().err


def test_script_works_without_an_installation(disk, tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "tools/verify.py", disk.path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{NUM} blocks" in done.stdout
