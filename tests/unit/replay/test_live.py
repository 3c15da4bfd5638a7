"""The simulated scheduler on the real core: order, timing, verification."""

import json

import pytest
from paper_engine import FakeEngine

from shmoffload.core.types import make_offload_key
from shmoffload.replay.generate import MultiTurn, generate
from shmoffload.replay.live import LoopSettings, SchedulerLoop
from shmoffload.replay.report import Hooks, replay_on, table_of
from shmoffload.replay.requests import ReplayRequest, Workload

FAST = LoopSettings(speed=1e6, step_ms=0, max_decode=4)
SHAPE = MultiTurn(num_conversations=6, num_turns=4, block_tokens=16)


def workload_of(*prompts, tokens=16):
    """Requests that arrive at once; a prompt is a list of block names."""
    requests = []
    for i, prompt in enumerate(prompts):
        names = [b"/".join(prompt[: j + 1]) for j in range(len(prompt))]
        size = len(prompt) * tokens + 3
        requests.append(ReplayRequest(f"r{i}", float(i), size, 4, names))
    return Workload("made", tokens, requests)


def one_after_another(first, *rest):
    """Space arrivals so far apart that each request ends before the next."""
    return Workload(
        "made",
        first.block_tokens,
        [
            ReplayRequest(
                f"s{i}",
                i * 20_000.0,  # 20 ms at FAST speed
                r.num_input_tokens,
                r.num_output_tokens,
                r.hashes,
            )
            for i, r in enumerate(q for w in (first, *rest) for q in w.requests)
        ],
    )


def test_every_attainable_hit_comes_back_right():
    engine = FakeEngine(slots=40)
    workload = one_after_another(generate(SHAPE))
    report = replay_on(engine, workload, FAST)
    assert report.ok
    assert report.requests == 24
    assert report.prefix_hits == report.prefix_hits_attainable > 0
    assert sum(report.hits_by_tier.values()) == report.prefix_hits
    assert report.hits_by_tier["dict"] > 0
    assert report.blocks_written == {
        "dict": workload.num_distinct,
        "total": workload.num_distinct,
    }
    assert report.bytes["store"] >= 64 * workload.num_distinct
    assert report.bytes["load"] == 64 * report.prefix_hits
    assert report.stores_failed == 0
    engine.manager.check_integrity()


def test_what_a_tier_holds_at_the_start_is_attainable():
    workload = one_after_another(generate(SHAPE))
    engine = FakeEngine(slots=40)
    replay_on(engine, workload, FAST)
    again = FakeEngine(slots=40)
    again.tiers[0].blocks = engine.tiers[0].blocks
    report = replay_on(again, workload, FAST)
    assert report.prefix_hits == report.prefix_hits_attainable == workload.num_blocks
    assert report.blocks_written["total"] == 0


def test_a_wrong_byte_in_a_slot_is_a_bad_stamp():
    engine = FakeEngine(slots=40)
    planted = []

    def on_load(job):
        if not planted:
            planted.append(job)
            engine.slot_view(int(job.slots[0]))[5] ^= 1

    hooks = Hooks(on_load=on_load)
    report = replay_on(engine, one_after_another(generate(SHAPE)), FAST, hooks=hooks)
    assert planted
    assert not report.ok
    # The block stays in the primary, so whoever shares it sees the byte, too.
    assert report.bad_stamps >= 1
    missing = report.prefix_hits_attainable - report.prefix_hits
    assert missing == report.bad_stamps


def test_a_wrong_byte_in_a_tier_is_a_bad_stamp():
    """This tier has no checksum: what it changes has to be seen by the replay."""
    workload = one_after_another(generate(SHAPE))
    engine = FakeEngine(slots=40)
    replay_on(engine, workload, FAST)
    again = FakeEngine(slots=40)
    again.tiers[0].blocks = dict(engine.tiers[0].blocks)
    key = make_offload_key(workload.requests[0].hashes[0])
    again.tiers[0].blocks[key] = bytes(64)
    report = replay_on(again, workload, FAST)
    assert not report.ok
    assert report.bad_stamps >= 1


def test_stores_are_copied_a_step_later_and_complete_at_its_end():
    engine = FakeEngine(slots=4)
    seen = []

    def on_step(loop):
        seen.append((loop.gpu.bytes_stored, engine.tiers[0].words[13]))

    loop = SchedulerLoop(engine, workload_of([b"a"]), FAST, on_step=on_step)
    loop.run()
    # Step 1 computes and offers; step 2 copies; its end completes and cascades.
    assert seen[:2] == [(0, 0), (64, 1)]


def test_a_load_is_reported_one_step_after_its_copy():
    engine = FakeEngine(slots=4)
    replay_on(engine, workload_of([b"a"]), FAST)
    counted = []
    engine.complete_load = lambda keys, ctx: (
        counted.append(loop.num_steps),
        engine.manager.complete_load(keys, ctx),
    )
    loads = []
    loop = SchedulerLoop(
        engine,
        workload_of([b"a"]),
        FAST,
        on_load=lambda job: loads.append(loop.num_steps),
    )
    loop.run()
    assert (loads, counted) == ([0], [1])
    assert loop.figures.prefix_hits == 1


