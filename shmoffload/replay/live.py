"""The simulated scheduler: recorded requests against a real engine.

Covers: vLLM's v1 loop as far as offloading sees it (running first, FIFO admission,
chunked prefill, asynchronous loads), pacing, draining.
Does not cover: planning (``core.planner``), copies (``gpu``), the report
(``report``).
Who calls it: the command line and tests; one thread. It sleeps between steps.

One step, as in vLLM: schedule and build the metadata; copy the stores of the step
before; compute; copy loads; at the end report what was copied, loads one step later
than stores, and end requests.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shmoffload.core.planner import OffloadingConnectorScheduler
from shmoffload.core.planner_types import PlannerConfig, SchedulerOutput
from shmoffload.core.types import make_offload_key
from shmoffload.errors import ConfigError
from shmoffload.replay.figures import PRIMARY, Figures, Stopwatch
from shmoffload.replay.gpu import SimulatedGpu
from shmoffload.replay.live_request import LiveRequest, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shmoffload.core.planner_types import ConnectorMetadata, TransferJob
    from shmoffload.engine import Engine
    from shmoffload.replay.requests import Workload

MAX_STEP_MS: Final = 60_000.0
IDLE_SLICE_S: Final = 0.5
"""Longest sleep between steps: an idle engine still hears of a worker's death."""
AS_FAST_AS_IT_COMPLETES: Final = math.inf
"""A speed: recorded times do not matter, the next request comes when there is room."""
STALL_TIMEOUT_S: Final = 120.0
"""Longer than any job deadline: who makes no progress for so long never will."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Settings of the simulated scheduler; see ``shmoffload replay --help``."""

    speed: float = 1.0
    step_ms: float = 5.0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_decode: int = 64

    def check(self) -> None:
        """Refuse settings under which nothing would ever move.

        Raises:
            ConfigError: a sentence that names the option.
        """
        for name in self.__slots__:
            value = getattr(self, name)
            if not value > 0 and name != "step_ms":
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} {value}: give more than 0")
        if not 0 <= self.step_ms <= MAX_STEP_MS:
            raise ConfigError(f"--step-ms {self.step_ms}: give 0 to {MAX_STEP_MS}")


