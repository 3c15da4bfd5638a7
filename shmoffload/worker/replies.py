"""Answers to the engine, and the worker's words in the session page.

Covers: one answer per job, splitting what exceeds a frame, the completions word,
counters.
Does not cover: what the answer is (``executor``).
Who calls it: I/O threads and the main thread; one lock orders datagrams, the
completions word and the counters (the page's words have a single writing process,
but this process has several threads).

A full queue means that the engine makes no step just now. An I/O thread then waits
in turns of ``_TURN_S``: dropping an answer would leave slots open until the
deadline. The main thread never waits here, since it owes the heartbeat.
"""

from __future__ import annotations

import array
import sys
import threading
from typing import TYPE_CHECKING, Final

from shmoffload.wire.channel import Channel, ChannelClosedError
from shmoffload.wire.messages import (
    MAX_KEYS_PER_FRAME,
    FromWorker,
    JobDone,
    Resident,
    encode_frame,
)
from shmoffload.wire.session import MAX_WORD, SessionPage, TierWord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shmoffload.worker.intake import Job

MAX_FAILED_PER_FRAME: Final = 30_000
ALL_FAILED: Final = (-1,)
"""A position outside the job: the engine then takes all its keys as failed."""
_MAX_FAILED_BESIDE_KEYS: Final = 16_000
_MAX_ERROR_CHARS: Final = 400
_TURN_S: Final = 0.5


class Counters:
    """The worker's words of its tier; any thread."""

    def __init__(self, page: SessionPage, tier_idx: int) -> None:
        self._words = page.words
        self._base = page.tier_base(tier_idx)
        self._lock = threading.Lock()

    def add(self, amounts: Mapping[TierWord, int]) -> None:
        """Add to several counters; they wrap, whatever a stranger wrote there."""
        words = self._words
        with self._lock:
            for word, amount in amounts.items():
                at = self._base + word
                words[at] = (words[at] + amount) & MAX_WORD

    def set(self, word: TierWord, value: int) -> None:
        """Set a gauge."""
        self._words[self._base + word] = value


class Replies:
    """The sending half of the jobs channel."""

    def __init__(
        self, channel: Channel, counters: Counters, *, epochs: tuple[int, int]
    ) -> None:
        """Answer on ``channel`` under ``epochs`` (engine's, worker's)."""
        self._channel = channel
        self._counters = counters
        self._engine_epoch, self._worker_epoch = epochs
        self._lock = threading.Lock()
        self._is_closed = False

    def send(
        self,
        message: FromWorker,
        *,
        give_up: Callable[[], bool],
        turn_s: float = _TURN_S,
    ) -> bool:
        """Send one message; wait for room until ``give_up`` says so.

        Returns False when the engine is gone or ``give_up`` was true.
        """
        frame = encode_frame([message])
        with self._lock:
            try:
                while not self._is_closed:
                    if self._channel.send_wait(frame, timeout_s=turn_s):
                        self._sent(frame, message)
                        return True
                    if give_up():
                        return False
            except ChannelClosedError:
                self._is_closed = True  # the main thread sees the end of file
        return False

    def try_send(self, message: FromWorker) -> bool:
        """Send one message if nobody is sending and there is room. Never waits.

        True also when the engine is gone: there is nothing to try again.
        """
        frame = encode_frame([message])
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._channel.send(frame):
                return False
            self._sent(frame, message)
        except ChannelClosedError:
            self._is_closed = True
        finally:
            self._lock.release()
        return True

    def _sent(self, frame: bytes, message: FromWorker) -> None:
        keys = 0
        if isinstance(message, Resident):
            keys = len(message.added) + len(message.removed)
        elif isinstance(message, JobDone):
            keys = len(message.removed)
        self._counters.add(
            {
                TierWord.QUEUE_BYTES_OUT: len(frame),
                TierWord.QUEUE_KEYS: keys,
                # After the send: who sees the word changed finds the datagram.
                TierWord.COMPLETIONS: 1,
            }
        )

    def answer(
        self,
        job: Job,
        failed: Sequence[int],
        removed: Sequence[bytes],
        error: str,
        *,
        give_up: Callable[[], bool],
    ) -> None:
        """Answer a job, the only time; evicted keys that do not fit go before it."""
        few = len(failed) <= _MAX_FAILED_BESIDE_KEYS
        most = MAX_KEYS_PER_FRAME if few else 0
        while len(removed) > most:
            gone, removed = removed[:MAX_KEYS_PER_FRAME], removed[MAX_KEYS_PER_FRAME:]
            told = Resident(self._worker_epoch, added=[], removed=list(gone))
            if not self.send(told, give_up=give_up):
                return
        self.send(self.job_done(job, failed, removed, error), give_up=give_up)

    def job_done(
        self, job: Job, failed: Sequence[int], removed: Sequence[bytes], error: str
    ) -> JobDone:
        """Return the answer to a job.

        More failures than a frame holds are told as ``ALL_FAILED``: a block that is
        there and was called failed costs a later miss, the reverse a wrong hit.
        """
        too_many = len(failed) > MAX_FAILED_PER_FRAME
        positions = array.array("i", ALL_FAILED if too_many else failed)
        if sys.byteorder == "big":
            positions.byteswap()
        return JobDone(
            engine_epoch=self._engine_epoch,
            worker_epoch=self._worker_epoch,
            job_id=job.job_id,
            failed_idx=positions.tobytes(),
            removed=list(removed),
            error=error[:_MAX_ERROR_CHARS],
        )
