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
    Hello,
    Incomplete,
    JobDone,
    JobPart,
    Resident,
    decode_to_worker,
)
from shmoffload.wire.session import SessionPage, TierWord
from shmoffload.worker.executor import Executor
from shmoffload.worker.intake import BadPartError, Intake, Job
from shmoffload.worker.jobs import MAX_JOBS, JobQueues
from shmoffload.worker.registry import load_tier
from shmoffload.worker.replies import Counters, Replies

if TYPE_CHECKING:
    from types import FrameType

    from shmoffload.wire.config import Config
    from shmoffload.worker.tier import Region, Tier, TierLimits

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
        self._refusals: deque[JobDone] = deque()
        self._is_told_to_stop = False

    def run(self) -> int:
        """Serve until the end and return the exit code."""
        self._beat()
        self._counters.set(TierWord.JOBS_QUEUED, 0)
        wakeup = self._catch_sigterm()
        try:
            tier = load_tier(self._tier_config.type)()
        except TierConfigError as error:
            return self._refuse(error, is_config_error=True)
        can_close = True
        try:
            self._tier = tier
            limits = tier.open(self._tier_config, self._region, self._region.namespace)
            executor = Executor(
                tier, self._region, self._queues, self._replies, self._counters
            )
            if self._introduce(tier, limits):
                can_close = False  # from here I/O threads are in the tier
                executor.start(num_load_threads=self._tier_config.threads)
                self._serve(wakeup)
            can_close = executor.join(timeout_s=STOP_TIMEOUT_S)
            self._send_refusals()
        except (ConfigError, TierConfigError) as error:
            return self._refuse(error, is_config_error=True)
        except (ShmoffloadError, OSError) as error:
            return self._refuse(error, is_config_error=False)
        except Exception as error:  # a tier's bug: say so before leaving
            logger.exception("tier %s broke", self._tier_config.name)
            return self._refuse(error, is_config_error=False)
        finally:
            if can_close:
                tier.close()
            wakeup.close()
        if not can_close:
            logger.warning("tier %s hangs; leaving it open", self._tier_config.name)
        return EXIT_OK

    # Start ------------------------------------------------------------------------

    def _introduce(self, tier: Tier, limits: TierLimits) -> bool:
        """Say Hello and all that is resident; False when nobody listens."""
        keys = list(tier.resident())
        usage = tier.usage()
        self._counters.set(TierWord.CAPACITY_BYTES, limits.capacity_bytes)
        self._counters.set(TierWord.USED_BYTES, usage.num_bytes)
        self._counters.set(TierWord.RESIDENT_BLOCKS, usage.num_blocks)
        self._counters.set(TierWord.DIRECT_IO, int(tier.direct_io))
        self._counters.set(TierWord.WORKER_READY, self._worker_epoch)
        logger.info("tier %s: %s", self._tier_config.name, limits.words)
        hello = Hello(
            self._worker_epoch,
            limits=limits.words,
            capacity_bytes=limits.capacity_bytes,
            num_resident=len(keys),
            policy=tier.caps.policy,
        )
        if not self._say(hello):
            return False
        for start in range(0, max(1, len(keys)), MAX_KEYS_PER_FRAME):
            end = start + MAX_KEYS_PER_FRAME
            report = Resident(
                self._worker_epoch, added=keys[start:end], is_last=end >= len(keys)
            )
            if not self._say(report):
                return False
        return True

    def _say(self, message: Hello | Resident) -> bool:
        """Send before serving; an engine that starts slowly is waited for."""

        def must_leave() -> bool:
            self._beat()
            return self._is_told_to_stop or os.getppid() != self._parent_pid

        return self._replies.send(message, give_up=must_leave, turn_s=self._heartbeat_s)

    def _refuse(self, error: Exception, *, is_config_error: bool) -> int:
        """Say why the tier is not open; return the exit code."""
        text = str(error) or type(error).__name__
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
                self._send_refusals()
                if len(self._refusals) >= MAX_JOBS:
                    time.sleep(_RETRY_REFUSALS_S)  # an engine that does not listen
                    continue
                soon = _RETRY_REFUSALS_S if self._refusals else self._heartbeat_s
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
                for message in decode_to_worker(frame):
                    if isinstance(message, JobPart):
                        num_keys += len(message.keys)
                        self._take(self._intake.add(message))
                    elif isinstance(message, Incomplete):
                        self._tell(message.req_id, self._intake.note(message))
            except (msgspec.DecodeError, UnicodeDecodeError, BadPartError) as error:
                logger.warning("a frame was dropped: %s", error)
                self._counters.add({TierWord.GARBAGE_FRAMES: 1})
            self._counters.add(
                {
                    TierWord.QUEUE_BYTES_IN: len(frame),
                    TierWord.QUEUE_KEYS: num_keys,
                }
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
        elif self._queues.put(job):
            self._counters.set(TierWord.JOBS_QUEUED, len(self._queues))
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