class SchedulerLoop:
    """Drives one engine with one workload.

    Args:
        engine: up; the loop neither starts nor closes it.
        workload: requests in order of arrival.
        settings: of the scheduler.
        on_step: called after each step with the loop, for progress and tests.
        on_load: called before the slots of a load are read, for tests.

    Attributes:
        figures: what was measured.
        planner: the connector scheduler under test.
        gpu: what plays the GPU.
        has_stalled: gave up because nothing moved for ``STALL_TIMEOUT_S``.
        num_steps: so far.
    """

    def __init__(
        self,
        engine: Engine,
        workload: Workload,
        settings: LoopSettings,
        *,
        on_step: Callable[[SchedulerLoop], None] | None = None,
        on_load: Callable[[TransferJob], None] | None = None,
    ) -> None:
        self.workload = workload
        self.settings = settings
        self.planner = OffloadingConnectorScheduler(
            engine, PlannerConfig(tokens_per_gpu_block=workload.block_tokens)
        )
        self.gpu = SimulatedGpu(engine.config.block_bytes, engine.slot_view, on_load)
        names = [tier.name for tier in engine.config.tier]
        self.figures = Figures(dict.fromkeys([PRIMARY, *names], 0))
        self.has_stalled = False
        self.num_steps = 0
        self._engine = engine
        self._on_step = on_step
        self._timed = Stopwatch()
        self._arrivals = deque(workload.requests)
        self._waiting: deque[LiveRequest] = deque()
        self._running: list[LiveRequest] = []
        self._stores: list[TransferJob] = []  # to copy at the start of a step
        self._loads: list[TransferJob] = []  # copied, to report at its end
        self._loading: dict[str, _Loading] = {}
        self._start_s = 0.0
        self._progress_s = 0.0
        self._has_moved = False  # in the last step; else there is something to await

    def run(self) -> None:
        """Serve every request; returns when nothing is left to do."""
        self._start_s = time.perf_counter()
        while True:
            now_s = self.now_s()
            if not self._has_work():
                if not self._arrivals:
                    return
                until_due_s = self._next_due_s() - now_s
                if until_due_s > 0:
                    time.sleep(min(until_due_s, IDLE_SLICE_S))
                    self._progress_s = self.now_s()
            self._step()
            if self.now_s() - self._progress_s > STALL_TIMEOUT_S:
                self.has_stalled = True
                return
            if self._is_unpaced and self._has_moved:
                continue
            rest_s = self.settings.step_ms / 1000 - (self.now_s() - now_s)
            if rest_s > 0 and self._has_work():
                time.sleep(rest_s)

    def now_s(self) -> float:
        """Return seconds since the start of the replay."""
        return time.perf_counter() - self._start_s

    @property
    def _is_unpaced(self) -> bool:
        return self.settings.speed == AS_FAST_AS_IT_COMPLETES

    def _has_room(self) -> bool:
        """Say whether one more request may arrive now.

        Paced requests come when they come. Unpaced ones wait for room; one at a
        time means that the last one's stores are complete, too.
        """
        if not self._is_unpaced:
            return True
        if self.settings.max_num_seqs == 1:
            return not self._has_work()
        num_open = len(self._waiting) + len(self._running)
        return num_open < self.settings.max_num_seqs

    def _next_due_s(self) -> float:
        return self._arrivals[0].arrival_s / self.settings.speed

    def _has_work(self) -> bool:
        return bool(
            self._running
            or self._waiting
            or self._stores
            or self._loads
            or self.planner.has_pending_push_work()
        )

    # One step -------------------------------------------------------------------

    def _step(self) -> None:
        had_work = self._has_work()
        self._timed(self._engine.step_begin)
        had_work |= self._take_arrivals()
        plan = _StepPlan(budget=self.settings.max_num_batched_tokens)
        self._schedule_running(plan)
        self._admit(plan)
        self.figures.max_running = max(self.figures.max_running, len(self._running))
        meta = self._timed(self.planner.build_connector_meta, plan.output())
        copied = self._execute(meta, plan)
        self._sample(plan)
        self._timed(self.planner.update_connector_output, copied)
        self.num_steps += 1
        spent_s = self._timed.take_s()
        if had_work:
            self.figures.step_s.append(spent_s)
        self._has_moved = bool(plan.scheduled or copied or self._stores or self._loads)
        if plan.scheduled or copied:
            self._progress_s = self.now_s()
        if self._on_step is not None:
            self._on_step(self)

    def _take_arrivals(self) -> bool:
        now_s = self.now_s()
        any_came = False
        while self._arrivals and self._next_due_s() <= now_s and self._has_room():
            due_s = now_s if self._is_unpaced else self._next_due_s()
            request = LiveRequest.arriving(
                self._arrivals.popleft(),
                due_s=due_s,
                max_decode=self.settings.max_decode,
            )
            self._timed(self.planner.on_new_request, request)
            self._waiting.append(request)
            any_came = True
        return any_came

    def _schedule_running(self, plan: _StepPlan) -> None:
        """Give running requests their tokens, oldest first."""
        for request in self._running:
            num = min(request.num_tokens - request.num_computed_tokens, plan.budget)
            if num <= 0:
                break
            new_blocks = self._grow(request, request.num_computed_tokens + num)
            if new_blocks:
                plan.new_block_ids[request.req_id] = new_blocks
            plan.schedule(request, num)

    def _admit(self, plan: _StepPlan) -> None:
        """Admit waiting requests in order; who cannot go on now is passed over."""
        passed_over = []
        while (
            self._waiting
            and plan.budget > 0
            and len(self._running) < self.settings.max_num_seqs
        ):
            request = self._waiting.popleft()
            is_resolved = request.stage is not Stage.WAITING or self._resolve(request)
            if not is_resolved or request.stage is Stage.LOADING:
                passed_over.append(request)
                continue
            num = min(request.num_tokens - request.num_computed_tokens, plan.budget)
            self._grow(request, request.num_computed_tokens + num)
            request.stage = Stage.RUNNING
            self._running.append(request)
            plan.block_tables[request.req_id] = list(request.table)
            plan.schedule(request, num)
        self._waiting.extendleft(reversed(passed_over))

    def _resolve(self, request: LiveRequest) -> bool:
        """Ask for the request's prefix and start its load; False: ask again."""
        num, _ = self._timed(self.planner.get_num_new_matched_tokens, request, 0)
        if num is None:
            return False
        self.figures.resolved_s.append(self.now_s() - request.due_s)
        self._grow(request, num)
        loads_tier = self._engine.manager.counters.loads_tier
        before = list(loads_tier)
        self._timed(
            self.planner.update_state_after_alloc, request, list(request.table), num
        )
        if num > 0:
            self._loading[request.req_id] = _Loading(
                request, [b - a for a, b in zip(before, loads_tier, strict=True)]
            )
            request.stage = Stage.LOADING
            request.num_computed_tokens = num
        return True

    def _grow(self, request: LiveRequest, num_tokens: int) -> list[int]:
        """Allocate GPU blocks for so many tokens; return the new ones."""
        num_blocks = -(-num_tokens // self.workload.block_tokens)
        new_blocks = self.gpu.allocate(max(0, num_blocks - len(request.table)))
        request.table.extend(new_blocks)
        return new_blocks

    def _execute(self, meta: ConnectorMetadata, plan: _StepPlan) -> list[int]:
        """Do what GPU workers do in one step; return the copies to report."""
        flushed = [job for job in meta.stores if job.job_id in meta.jobs_to_flush]
        stores = [*self._stores, *flushed]
        for job in stores:
            self.gpu.store(job)
        self._stores = [job for job in meta.stores if job not in flushed]
        for request, num_tokens in plan.scheduled.items():
            self._compute(request, num_tokens)
        copied = [job.job_id for job in (*stores, *self._loads)]
        for job in self._loads:
            self._end_load(self._loading.pop(job.req_id).request)
        for job in meta.loads:
            num_right = self.gpu.load(job)
            self.figures.add_hits(num_right, self._loading[job.req_id].by_tier)
        self._loads = list(meta.loads)
        return copied

    def _end_load(self, request: LiveRequest) -> None:
        request.stage = Stage.LOADED
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1  # its logits are needed

    def _compute(self, request: LiveRequest, num_tokens: int) -> None:
        """Write the KV of the step's tokens of a request."""
        size = self.workload.block_tokens
        hashes = request.block_hashes
        end = request.num_computed_tokens + num_tokens
        for i in range(request.num_computed_tokens // size, -(-end // size)):
            is_block = (i + 1) * size <= end and i < len(hashes)
            key = make_offload_key(hashes[i]) if is_block else None
            self.gpu.compute(request.table[i], key)

    def _sample(self, plan: _StepPlan) -> None:
        """Add the sampled tokens and end requests that have all of theirs."""
        for request, num_tokens in plan.scheduled.items():
            request.num_computed_tokens += num_tokens
            if request.num_computed_tokens < request.num_tokens:
                continue
            request.num_tokens += 1
            if request.is_done:
                self._timed(self.planner.request_finished, request)
                self.gpu.free(request.table)
                self._running.remove(request)
                self.figures.num_requests += 1


@dataclass(slots=True)
class _StepPlan:
    """What one step computes, while it is being decided."""

    budget: int
    scheduled: dict[LiveRequest, int] = field(default_factory=dict)
    block_tables: dict[str, Sequence[int]] = field(default_factory=dict)
    new_block_ids: dict[str, Sequence[int]] = field(default_factory=dict)

    def schedule(self, request: LiveRequest, num_tokens: int) -> None:
        self.scheduled[request] = num_tokens
        self.budget -= num_tokens

    def output(self) -> SchedulerOutput:
        return SchedulerOutput(
            num_scheduled_tokens={r.req_id: n for r, n in self.scheduled.items()},
            block_tables=self.block_tables,
            new_block_ids=self.new_block_ids,
            new_req_ids=tuple(self.block_tables),
        )


@dataclass(frozen=True, slots=True)
class _Loading:
    """A request whose load is open, and where its blocks came from."""

    request: LiveRequest
    by_tier: Sequence[int]
