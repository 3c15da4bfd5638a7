"""The conformance suite of a tier: subclass it, and pytest runs it on your tier.

Covers: what the framework relies on: statuses per block, bytes, bounds of the
region, eviction told, durability, two opens in a row.
Does not cover: speed, and the failures of a particular engine.
Who calls it: pytest, in the test's process; needs no primary region in shared
memory and no worker process.

    class TestMyTier(TierTests):
        tier_class = MyTier

        def make_config(self, tmp_path: Path) -> TierConfig:
            return TierConfig(type="mine", name="mine", path=str(tmp_path))
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
import threading
import time
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from shmoffload.core.types import make_offload_key
from shmoffload.wire.layout import (
    HEADER_BYTES,
    PAGE_BYTES,
    header_matches,
    namespace_digest,
    seal_header,
    stride_of,
)
from shmoffload.worker.tier import BlockStatus, Tier

if TYPE_CHECKING:
    from pathlib import Path

    from shmoffload.wire.config import TierConfig

OK: Final = BlockStatus.OK
MISS: Final = BlockStatus.MISS
_UNTOUCHED: Final = 0xEE


def key_of(i: int, salt: str = "key") -> bytes:
    """Return a 36-byte key; the same for the same arguments in every process."""
    return make_offload_key(random.Random(f"{salt}{i}").randbytes(32))


def deadline() -> float:
    """Return a deadline that a loaded machine meets."""
    return time.monotonic() + 60


class HeapRegion:
    """A primary region in anonymous memory, page-aligned as the real one."""

    def __init__(
        self,
        num_slots: int = 16,
        block_bytes: int = 5000,
        namespace: bytes = namespace_digest("tests"),
    ) -> None:
        """Make one; 5000 bytes leave padding between payload and header."""
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self.stride = stride_of(block_bytes)
        self.namespace = namespace
        self._mapping = mmap.mmap(-1, num_slots * self.stride)
        self._view = memoryview(self._mapping)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def stride_view(self, slot: int) -> memoryview:
        """Whole slot."""
        if not 0 <= slot < self.num_slots:
            raise IndexError(slot)
        return self._view[slot * self.stride : (slot + 1) * self.stride]

    def slot_view(self, slot: int) -> memoryview:
        """Payload."""
        return self.stride_view(slot)[: self.block_bytes]

    def header_view(self, slot: int) -> memoryview:
        """Header page."""
        return self.stride_view(slot)[self.stride - PAGE_BYTES :]

    def address(self, slot: int) -> int:
        """Address of a slot."""
        if not 0 <= slot < self.num_slots:
            raise IndexError(slot)
        return self._base + slot * self.stride

    def fill(self, slot: int, key: bytes) -> None:
        """Put the block that belongs to ``key`` into a slot, with its header."""
        payload = random.Random(key).randbytes(self.block_bytes)
        self.slot_view(slot)[:] = payload
        header = seal_header(key, self.slot_view(slot), self.namespace)
        self.header_view(slot)[:HEADER_BYTES] = header

    def holds(self, slot: int, key: bytes) -> bool:
        """Say whether a slot holds exactly what ``fill`` puts there for ``key``."""
        payload = self.slot_view(slot)
        return bytes(payload) == random.Random(key).randbytes(
            self.block_bytes
        ) and header_matches(self.header_view(slot), key, payload, self.namespace)

    def smear(self, slot: int) -> None:
        """Overwrite a slot, so that a read that does nothing is seen."""
        self.stride_view(slot)[:] = bytes([_UNTOUCHED]) * self.stride

    def is_untouched(self, slot: int) -> bool:
        """Say whether a slot is as ``smear`` left it."""
        return self.stride_view(slot) == bytes([_UNTOUCHED]) * self.stride


class TierTests:
    """Checks that every tier passes; subclass and give class and configuration."""

    tier_class: ClassVar[type[Tier]]

    def make_config(self, tmp_path: Path) -> TierConfig:
        """Return a configuration whose storage is empty and only this test's."""
        raise NotImplementedError

    def opened(
        self, tmp_path: Path, region: HeapRegion, max_blocks: int | None = None
    ) -> Tier:
        """Return an open tier, bounded to ``max_blocks`` if given."""
        config = self.make_config(tmp_path)
        if max_blocks is not None:
            bound = max_blocks * region.stride
            config = msgspec.structs.replace(config, max_bytes=bound)
        tier = self.tier_class()
        tier.open(config, region, region.namespace)
        return tier

    def test_put_get_exists_delete(self, tmp_path: Path) -> None:
        """Blocks come back byte for byte, and a status is given per block."""
        region = HeapRegion()
        tier = self.opened(tmp_path, region)
        keys = [key_of(i) for i in range(4)]
        try:
            assert tier.exists(keys, deadline()) == [False] * 4
            for slot, key in enumerate(keys):
                region.fill(slot, key)
            for slot in range(4, 16):
                region.smear(slot)
            assert tier.put(keys, [0, 1, 2, 3], deadline()) == [OK] * 4
            assert tier.exists([*keys, key_of(9)], deadline()) == [True] * 4 + [False]
            mixed = [keys[3], key_of(9), keys[0]]
            assert tier.get(mixed, [9, 7, 5], deadline()) == [OK, MISS, OK]
            assert region.holds(9, keys[3])
            assert region.holds(5, keys[0])
            assert all(region.is_untouched(s) for s in (4, 6, 7, 8, 10, 15))
            tier.delete([keys[0], key_of(9)], deadline())
            assert tier.exists(keys, deadline()) == [False, True, True, True]
            assert tier.get([keys[0]], [6], deadline()) == [MISS]
            assert tier.usage().num_blocks == 3
        finally:
            tier.close()
            tier.close()

    def test_put_of_a_known_key_leaves_a_whole_block(self, tmp_path: Path) -> None:
        """A second put keeps or replaces, never mixes."""
        region = HeapRegion()
        tier = self.opened(tmp_path, region)
        try:
            region.fill(0, key_of(0))
            assert tier.put([key_of(0)], [0], deadline()) == [OK]
            assert tier.put([key_of(0)], [0], deadline()) == [OK]
            region.smear(1)
            assert tier.get([key_of(0)], [1], deadline()) == [OK]
            assert region.holds(1, key_of(0))
            assert tier.usage().num_blocks == 1
        finally:
            tier.close()

    def test_bound_holds_and_evicted_keys_are_told(self, tmp_path: Path) -> None:
        """Least recently used goes first; a use is a put, get or exists."""
        region = HeapRegion()
        tier = self.opened(tmp_path, region, max_blocks=4)
        keys = [key_of(i) for i in range(6)]
        try:
            for slot, key in enumerate(keys):
                region.fill(slot, key)
            assert tier.put(keys[:4], [0, 1, 2, 3], deadline()) == [OK] * 4
            assert tier.take_evicted() == []
            assert tier.get([keys[0]], [8], deadline()) == [OK]
            assert tier.exists([keys[1]], deadline()) == [True]
            assert tier.put(keys[4:], [4, 5], deadline()) == [OK] * 2
            assert sorted(tier.take_evicted()) == sorted(keys[2:4])
            assert tier.take_evicted() == []
            there = [True, True, False, False, True, True]
            assert tier.exists(keys, deadline()) == there
            assert tier.usage().num_bytes <= 4 * region.stride
            for slot, key in enumerate((keys[0], keys[1], keys[4], keys[5]), start=8):
                assert tier.get([key], [slot], deadline()) == [OK]
                assert region.holds(slot, key)
        finally:
            tier.close()

    def test_a_durable_tier_tells_what_it_holds(self, tmp_path: Path) -> None:
        """After close and open everything is resident and right, else nothing is."""
        region = HeapRegion()
        tier = self.opened(tmp_path, region)
        keys = [key_of(i) for i in range(5)]
        for slot, key in enumerate(keys):
            region.fill(slot, key)
        tier.put(keys, list(range(5)), deadline())
        tier.delete([keys[4]], deadline())
        tier.close()
        again = self.opened(tmp_path, region)
        try:
            if not again.caps.durable:
                assert list(again.resident()) == []
                return
            assert sorted(again.resident()) == sorted(keys[:4])
            assert again.get(keys[:4], [8, 9, 10, 11], deadline()) == [OK] * 4
            assert all(region.holds(8 + i, key) for i, key in enumerate(keys[:4]))
        finally:
            again.close()

    def test_another_namespace_sees_nothing(self, tmp_path: Path) -> None:
        """Blocks of another model are a miss, never data."""
        region = HeapRegion()
        tier = self.opened(tmp_path, region)
        region.fill(0, key_of(0))
        tier.put([key_of(0)], [0], deadline())
        tier.close()
        other = HeapRegion(namespace=namespace_digest("another model"))
        tier = self.opened(tmp_path, other)
        try:
            assert tier.exists([key_of(0)], deadline()) == [False]
            assert tier.get([key_of(0)], [1], deadline()) == [MISS]
        finally:
            tier.close()

    def test_reads_beside_evicting_writes_are_right_or_miss(
        self, tmp_path: Path
    ) -> None:
        """A block that is being read is not overwritten under the reader."""
        region = HeapRegion(num_slots=8)
        tier = self.opened(tmp_path, region, max_blocks=4)
        keys = [key_of(i) for i in range(12)]
        wrong: list[bytes] = []
        num_read = 0
        ended = threading.Event()

        def read() -> None:
            nonlocal num_read
            rng = random.Random(1)
            while not ended.is_set():
                key = rng.choice(keys)
                status = tier.get([key], [7], deadline())[0]
                if status is OK and not region.holds(7, key):
                    wrong.append(key)
                num_read += status is OK

        reader = threading.Thread(target=read)
        reader.start()
        try:
            until_s = deadline()
            for i in itertools.count():
                if (i > 100 and num_read > 50) or time.monotonic() > until_s:
                    break
                key = keys[i % len(keys)]
                region.fill(i % 3, key)
                tier.put([key], [i % 3], deadline())
        finally:
            ended.set()
            reader.join()
            tier.close()
        assert not wrong
        assert num_read > 50
