"""What disks and people do to the files of a tier.

Covers: single blocks of ``slab`` and ``fs`` tiers, found by what lies in the files.
Does not cover: the slab's index, whole files that go; faults of calls (``tier``).
Who calls it: tests and tools, any process and thread, beside a live worker or not;
waits for the disk. Nothing is locked: this is what nobody asks for leave to do.

    slab   PATH/<namespace>/slab.bin, its blocks as the index beside it names them
    fs     PATH/<namespace>/<first 2 hex digits>/<key in hex>
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from shmoffload.wire.layout import PAGE_BYTES
from shmoffload.worker.tiers.slab_file import SLAB_NAME
from shmoffload.worker.tiers.slab_index import INDEX_NAME

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator
    from pathlib import Path

_NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
_FILE: Final = re.compile(r"[0-9a-f]{10,80}")
_MAX_TRIES: Final = 8


class Damage(StrEnum):
    """What happens to the bytes of a block."""

    FLIP = "flip"
    """One bit, anywhere in it."""
    TRUNCATE = "truncate"
    """Its file ends early; of a slab the file ends within its last block."""
    SWAP = "swap"
    """Two blocks change places."""
    RENAME = "rename"
    """Its bytes lie under another block's name as well."""
    APPEND = "append"
    """Its file is a page longer; a slab bears that."""


@dataclass(frozen=True, slots=True)
class Block:
    """Where a block's bytes are: ``num_bytes`` at ``offset`` of a file."""

    key: bytes
    path: Path
    offset: int
    num_bytes: int

    def read(self) -> bytes:
        """Return its bytes; fewer if the file ends before."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.num_bytes)

    def write(self, data: bytes, at: int = 0) -> None:
        """Overwrite bytes of it in place."""
        with self.path.open("r+b", buffering=0) as file:
            file.seek(self.offset + at)
            file.write(data)

    def flip(self, rng: random.Random) -> None:
        """Flip one of its bits."""
        at = rng.randrange(self.num_bytes)
        old = self.read()[at]
        self.write(bytes([old ^ 1 << rng.randrange(8)]), at)

    def truncate(self, rng: random.Random) -> None:
        """Let its file end within it; whatever lies behind is gone, too."""
        left = rng.choice((0, 1, rng.randrange(self.num_bytes)))
        os.truncate(self.path, self.offset + left)

    def append(self, num_bytes: int = PAGE_BYTES) -> None:
        """Let its file be longer."""
        with self.path.open("ab") as file:
            file.write(b"\0" * num_bytes)

    def swap(self, other: Block) -> None:
        """Change places with another block."""
        mine, others = self.read(), other.read()
        self.write(others)
        other.write(mine)

    def copy_to(self, other: Block) -> None:
        """Put its bytes where another block is looked for."""
        other.write(self.read())

    def __str__(self) -> str:
        return f"{self.key.hex()[:12]} in {self.path} at {self.offset}"


def blocks_of(directory: Path) -> list[Block]:
    """Return the blocks of all namespaces below a tier's path, by their place.

    Args:
        directory: path of a ``slab``, ``fs`` or ``faulty`` tier.
    """
    found: list[Block] = []
    for folder in (directory, directory / "store"):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for path in sorted(folder.iterdir()):
                if _NAMESPACE.fullmatch(path.name):
                    found += _blocks_in(path)
    return found


def damage(directory: Path, kind: Damage, rng: random.Random) -> str:
    """Damage one block of a tier, two for ``SWAP``.

    Args:
        directory: the tier's path.
        kind: what to do.
        rng: chooses the blocks and what of them.

    Returns:
        What was done, for people; "" if there was no block to do it to.
    """
    for _ in range(_MAX_TRIES):
        blocks = blocks_of(directory)
        if len(blocks) < 1 + (kind in (Damage.SWAP, Damage.RENAME)):
            return ""
        # A live tier evicts: what was there may be gone by now.
        with contextlib.suppress(FileNotFoundError, IndexError):
            return _damage(blocks, kind, rng)
    return ""


def _damage(blocks: list[Block], kind: Damage, rng: random.Random) -> str:
    one, *others = rng.sample(blocks, min(2, len(blocks)))
    if kind is Damage.FLIP:
        one.flip(rng)
        return f"flipped a bit of {one}"
    if kind is Damage.TRUNCATE:
        if one.path.name == SLAB_NAME:
            one = max(
                (block for block in blocks if block.path == one.path),
                key=lambda block: block.offset,
            )
        one.truncate(rng)
        return f"truncated {one}"
    if kind is Damage.APPEND:
        one.append()
        return f"lengthened the file of {one}"
    if kind is Damage.SWAP:
        one.swap(others[0])
        return f"swapped {one} and {others[0]}"
    one.copy_to(others[0])
    return f"put {one} under the name of {others[0]}"


def _blocks_in(folder: Path) -> list[Block]:
    if (folder / SLAB_NAME).exists():
        return _blocks_of_slab(folder)
    return sorted(_blocks_of_files(folder), key=lambda block: block.path)


def _blocks_of_files(folder: Path) -> Iterator[Block]:
    for prefix in folder.iterdir():
        if not re.fullmatch(r"[0-9a-f]{2}", prefix.name):
            continue
        for path in prefix.iterdir():
            if _FILE.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):
                    size = path.stat(follow_symlinks=False).st_size
                    if size:
                        yield Block(bytes.fromhex(path.name), path, 0, size)


def _blocks_of_slab(folder: Path) -> list[Block]:
    """Return the rows of the index, by slot; none while it is being made."""
    uri = f"file:{quote(str(folder / INDEX_NAME))}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=5.0)) as db:
            meta = dict(db.execute("SELECT name, value FROM meta"))
            rows = db.execute("SELECT slot, key FROM blocks ORDER BY slot").fetchall()
    except sqlite3.Error:
        return []
    if not rows:
        return []
    stride = meta["stride"]
    path = folder / SLAB_NAME
    size = path.stat().st_size
    return [
        Block(key, path, slot * stride, stride)
        for slot, key in rows
        if (slot + 1) * stride <= size
    ]
