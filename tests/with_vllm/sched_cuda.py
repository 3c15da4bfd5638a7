"""A GPU of which copies trickle: ``CudaCopier`` without a GPU, bytes moved late.

Covers: streams that move a few ranges of their first copy whenever they are looked
at, so that a copy is seen half done; in no order within a copy and across streams; a
stand-in for the CUDA runtime that keeps count of what is pinned.
Does not cover: the order of events and copies (``copies.cuda``, which is under test).
Who calls it: ``sched_traffic``, for seeds with ``is_cuda``.

An event passes when everything in front of it in its stream has been moved, and not
earlier: only then are bytes where they should be.
"""

from collections import deque
from ctypes import memmove

from shmoffload.vllm.copies.cuda import CudaCopier
from shmoffload.vllm.copies.pinning import Pinning
from shmoffload.vllm.copies.transfer import SlotPart

MAX_PIECE_BYTES = 1 << 16


class _Event:
    def __init__(self):
        self.is_past = True  # one that was never recorded, as in CUDA


class _Stream:
    def __init__(self):
        self.operations = deque()
        self.is_after_compute = False


class TricklingDevice:
    """``cuda.Device`` in the host's memory.

    Args:
        rng: decides how far a stream comes at each look.
        max_delay: looks that a copy takes, at most.
    """

    def __init__(self, rng, *, max_delay):
        self._rng = rng
        self._max_delay = max_delay
        self._streams = []
        self.is_closed = False

    def new_stream(self):
        self._streams.append(_Stream())
        return self._streams[-1]

    def new_event(self):
        return _Event()

    def wait_for_compute(self, stream):
        # The fake model has ended when its call returns; only that we ask counts.
        stream.is_after_compute = True

    def record(self, event, stream):
        event.is_past = False
        stream.operations.append(event)

    def copy(self, copies, stream, *, is_store):
        assert stream.is_after_compute, "a copy that does not wait for the model"
        stream.is_after_compute = False
        # Not the ranges themselves: the driver may read them as late as the copy.
        looks = self._rng.randint(0, self._max_delay)
        stream.operations.append([copies, is_store, None, looks])
        self._trickle()

    def is_past(self, event):
        self._trickle()
        return event.is_past

    def wait(self, event):
        for stream in self._streams:
            if event in stream.operations:
                while not event.is_past:
                    self._move(stream, has_to=True)
        assert event.is_past, "an event that is in no stream"

    def time_between_s(self, start, end):
        assert start.is_past
        assert end.is_past
        return 0.001

    def close(self):
        assert not any(stream.operations for stream in self._streams)
        self.is_closed = True

    def _trickle(self):
        for stream in self._streams:
            while stream.operations and self._move(stream):
                pass

    def _move(self, stream, *, has_to=False):
        """Bring the first operation on; False if it is not done yet."""
        operation = stream.operations[0]
        if isinstance(operation, _Event):
            operation.is_past = True
        else:
            copies, is_store, ranges, looks = operation
            if ranges is None:
                ranges = list(zip(*(each.tolist() for each in copies), strict=True))
                self._rng.shuffle(ranges)
            num = len(ranges)
            if looks and not has_to:
                operation[3] -= 1
                num = self._rng.randrange(num)
            for gpu, host, num_bytes in ranges[:num]:
                source, target = (gpu, host) if is_store else (host, gpu)
                memmove(target, source, num_bytes)
            operation[2] = ranges[num:]
            if operation[2]:
                return False
        stream.operations.popleft()
        return True


class CountedPinning:
    """``HostRegister`` that knows what is pinned."""

    def __init__(self):
        self.pinned = {}

    def register(self, address, num_bytes):
        assert address not in self.pinned
        self.pinned[address] = num_bytes

    def unregister(self, address):
        del self.pinned[address]


def use_cuda_copier(worker, region, rng, *, max_delay):
    """Give our worker, which has no copy in flight, the copier of a GPU."""
    part = SlotPart(
        region.address(0), region.stride, region.num_slots, 0, region.stride
    )
    pinning = Pinning(CountedPinning(), part, max_piece_bytes=MAX_PIECE_BYTES)
    device = TricklingDevice(rng, max_delay=max_delay)
    worker._copier = CudaCopier(device, pinning)
    return worker
