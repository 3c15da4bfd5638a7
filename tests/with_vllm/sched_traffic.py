"""One seed of random traffic through the scheduler loop, and what came of it.

Covers: requests with shared prefixes, aborts, resets, tier workers that are stopped
or killed, whose fault an exception is.
Does not cover: options and report (``sched_options``), a step (``sched_loop``).
Who calls it: ``loop_kit``.

A seed fixes the options and the traffic. When a tier answers is up to the machine,
so a seed that failed may need several tries to fail again.
"""

import contextlib
import logging
import os
import random
import signal
import time
import traceback
from pathlib import Path

import sched_kv
import vllm
from sched_cuda import use_cuda_copier
from sched_late import LateWorker
from sched_loop import SchedLoop
from sched_options import Report

import shmoffload
from shmoffload.testing.leaks import new_session_name
from shmoffload.wire.session import SessionPage, TierState, TierWord, Word

DRAIN_TIMEOUT_S = 60.0
SETTLE_TIMEOUT_S = 10.0
MAX_STOPPED_S = 0.3
BUSY_GPU_S = 0.02
LULL_STEPS = 60
NUM_TRUNKS = 5
LATE_RANK_STEPS = 4
"""Later than the rank before it."""
_OURS = str(Path(shmoffload.__file__).parent)
_THEIRS = str(Path(vllm.__file__).parent)


class _Log(logging.Handler):
    """Collects what our own nets caught: an exception, or the end of the core."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.lines = []

    def emit(self, record):
        if record.exc_info or record.levelno >= logging.CRITICAL:
            self.lines.append(self.format(record))


def _signal(pid, number):
    """Send a signal; False if the process has just gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


class _Tiers:
    """Stops and kills tier workers, as the session page names them."""

    def __init__(self, session, tiers, rng, report):
        self._page = SessionPage.look(session)
        self._ours = tiers
        self._rng = rng
        self._report = report
        self._stopped = None  # (pid, until when)

    def kill(self):
        pid = self._pick()
        if pid and _signal(pid, signal.SIGKILL):
            self._report.num_kills += 1

    def stop(self):
        pid = self._pick()
        if pid and self._stopped is None and _signal(pid, signal.SIGSTOP):
            until = time.monotonic() + self._rng.uniform(0.02, MAX_STOPPED_S)
            self._stopped = pid, until
            self._report.num_stops += 1

    def resume(self, *, is_over=False):
        if self._stopped and (is_over or time.monotonic() > self._stopped[1]):
            _signal(self._stopped[0], signal.SIGCONT)
            self._stopped = None

    def let_answer(self):
        """Give the tiers time to answer what is asked of them, as a busy GPU would."""
        asked = [i for i, tier in enumerate(self._ours) if tier.num_open_jobs]
        seen = [self._page.get_tier(i, TierWord.COMPLETIONS) for i in asked]
        until = time.monotonic() + BUSY_GPU_S
        while time.monotonic() < until and any(
            self._page.get_tier(i, TierWord.COMPLETIONS) == before
            for i, before in zip(asked, seen, strict=True)
        ):
            time.sleep(0.0002)

    def num_busy_slots(self):
        """Slots that nobody may use: a leak, if it lasts."""
        get = self._page.get
        return get(Word.SLOTS_PENDING) + get(Word.SLOTS_QUARANTINED)

    def _pick(self):
        tier = self._rng.randrange(len(self._ours))
        if self._page.get_tier(tier, TierWord.STATE) != TierState.UP:
            return 0
        return self._page.get_tier(tier, TierWord.WORKER_PID)

    def close(self):
        self.resume(is_over=True)
        self._page.close()


def run_seed(options, *, model_dir, work_dir, plant=None):
    """Run one seed; return its ``Report``.

    ``plant``: wraps our GPU worker with a planted bug; called with the worker and a
    function that returns the memory region, once there is one.
    """
    report, log = Report(options), _Log()
    began = time.monotonic()
    ours = logging.getLogger("shmoffload")
    ours.addHandler(log)
    try:
        _run(options, report, model_dir, work_dir, plant)
    except Exception as error:  # noqa: BLE001  (sorted by whose it is)
        _blame(error, report)
    finally:
        ours.removeHandler(log)
        report.our_faults += log.lines
        report.seconds = round(time.monotonic() - began, 2)
    return report


def _run(options, report, model_dir, work_dir, plant):
    rng = random.Random(f"traffic {options.seed}")

    def wrap(worker, rank):
        late = random.Random(f"late {options.seed}" + f" rank {rank}" * bool(rank))
        max_delay = options.max_delay + LATE_RANK_STEPS * rank
        if options.is_cuda:
            use_cuda_copier(worker, worker._region, late, max_delay=max_delay)
        worker = plant(worker, lambda: loop.engine.region) if plant else worker
        if options.is_cuda:
            return worker
        return LateWorker(worker, late, max_delay=max_delay, is_fifo=options.is_fifo)

    session = new_session_name()
    extra = options.extra_config(work_dir, session)
    with contextlib.ExitStack() as undo:
        loop = SchedLoop(
            model_dir,
            extra,
            options.groups,
            options.num_gpu_blocks,
            wrap_worker=wrap,
            num_ranks=options.num_ranks,
        )
        undo.callback(loop.close)
        tiers = _Tiers(session, loop.engine.tiers, rng, report)
        undo.callback(tiers.close)
        loop.before_flush = tiers.let_answer
        traffic = _Traffic(options, loop, tiers, rng, report)
        try:
            traffic.run()
        finally:
            traffic.count()


