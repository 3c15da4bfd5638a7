"""``faulty``: a tier that does what it is told wrong, in front of a real one.

Covers: faults of a tier's calls, as ``control`` orders them.
Does not cover: dying by a signal (``deaths``), files on disk (``damage``).
Who calls it: the worker framework, see ``worker.tier``; executors in tests.

    {"type": "faulty", "path": DIR, ...}    everything else is the inner tier's
    DIR/inner     its type, "slab" if there is no such file
       /store     its path
       /control   what to do wrong, see ``control``

Without orders it does what the inner tier does.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from shmoffload.errors import TierConfigError
from shmoffload.testing.faults.control import INNER_NAME, STORE_NAME, Call, Orders
from shmoffload.testing.faults.worker_queue import WorkerQueue
from shmoffload.worker.registry import load_tier
from shmoffload.worker.tier import BlockStatus, Tier, TierLimits, TierUsage

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Sequence

    from shmoffload.wire.config import TierConfig
    from shmoffload.wire.session import Fault
    from shmoffload.worker.tier import Region

_T = TypeVar("_T")
_OBEY_S: Final = 0.01
_DEFAULT_INNER: Final = "slab"


class FaultyTier(Tier):
    """Any tier, with faults in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self._inner: Tier | None = None
        self._is_over = threading.Event()

    def open(self, config: TierConfig, region: Region, namespace: bytes) -> TierLimits:
        """See ``Tier.open``; held, slow or failed before the inner tier's begins.

        Raises:
            TierConfigError: there is no path, or no such inner tier.
            OSError: as ordered.
        """
        if not config.path:
            raise TierConfigError('a faulty tier needs a directory: add path = "/dir"')
        folder = Path(config.path)
        self._orders = Orders(folder, is_over=self._is_over.is_set)
        threading.Thread(target=self._obey, daemon=True).start()
        self._enter(Call.OPEN)
        self._orders.hold(Call.OPEN)
        self._region = BentRegion(region)
        kind = _inner_type(folder)
        self._inner = load_tier(kind)()
        self.caps = self._inner.caps  # type: ignore[misc]  # of what is inside
        inner_config = msgspec.structs.replace(
            config, type=kind, path=str(folder / STORE_NAME)
        )
        return self._inner.open(inner_config, self._region, namespace)

    @property
    def direct_io(self) -> bool:  # type: ignore[override]
        """As of the inner tier."""
        return self._inner is not None and self._inner.direct_io

    @property
    def early_limits(self) -> TierLimits | None:  # type: ignore[override]
        """As of the inner tier."""
        return None if self._inner is None else self._inner.early_limits

    def exists(self, keys: Sequence[bytes], deadline_s: float) -> list[bool]:
        """See ``Tier.exists``."""
        self._enter(Call.EXISTS)
        inner = self._there
        return self._halves(
            Call.EXISTS, len(keys), lambda part: inner.exists(keys[part], deadline_s)
        )

    def put(
        self, keys: Sequence[bytes], slots: Sequence[int], deadline_s: float
    ) -> list[BlockStatus]:
        """See ``Tier.put``; ``short_write`` cuts the last block, ``fill`` refuses."""
        error = self._orders.error(Call.PUT)
        if error is not None:
            return [self.fail(error, len(keys))] * len(keys)
        self._orders.delay(Call.PUT)
        inner = self._there
        is_cut = bool(keys) and self._orders.takes("short_write")
        if is_cut:
            self._region.cut(slots[-1])
        try:
            return self._halves(
                Call.PUT,
                len(keys),
                lambda part: inner.put(keys[part], slots[part], deadline_s),
            )
        finally:
            if is_cut:
                self._region.mend(slots[-1])

    def get(
        self, keys: Sequence[bytes], slots: Sequence[int], deadline_s: float
    ) -> list[BlockStatus]:
        """See ``Tier.get``; ``flip`` changes a bit of the last block that was read."""
        error = self._orders.error(Call.GET)
        if error is not None:
            return [self.fail(error, len(keys))] * len(keys)
        self._orders.delay(Call.GET)
        inner = self._there
        statuses = self._halves(
            Call.GET,
            len(keys),
            lambda part: inner.get(keys[part], slots[part], deadline_s),
        )
        read = [
            slot
            for slot, status in zip(slots, statuses, strict=False)
            if status is BlockStatus.OK
        ]
        if read and self._orders.takes("flip"):
            self._region.slot_view(read[-1])[self._region.block_bytes // 2] ^= 1
        return statuses

    def delete(self, keys: Sequence[bytes], deadline_s: float) -> None:
        """See ``Tier.delete``."""
        self._enter(Call.DELETE)
        inner = self._there

        def delete(part: slice) -> list[None]:
            inner.delete(keys[part], deadline_s)
            return []

        self._halves(Call.DELETE, len(keys), delete)

    def usage(self) -> TierUsage:
        """See ``Tier.usage``."""
        return self._there.usage()

    def resident(self) -> Iterable[bytes]:
        """See ``Tier.resident``."""
        return self._there.resident()

    def take_evicted(self) -> list[bytes]:
        """See ``Tier.take_evicted``."""
        return self._there.take_evicted()

    def request_incomplete(self, req_id: str, keys: Sequence[bytes]) -> None:
        """See ``Tier.request_incomplete``."""
        self._there.request_incomplete(req_id, keys)

    def take_words(self) -> str:
        """See ``Tier.take_words``; of both tiers."""
        words = self._there.take_words()
        return super().take_words() or words

    def take_faults(self) -> Counter[Fault]:
        """See ``Tier.take_faults``; of both tiers."""
        return super().take_faults() + self._there.take_faults()

    def close(self) -> None:
        """See ``Tier.close``; ends every hold."""
        self._is_over.set()
        if self._inner is not None:
            self._inner.close()

    @property
    def _there(self) -> Tier:
        assert self._inner is not None, "open comes first"
        return self._inner

    def _enter(self, call: Call) -> None:
        """Fail or delay a call that answers for no single block.

        Raises:
            OSError: as ordered.
        """
        error = self._orders.error(call)
        if error is not None:
            raise error
        self._orders.delay(call)

    def _halves(
        self, call: Call, num_keys: int, run: Callable[[slice], list[_T]]
    ) -> list[_T]:
        """Run a call whole; in two halves with the hold between if it is held."""
        if not self._orders.holds(call):
            return run(slice(None))
        half = num_keys // 2
        done = run(slice(half)) if half else []
        self._orders.hold(call)
        return done + run(slice(half, None))

    def _obey(self) -> None:
        """Leave or speak when told to, whatever the other threads are held in."""
        queue = WorkerQueue()
        while not self._is_over.wait(_OBEY_S):
            self._orders.obey(queue)


class BentRegion:
    """A primary region of which single slots read as if their end was never written.

    What a tier stores of a cut slot is a torn block; the real slot keeps its bytes.
    """

    def __init__(self, region: Region) -> None:
        """Show ``region`` as it is."""
        self._region = region
        self._bent: dict[int, mmap.mmap] = {}

    @property
    def num_slots(self) -> int:
        """See ``Region``."""
        return self._region.num_slots

    @property
    def stride(self) -> int:
        """See ``Region``."""
        return self._region.stride

    @property
    def block_bytes(self) -> int:
        """See ``Region``."""
        return self._region.block_bytes

    @property
    def namespace(self) -> bytes:
        """See ``Region``."""
        return self._region.namespace

    def cut(self, slot: int) -> None:
        """Let the second half of a slot read as zeros until ``mend``."""
        whole = self._region.stride_view(slot)
        copy = mmap.mmap(-1, self.stride)  # on a page: for O_DIRECT
        half = self.stride // 2
        copy[:half] = whole[:half]
        self._bent[slot] = copy

    def mend(self, slot: int) -> None:
        """Show a slot as it is again."""
        del self._bent[slot]

    def stride_view(self, slot: int) -> memoryview:
        """See ``Region``."""
        bent = self._bent.get(slot)
        return self._region.stride_view(slot) if bent is None else memoryview(bent)

    def slot_view(self, slot: int) -> memoryview:
        """See ``Region``."""
        return self.stride_view(slot)[: self.block_bytes]

    def header_view(self, slot: int) -> memoryview:
        """See ``Region``."""
        return self.stride_view(slot)[self.stride - mmap.PAGESIZE :]

    def address(self, slot: int) -> int:
        """See ``Region``."""
        bent = self._bent.get(slot)
        if bent is None:
            return self._region.address(slot)
        return ctypes.addressof(ctypes.c_char.from_buffer(bent))


def _inner_type(folder: Path) -> str:
    try:
        kind = (folder / INNER_NAME).read_text().strip()
    except FileNotFoundError:
        return _DEFAULT_INNER
    if kind == "faulty":
        raise TierConfigError(f"{folder / INNER_NAME} names faulty: name a real tier")
    return kind
