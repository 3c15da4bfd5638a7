"""The worker's main thread: opens the tier, takes jobs, beats, ends in order.

Covers: Hello and the report of what is resident, receiving, refusing, heartbeat,
the three ways to end.
Does not cover: running jobs (``executor``), the process itself (``process``).
Who calls it: ``__main__``; the main thread, which never does tier I/O once it
serves, so that a hung disk leaves the heartbeat alone (job deadlines catch it).

Ends: end of file on the jobs socket (the engine is gone: leave at once, unanswered),
SIGTERM (the running pieces end, queued jobs are answered as failed, the tier is
closed), death of the supervisor (SIGKILL by the kernel).
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from shmoffload.errors import ConfigError, ShmoffloadError, TierConfigError
from shmoffload.wire.channel import Channel, ChannelClosedError
from shmoffload.wire.messages import (
    MAX_KEYS_PER_FRAME,
    Announce,
    Finished,
    Hello,
    Incomplete,
    JobDone,
    JobPart,
    Resident,
    decode_to_worker,
)
from shmoffload.wire.session import SessionPage, TierWord
from shmoffload.wire.sizes import format_size, parse_size
from shmoffload.worker.executor import Executor
from shmoffload.worker.intake import BadPartError, Intake, Job
from shmoffload.worker.jobs import MAX_JOBS, JobQueues
from shmoffload.worker.opening import PATIENCE_S, Opening
from shmoffload.worker.registry import load_tier
from shmoffload.worker.replies import Counters, Replies
from shmoffload.worker.seal import sealer_of
from shmoffload.worker.uses import Uses

if TYPE_CHECKING:
    from types import FrameType

    from shmoffload.wire.config import Config
    from shmoffload.worker.tier import Region, TierLimits

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_CONFIG: Final = 2
STOP_TIMEOUT_S: Final = 2.0
_MAX_FRAMES_PER_TURN: Final = 64
_RETRY_REFUSALS_S: Final = 0.05

logger = logging.getLogger(__name__)


class Worker:
    """One tier's process, from Hello to the end."""

    def __init__(
        self,
        channel: Channel,
        page: SessionPage,
        region: Region,
        config: Config,
        *,
        tier_idx: int,
        engine_epoch: int,
        worker_epoch: int,
    ) -> None:
        self._channel = channel
        self._page, self._tier_idx = page, tier_idx
        self._region = region
        self._tier_config = config.tier[tier_idx]
        self._heartbeat_s = config.limits.heartbeat_s
        self._worker_epoch = worker_epoch
        self._parent_pid = os.getppid()
        self._intake = Intake(
            num_slots=region.num_slots,
            engine_epoch=engine_epoch,
            worker_epoch=worker_epoch,
        )
        self._counters = Counters(page, tier_idx)
        self._replies = Replies(
            channel, self._counters, epochs=(engine_epoch, worker_epoch)
        )
        self._queues = JobQueues()
        self._uses = Uses()
        self._refusals: deque[JobDone] = deque()
        self._num_dropped = 0
        self._is_told_to_stop = False
        self._is_whole = False

    def run(self) -> int:
        """Serve until the end and return the exit code."""
        self._beat()
        self._counters.set(TierWord.JOBS_QUEUED, 0)
        wakeup = self._catch_sigterm()
        try:
            tier = load_tier(self._tier_config.type)()
            sealer = sealer_of(
                self._tier_config, self._region, max_threads=tier.caps.max_threads
            )
        except TierConfigError as error:
            return self._refuse(error, is_config_error=True)
        except OSError as error:
            return self._refuse(error, is_config_error=False)
        self._tier, self._sealer = tier, sealer
        self._executor = Executor(
            tier, self._region, self._queues, self._replies, self._counters, sealer
        )
        self._opening = Opening(tier, self._open)
        try:
            is_open = self._opening.wait(self._must_leave, patience_s=PATIENCE_S)
            if is_open and self._introduce():
                self._serve(wakeup)
            self._executor.join(timeout_s=STOP_TIMEOUT_S)
            self._send_refusals()
        except (ConfigError, TierConfigError) as error:
            return self._refuse(error, is_config_error=True)
        except (ShmoffloadError, OSError) as error:
            return self._refuse(error, is_config_error=False)
        except Exception as error:  # a tier's bug: say so before leaving
            logger.exception("tier %s broke", self._tier_config.name)
            return self._refuse(error, is_config_error=False)
        finally:
            # Never under a thread that is still in it.
            is_idle = self._opening.has_ended and self._executor.has_stopped
            if is_idle:
                tier.close()
            wakeup.close()
        if not is_idle:
            what = "hangs" if self._opening.has_ended else "was still opening"
            logger.warning("tier %s %s; leaving it open", self._tier_config.name, what)
        return EXIT_OK

    def _open(self) -> TierLimits:
        region = self._sealer.region
        return self._tier.open(self._tier_config, region, region.namespace)

    # Start ------------------------------------------------------------------------

    def _introduce(self) -> bool:
        """Say Hello and all that is resident; False when nobody listens.

        Raises:
            TierConfigError, TierError, OSError: the tier did not open.
        """
        is_whole = self._opening.has_ended  # looked at first: it may end just now
        limits = self._opening.result()
        keys = list(self._tier.resident()) if is_whole else []
        self._counters.set(TierWord.CAPACITY_BYTES, limits.capacity_bytes)
        self._count_blocks()
        self._counters.set(TierWord.WORKER_READY, self._worker_epoch)
        self._say_limits(limits)
        hello = Hello(
            self._worker_epoch,
            limits=limits.words + self._sealer.words,
            capacity_bytes=limits.capacity_bytes,
            num_resident=len(keys),
            policy=self._tier.caps.policy,
        )
        if not self._say(hello) or not self._report(keys, is_last=True):
            return False
        if is_whole:
            self._start_io()
        return True

    def _look_for_the_rest(self) -> None:
        """Report what was found after Hello, once it all is; then take jobs.

        Raises:
            TierConfigError, TierError, OSError: the search failed.
        """
        if self._is_whole or not self._opening.has_ended:
            return
        self._opening.result()
        keys = list(self._tier.resident())
        self._count_blocks()
        logger.info("tier %s: found %d old blocks", self._tier_config.name, len(keys))
        if self._report(keys, is_last=False):
            self._start_io()

    def _start_io(self) -> None:
        self._is_whole = True
        self._executor.start(num_load_threads=self._tier_config.threads)

    def _count_blocks(self) -> None:
        usage = self._tier.usage()
        self._counters.set(TierWord.USED_BYTES, usage.num_bytes)
        self._counters.set(TierWord.RESIDENT_BLOCKS, usage.num_blocks)
        self._counters.set(TierWord.DIRECT_IO, int(self._tier.direct_io))

    def _report(self, keys: list[bytes], *, is_last: bool) -> bool:
        """Tell keys in frames; the last one says ``is_last``. False: nobody listens."""
        for start in range(0, max(1, len(keys)), MAX_KEYS_PER_FRAME):
            end = start + MAX_KEYS_PER_FRAME
            report = Resident(
                self._worker_epoch,
                added=keys[start:end],
                is_last=is_last and end >= len(keys),
            )
            if not self._say(report):
                return False
        return True

    def _say_limits(self, limits: TierLimits) -> None:
        config = self._tier_config
        floor = ""
        if config.path is not None:
            min_free = format_size(parse_size(config.min_free, key="min_free"))
            floor = f", {min_free} are kept free in {config.path}"
        words = limits.words + self._sealer.words
        logger.info("tier %s: at most %s%s", config.name, words, floor)

    def _say(self, message: Hello | Resident) -> bool:
        """Send before serving; an engine that starts slowly is waited for."""
        return self._replies.send(
            message, give_up=self._must_leave, turn_s=self._heartbeat_s
        )

    def _must_leave(self) -> bool:
        self._beat()
        return self._is_told_to_stop or os.getppid() != self._parent_pid

    def _refuse(self, error: Exception, *, is_config_error: bool) -> int:
        """Say why the tier is not open; return the exit code."""
        text = str(error) or type(error).__name__
        self._page.set_tier_error(self._tier_idx, text)  # for the supervisor
        hello = Hello(self._worker_epoch, error=text, is_config_error=is_config_error)
        sent = self._replies.send(hello, give_up=lambda: True, turn_s=STOP_TIMEOUT_S)
        # The engine ends with these words: once is enough for a person.
        is_said = sent and is_config_error
        logger.log(
            logging.DEBUG if is_said else logging.ERROR,
            "tier %s: %s",
            self._tier_config.name,
            text,
        )
        return EXIT_CONFIG if is_config_error else EXIT_FAILED

    def _catch_sigterm(self) -> socket.socket:
        """Make SIGTERM end a ``poll``; return the socket to poll on."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.detach(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
        return ours

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        self._is_told_to_stop = True

    # Serving ----------------------------------------------------------------------

    def _serve(self, wakeup: socket.socket) -> None:
        poller = select.poll()
        poller.register(wakeup, select.POLLIN)
        poller.register(self._channel.fileno(), select.POLLIN)
        try:
            while not self._is_told_to_stop:
                self._beat()
                self._look_for_the_rest()
                self._send_refusals()
                if len(self._refusals) >= MAX_JOBS:
                    time.sleep(_RETRY_REFUSALS_S)  # an engine that does not listen
                    continue
                is_soon = self._refusals or not self._is_whole
                soon = _RETRY_REFUSALS_S if is_soon else self._heartbeat_s
                poller.poll(min(soon, self._heartbeat_s) * 1000)
                if os.getppid() != self._parent_pid:
                    raise ChannelClosedError("the supervisor is gone")  # noqa: TRY301
                self._receive()
        except ChannelClosedError:
            self._queues.stop(abandon=True)
        else:
            self._queues.stop(abandon=False)

    def _beat(self) -> None:
        self._counters.set(TierWord.HEARTBEAT_NS, time.monotonic_ns())

    def _receive(self) -> None:
        """Take what has arrived, a bounded number of frames.

        Raises:
            ChannelClosedError: the engine is gone.
        """
        for _ in range(_MAX_FRAMES_PER_TURN):
            frame = self._channel.receive()
            if frame is None:
                return
            num_keys = 0
            try:
                messages = decode_to_worker(frame)
            except msgspec.DecodeError as error:
                self._drop(error)
                messages = []
            for message in messages:
                try:
                    if isinstance(message, JobPart):
                        num_keys += len(message.keys)
                        self._take_part(message)
                    elif isinstance(message, Incomplete):
                        self._tell(message.req_id, self._intake.note(message))
                    else:
                        self._hear(message)
                except BadPartError as error:  # the rest of its frame still counts
                    self._drop(error)
            self._counters.add(
                {
                    TierWord.QUEUE_BYTES_IN: len(frame),
                    TierWord.QUEUE_KEYS: num_keys,
                }
            )

    def _hear(self, word: Announce | Finished) -> None:
        """Take the first or the last word about a request, see ``uses``."""
        if not self._tier.caps.exclusive:
            return  # its order of use is its own
        if isinstance(word, Announce):
            self._uses.announce(word.req_id)
        elif use := self._uses.finish(word.req_id):
            self._queues.put(use)

    def _take_part(self, part: JobPart) -> None:
        try:
            self._take(self._intake.add(part))
        finally:
            for job in self._intake.take_cut():
                self._take(job)

    def _drop(self, error: Exception) -> None:
        """Count garbage; say it more and more rarely: the log is on a disk, too."""
        self._counters.add({TierWord.GARBAGE_FRAMES: 1})
        self._num_dropped += 1
        if self._num_dropped & (self._num_dropped - 1) == 0:
            logger.warning(
                "garbage was dropped (%d so far): %s", self._num_dropped, error
            )

    def _tell(self, req_id: str, keys: list[bytes]) -> None:
        try:
            self._tier.request_incomplete(req_id, keys)
        except Exception:  # a tier's bug must not end its process
            logger.exception("tier %s broke on a notice", self._tier_config.name)

    def _take(self, job: Job | None) -> None:
        if job is None:
            return
        if job.error:
            self._counters.add({TierWord.GARBAGE_FRAMES: 1})
        elif not self._is_whole:
            job.error = "the tier is still looking for its old blocks"
        elif self._queues.put(job):
            self._counters.set(TierWord.JOBS_QUEUED, len(self._queues))
            self._uses.note(job)
            return
        self._refusals.append(
            self._replies.job_done(
                job, range(job.num_keys), (), job.error or "the worker's queue is full"
            )
        )

    def _send_refusals(self) -> None:
        while self._refusals and self._replies.try_send(self._refusals[0]):
            self._refusals.popleft()
            self._counters.add({TierWord.JOBS_DONE: 1})
