"""The I/O threads: one for stores, a few for loads, loads first.

Covers: slicing a job, headers and checksums, deadlines, the breaker, what became
of each block, the answer.
Does not cover: receiving jobs (``serve``), moving bytes (the tier).
Who calls it: ``serve`` starts and stops it; everything else here runs in its
threads.

    main thread --put--> JobQueues --take--> store thread (1)   --> Replies
                                   --take--> load threads (1-8) --> Replies

A store runs in pieces of at most 8 MiB and gives way to waiting loads between
them, for a bounded time. Measured: 39-48 ms for a load behind a store backlog,
against 219-264 ms with a shared pool.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shmoffload.errors import TierError
from shmoffload.wire.layout import blocks_a_piece
from shmoffload.wire.session import Fault, TierWord
from shmoffload.worker.breaker import Breaker
from shmoffload.worker.faults import StorageGoneError, fault_of
from shmoffload.worker.seal import Sealer
from shmoffload.worker.tier import BlockStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shmoffload.worker.intake import Job
    from shmoffload.worker.jobs import JobQueues
    from shmoffload.worker.replies import Counters, Replies
    from shmoffload.worker.tier import Region, Tier

_GIVE_WAY_S: Final = 0.1
"""Stores go on at one piece per this time under endless loads: 80 MiB/s."""
_KEYS_A_USE: Final = 4096
"""A tier may keep loads waiting for as long as it orders these."""
_USE_S: Final = 10.0
"""Nobody waits for a use; a store behind it would."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """What became of one job.

    Attributes:
        failed: positions in the job's keys.
        removed: keys that the tier no longer holds.
        error: words for the first failure.
        fault: why the last call's blocks were refused, if some were.
    """

    failed: list[int] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)
    error: str = ""
    fault: Fault = Fault.OTHER

    def fail(self, positions: Sequence[int], error: str) -> None:
        """Add failed positions; the first words stay."""
        self.failed += positions
        self.error = self.error or error


class Executor:
    """Runs jobs against one tier."""

    def __init__(
        self,
        tier: Tier,
        region: Region,
        queues: JobQueues,
        replies: Replies,
        counters: Counters,
        sealer: Sealer | None = None,
    ) -> None:
        """Work for one tier.

        Args:
            tier: opened, over ``sealer.region``, before the first job.
            region: the primary.
            queues: where jobs come from.
            replies: where answers go.
            counters: the tier's words in the page.
            sealer: headers only, if there is none.
        """
        self._tier = tier
        self._region = region
        self._sealer = sealer or Sealer(region)
        self._queues = queues
        self._replies = replies
        self._counters = counters
        self._breaker = Breaker()
        self._piece = blocks_a_piece(region.stride)
        self._threads: list[threading.Thread] = []

    def start(self, *, num_load_threads: int) -> None:
        """Start the threads; daemons, since a hung tier call cannot be joined."""
        self._counters.set(TierWord.BACKING_OFF, 0)  # the last worker's
        num_loads = min(num_load_threads, self._tier.caps.max_threads)
        for is_promotion in (False, *[True] * num_loads):
            thread = threading.Thread(
                target=self._work, args=(is_promotion,), daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def join(self, *, timeout_s: float) -> bool:
        """Wait for the threads after ``JobQueues.stop``; False if one hangs."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return self.has_stopped

    @property
    def has_stopped(self) -> bool:
        """No thread of it is in the tier."""
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, is_promotion: bool) -> None:
        run = self._run_load if is_promotion else self._run_store
        time_word = TierWord.LOAD_NS if is_promotion else TierWord.STORE_NS
        try:
            while (job := self._queues.take(is_promotion=is_promotion)) is not None:
                if job.is_use:
                    self._use(job)
                    continue
                start_ns = time.monotonic_ns()
                outcome = self._outcome(job, run)
                self._counters.add({time_word: time.monotonic_ns() - start_ns})
                self._answer(job, outcome)
                self._queues.done()
                self._counters.set(TierWord.JOBS_QUEUED, len(self._queues))
        except StorageGoneError as error:
            logger.error("%s", error)  # noqa: TRY400  (the sentence says it all)
            os._exit(1)
        except BaseException:
            # A worker without this thread would take jobs and never answer them.
            # Its death is an answer: all its jobs fail, it is started anew.
            logger.exception("an I/O thread broke; the worker leaves")
            os._exit(1)

    def _outcome(self, job: Job, run: Callable[[Job, Outcome], None]) -> Outcome:
        outcome = Outcome()
        error = job.error or self._excuse(job)
        if error:
            outcome.fail(range(job.num_keys), error)
        else:
            run(job, outcome)
        return outcome

    def _answer(self, job: Job, outcome: Outcome) -> None:
        usage = self._tier.usage()
        self._counters.set(TierWord.USED_BYTES, usage.num_bytes)
        self._counters.set(TierWord.RESIDENT_BLOCKS, usage.num_blocks)
        self._counters.set(TierWord.DIRECT_IO, int(self._tier.direct_io))
        if not self._queues.abandoned:
            self._replies.answer(
                job,
                outcome.failed,
                outcome.removed,
                outcome.error,
                give_up=lambda: self._queues.stopping,
            )
        # After the answer: who sees the word changed finds the datagram.
        self._counters.add({TierWord.JOBS_DONE: 1})

    def _excuse(self, job: Job) -> str:
        """Return why no more I/O is worth while for a job, or ""."""
        if self._queues.stopping:
            return "the worker is stopping"
        if time.monotonic() > job.deadline_s:
            return "the job's deadline has passed"
        return ""

    def _pieces(self, job: Job, outcome: Outcome) -> Iterator[range]:
        """Yield positions piece by piece until there is an excuse."""
        total = len(job.keys)
        for start in range(0, total, self._piece):
            error = self._excuse(job)
            if error:
                outcome.fail(range(start, total), error)
                return
            yield range(start, min(start + self._piece, total))

    # Stores, in the store thread --------------------------------------------------

    def _run_store(self, job: Job, outcome: Outcome) -> None:
        tier = self._tier
        # A use of what is here already, so that the job does not evict its own keys.
        self._there(job.keys, job, outcome)
        for piece in self._pieces(job, outcome):
            self._queues.give_way(timeout_s=_GIVE_WAY_S)
            if not self._breaker.allows(now_s=time.monotonic()):
                outcome.fail(piece, "the tier is backing off after failed stores")
                continue
            self._store_piece(job, piece, outcome)
        self._note_use(job, outcome)
        evicted = tier.take_evicted()
        if not evicted:
            return
        self._counters.add({TierWord.BLOCKS_EVICTED: len(evicted)})
        # A victim may have been stored again by this very job, and a block of this
        # job may be a victim: say how it ended.
        there = self._there(evicted, job, outcome)
        outcome.removed = [
            key for key, is_in in zip(evicted, there, strict=True) if not is_in
        ]
        gone = set(outcome.removed) - {job.keys[i] for i in outcome.failed}
        lost = [i for i, key in enumerate(job.keys) if key in gone]
        if lost:
            outcome.fail(lost, "the tier is smaller than the job")

    def _store_piece(self, job: Job, piece: range, outcome: Outcome) -> None:
        keys = [job.keys[i] for i in piece]
        there = self._there(keys, job, outcome)
        todo = [i for i, is_in in zip(piece, there, strict=True) if not is_in]
        self._counters.add({TierWord.BLOCKS_SKIPPED: len(piece) - len(todo)})
        if not todo:
            return
        keys = [job.keys[i] for i in todo]
        slots = self._sealer.outgoing(keys, [job.slots[i] for i in todo])
        statuses = self._call(self._tier.put, keys, slots, job, outcome)
        failed = [
            i for i, s in zip(todo, statuses, strict=True) if s is not BlockStatus.OK
        ]
        outcome.failed += failed
        num_written = len(todo) - len(failed)
        self._counters.add(
            {
                TierWord.BLOCKS_WRITTEN: num_written,
                TierWord.BYTES_WRITTEN: num_written * self._region.stride,
                TierWord.BLOCKS_FAILED: len(failed),
            }
        )
        self._judge_stores(outcome, ok=num_written > 0)

    def _judge_stores(self, outcome: Outcome, *, ok: bool) -> None:
        """Open or close the breaker, and say in the page why it is open."""
        was_open = self._breaker.is_open
        has_opened = self._breaker.on_result(ok=ok, now_s=time.monotonic())
        is_open = self._breaker.is_open
        self._counters.set(TierWord.BACKING_OFF, outcome.fault if is_open else 0)
        if has_opened:
            logger.warning(
                "stores fail again and again: %s; backing off", outcome.error
            )
        elif was_open and not is_open:
            logger.warning("stores work again")

    def _note_use(self, job: Job, outcome: Outcome) -> None:
        """Make the first block of a job in pieces the most recently used.

        A tier orders the keys of one call so; the pieces came in the other order,
        and a request's head is of more use than its tail.
        """
        if self._tier.caps.exclusive and len(job.keys) > self._piece:
            self._there(job.keys, job, outcome)

    def _use(self, job: Job) -> None:
        """Use a whole request: its head last, as the most recent; see ``uses``."""
        job.deadline_s = time.monotonic() + _USE_S
        for start in reversed(range(0, len(job.keys), _KEYS_A_USE)):
            if self._excuse(job):
                return
            self._there(job.keys[start : start + _KEYS_A_USE], job, Outcome())

    def _there(self, keys: Sequence[bytes], job: Job, outcome: Outcome) -> list[bool]:
        """Ask the tier which keys it has; none, if it cannot say."""
        try:
            return self._tier.exists(keys, job.deadline_s)
        except Exception as error:  # noqa: BLE001  (a plug-in may raise anything)
            outcome.error = outcome.error or str(error) or type(error).__name__
            return [False] * len(keys)

    # Loads, in a load thread ------------------------------------------------------

    def _run_load(self, job: Job, outcome: Outcome) -> None:
        for piece in self._pieces(job, outcome):
            self._load_piece(job, piece, outcome)
        self._note_use(job, outcome)

    def _load_piece(self, job: Job, piece: range, outcome: Outcome) -> None:
        keys = [job.keys[i] for i in piece]
        slots = self._sealer.incoming([job.slots[i] for i in piece])
        statuses = self._call(self._tier.get, keys, slots, job, outcome)
        tally = dict.fromkeys(BlockStatus, 0)
        bad = []
        for i, slot, told in zip(piece, slots, statuses, strict=True):
            status = told
            if status is BlockStatus.OK and not self._sealer.accept(
                job.keys[i], job.slots[i], slot
            ):
                status = BlockStatus.BAD
            tally[status] += 1
            if status is BlockStatus.OK:
                continue
            outcome.failed.append(i)
            if status is BlockStatus.BAD:
                bad.append(job.keys[i])
            if status is not BlockStatus.FAIL:
                outcome.removed.append(job.keys[i])
        self._counters.add(
            {
                TierWord.BLOCKS_READ: tally[BlockStatus.OK],
                TierWord.BYTES_READ: tally[BlockStatus.OK] * self._region.stride,
                TierWord.BLOCKS_BAD: tally[BlockStatus.BAD],
                TierWord.BLOCKS_MISSED: tally[BlockStatus.MISS],
                TierWord.BLOCKS_FAILED: tally[BlockStatus.FAIL],
            }
        )
        if bad:
            outcome.error = (
                outcome.error or f"{len(bad)} blocks were not what was stored"
            )
            logger.warning("%d blocks were not what was stored; deleted", len(bad))
            self._delete(bad, job.deadline_s)

    def _delete(self, keys: list[bytes], deadline_s: float) -> None:
        try:
            self._tier.delete(keys, deadline_s)
        except (OSError, TierError) as error:
            logger.warning("bad blocks could not be deleted: %s", error)

    def _call(
        self,
        call: Callable[[list[bytes], list[int], float], list[BlockStatus]],
        keys: list[bytes],
        slots: list[int],
        job: Job,
        outcome: Outcome,
    ) -> list[BlockStatus]:
        """Call the tier; whatever it raises is FAIL for all its blocks."""
        fault = Fault.OTHER
        try:
            statuses = call(keys, slots, job.deadline_s)
        except StorageGoneError:
            raise  # a worker that cannot store any more gives way to a new one
        except (OSError, TierError) as error:
            fault = fault_of(error)
            outcome.error = outcome.error or str(error)
        except Exception as error:  # a bug of a tier must not cost the job its answer
            logger.exception("the tier broke")
            outcome.error = outcome.error or f"{type(error).__name__}: {error}"
        else:
            outcome.error = outcome.error or self._tier.take_words()
            if len(statuses) == len(keys):
                self._count_faults(outcome, statuses.count(BlockStatus.FAIL))
                return statuses
            outcome.error = outcome.error or "the tier answered for other blocks"
        self._tier.take_faults()  # of blocks that the whole call now speaks for
        self._count_faults(outcome, len(keys), fault)
        return [BlockStatus.FAIL] * len(keys)

    def _count_faults(
        self, outcome: Outcome, num_blocks: int, rest: Fault = Fault.OTHER
    ) -> None:
        """Count ``num_blocks`` refused ones by fault, ``rest`` where nobody said."""
        faults = self._tier.take_faults()
        faults[rest] += max(0, num_blocks - faults.total())
        self._counters.add({fault.word: n for fault, n in faults.items() if n})
        if num_blocks:
            outcome.fault = faults.most_common(1)[0][0]