def test_who_waits_is_passed_over_and_keeps_its_place():
    """The first request waits for a promotion; the second runs meanwhile."""
    source = FakeEngine(slots=8)
    replay_on(source, workload_of([b"a", b"b"]), FAST)
    engine = FakeEngine(slots=8)
    engine.tiers[0].blocks = source.tiers[0].blocks
    order = []

    def on_step(loop):
        order.append([r.req_id for r in loop._running])

    workload = workload_of([b"a", b"b"], [b"x"], [b"y"])
    loop = SchedulerLoop(engine, workload, FAST, on_step=on_step)
    loop.run()
    assert order[0] == ["r1", "r2"]
    assert loop.figures.num_requests == 3
    assert loop.figures.prefix_hits == 2


def test_who_was_passed_over_stays_before_later_ones():
    source = FakeEngine(slots=8)
    replay_on(source, workload_of([b"a"]), FAST)
    engine = FakeEngine(slots=8)
    engine.tiers[0].blocks = source.tiers[0].blocks
    waiting = []
    loop = SchedulerLoop(
        engine,
        workload_of([b"a"], [b"x"], [b"y"]),
        LoopSettings(speed=1e6, step_ms=0, max_num_seqs=1),
        on_step=lambda loop: waiting.append([r.req_id for r in loop._waiting]),
    )
    loop.run()
    assert waiting[0] == ["r0", "r2"]


def test_budget_and_running_limits_hold():
    settings = LoopSettings(
        speed=1e6, step_ms=0, max_decode=3, max_num_seqs=2, max_num_batched_tokens=20
    )
    spans = []

    def on_step(loop):
        spans.append(len(loop._running))

    prompts = [[b"%d" % i, b"x"] for i in range(5)]
    engine = FakeEngine(slots=20)
    loop = SchedulerLoop(engine, workload_of(*prompts), settings, on_step=on_step)
    loop.run()
    assert loop.figures.num_requests == 5
    assert loop.figures.max_running == 2
    assert max(spans) <= 2
    # 35 prompt tokens each, 20 a step: no fewer steps than the budget allows.
    assert loop.num_steps >= 5 * 35 // 20


def test_blocks_that_never_fit_are_counted():
    """A primary of one slot refuses two blocks at once, for ever."""
    engine = FakeEngine(slots=1)
    report = replay_on(engine, workload_of([b"a", b"b"]), FAST)
    assert report.ok
    assert report.stores_failed == 2


def test_reused_gpu_blocks_do_not_spoil_final_stores():
    """Stores refused until the end are copied before their GPU blocks are reused."""
    engine = FakeEngine(slots=64)
    refused = engine.manager.prepare_store
    calls = []

    def late(keys, ctx):
        calls.append(ctx.req_id)
        if calls.count(ctx.req_id) < 4:  # so that the last offer is granted
            return None
        return refused(keys, ctx)

    engine.prepare_store = late
    prompts = [[b"%d" % i, b"x"] for i in range(12)]
    settings = LoopSettings(speed=1e6, step_ms=0, max_decode=3, max_num_seqs=2)
    first = replay_on(engine, workload_of(*prompts), settings)
    engine.prepare_store = refused
    again = replay_on(engine, workload_of(*prompts), settings)
    assert first.stores_failed == 0
    assert again.ok
    assert again.prefix_hits == 24


def test_report_has_its_stable_keys():
    report = replay_on(
        FakeEngine(slots=8), workload_of([b"a"]), FAST, described={"speed": 1}
    )
    keys = (
        "ok requests blocks prefix_hits prefix_hits_attainable hits_by_tier "
        "blocks_written stores_failed jobs_failed jobs_dropped bad_stamps max_running "
        "step_ms resolved_ms lookups_per_block bytes seconds settings"
    )
    data = json.loads(json.dumps(report.to_json()))
    assert list(data) == keys.split()
    assert list(data["step_ms"]) == ["p50", "p99", "max"]
    assert list(data["resolved_ms"]) == ["p50", "p99"]
    assert list(data["bytes"]) == ["store", "load", "cascade", "promotion"]
    assert list(data["hits_by_tier"]) == ["primary", "dict"]
    assert data["settings"] == {"speed": 1}
    assert table_of(report).row_count > 15


def test_no_progress_is_given_up(monkeypatch):
    monkeypatch.setattr("shmoffload.replay.live.STALL_TIMEOUT_S", 0.05)
    engine = FakeEngine(slots=4)
    engine.has_pending_work = lambda: True  # something never ends
    loop = SchedulerLoop(engine, workload_of([b"a"]), FAST)
    loop.run()
    assert loop.has_stalled


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16])
def test_short_prompts(num_tokens):
    hashes = [b"h"] if num_tokens >= 16 else []
    workload = Workload("made", 16, [ReplayRequest("r", 0, num_tokens, 0, hashes)] * 1)
    report = replay_on(FakeEngine(slots=4), workload, FAST)
    assert report.ok
    again = replay_on(FakeEngine(slots=4), one_after_another(workload, workload), FAST)
    assert again.prefix_hits == len(hashes)