class _Traffic:
    """Requests and what befalls them."""

    def __init__(self, options, loop, tiers, rng, report):
        self._options, self._loop, self._tiers = options, loop, tiers
        self._rng, self._report = rng, report
        self._trunks = [self._tokens(rng.randrange(40, 300)) for _ in range(NUM_TRUNKS)]
        self._expected = {}
        self._aborted = set()

    def run(self):
        for number in range(self._options.num_requests):
            self._add(number)
            for _ in range(self._rng.randrange(10)):
                self._loop.step()
                self._tiers.resume()
            self._disturb()
        self._tiers.resume(is_over=True)
        if not self._loop.drain(timeout_s=DRAIN_TIMEOUT_S):
            waiting = sorted(self._loop.scheduler.requests)
            self._report.details.append(f"stuck with {waiting}")
            self._report.num_unfinished += len(waiting) or 1
            return
        self._settle()
        self._report.has_ended = True

    def _tokens(self, num):
        return [self._rng.randrange(sched_kv.VOCABULARY) for _ in range(num)]

    def _add(self, number):
        rng = self._rng
        trunk = rng.choice(self._trunks)
        prompt = trunk[: rng.randrange(20, len(trunk) + 1)]
        prompt = prompt + self._tokens(rng.randrange(30))
        max_tokens = rng.randrange(1, 40)
        req_id = self._loop.add(prompt, max_tokens, self._params(number))
        self._expected[req_id] = sched_kv.reference(prompt, max_tokens)

    def _params(self, number):
        rng, num = self._rng, self._options.num_request_level
        params = {}
        if number % 10 < num:
            params["shmoffload"] = {"policy": "request_level"}
        if rng.random() < 0.1:
            params["kv_load_tiers"] = [{"medium": rng.choice(["storage", "cpu"])}]
        if rng.random() < 0.05:
            params["max_offload_tokens"] = rng.randrange(200)
        if rng.random() < 0.05:
            params["max_load_tokens"] = rng.randrange(200)
        return params or None

    def _disturb(self):
        rng = self._rng
        if rng.random() < self._options.reset_share:
            is_running = self._options.is_reset_running and rng.random() < 0.5
            self._reset(running=is_running, connector=rng.random() < 0.5)
        dice = rng.random()
        if dice < 0.06:
            self._abort()
        elif dice < 0.09:
            self._tiers.kill()
        elif dice < 0.13:
            self._tiers.stop()
        elif dice < 0.21:
            self._lull()

    def _abort(self):
        known = sorted(self._loop.scheduler.requests)
        if known:
            req_id = self._rng.choice(known)
            self._loop.abort(req_id)
            self._aborted.add(req_id)
            self._report.num_aborts += 1

    def _lull(self):
        """No request comes for a while, and the GPU forgets: the next ones load."""
        for _ in range(LULL_STEPS):
            if not self._loop.is_busy:
                break
            self._loop.step()
            self._tiers.resume()
        self._reset(running=False, connector=False)

    def _reset(self, **words):
        if self._loop.is_after_reset:
            # Two resets of the connector in a row, with transfers in flight, fail an
            # assertion of vLLM (0.32 and 0.33, scheduler.py: reset_cache).
            self._loop.step()
        self._report.num_resets += 1
        if not self._loop.reset(**words):
            self._report.num_resets_refused += 1

    def _settle(self):
        """Step on until no slot is busy: each job ends, each fence is passed."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            self._loop.step()
            num_busy = self._tiers.num_busy_slots()
            if not num_busy:
                return
            if time.monotonic() > deadline:
                self._report.our_faults.append(f"{num_busy} slots stay busy")
                return

    def count(self):
        loop, report = self._loop, self._report
        report.num_steps = loop.num_steps
        report.num_sync_steps = loop.num_sync_steps
        report.num_preempted = loop.num_preempted
        report.num_mismatches = loop.num_mismatches
        report.details += loop.faults
        report.hits = dict(loop.hits)
        for req_id, want in self._expected.items():
            said = loop.said[req_id]
            if said != want[: len(said)]:
                report.num_wrong_outputs += 1
            elif report.has_ended and req_id not in self._aborted:
                report.num_unfinished += len(said) < len(want)


def _blame(error, report):
    """Sort an exception by the frames that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    text = "".join(traceback.format_exception(error))
    if any(frame.filename.startswith(_OURS) for frame in frames):
        report.our_faults.append(text)
        return
    of_vllm = [frame for frame in frames if frame.filename.startswith(_THEIRS)]
    if not of_vllm:
        raise error
    last = of_vllm[-1]
    where = Path(last.filename).relative_to(_THEIRS)
    report.vllm_faults.append(f"{where}:{last.lineno}: {last.line}")
    report.details.append(text)
