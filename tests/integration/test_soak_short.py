"""A soak of some seconds with few kinds of faults: real engines, workers, deaths."""

import json

import pytest

from shmoffload.replay.generate import MultiTurn
from shmoffload.testing.soak.driver import run_soak
from shmoffload.testing.soak.settings import SoakSettings

pytestmark = pytest.mark.timeout(300)

KINDS = ("worker SIGKILL", "call EIO", "disk flip", "engine SIGKILL")
SHAPE = MultiTurn(num_conversations=8, num_turns=3, spread_s=0.5, turn_gap_s=(0.2, 0.4))


def soak_settings(session, folder, kinds):
    return SoakSettings(
        minutes=0.01,  # at least two pieces of each half, the warm-up included
        seed=1,
        session=session,
        folder=folder,
        kinds=kinds,
        shape=SHAPE,
    )


def test_a_short_soak_strikes_and_all_stays_right(session_name, tmp_path):
    pieces = []
    report = run_soak(
        soak_settings(session_name, tmp_path, KINDS), on_piece=pieces.append
    )
    assert report.problems == []
    assert report.wrong_bytes == 0
    assert report.num_quiescent == len(pieces) >= 4
    assert report.num_faults >= 1
    assert {fault.kind for fault in report.struck} <= set(KINDS)
    assert report.quiet.blocks_compared > 0
    read = json.loads(json.dumps(report.to_json()))
    assert set(read["faults"]) == set(KINDS)
    assert read["resources"]["num_looks"] == len(pieces) - 1
    assert read["with_faults"]["call_cpu_us"]["p99"] > 0
    assert read["counters"]["slab"]["blocks_read"] > 0


def test_one_wrong_byte_is_seen(session_name, tmp_path):
    planted = []

    def spoil(engine, job):
        if not planted:
            planted.append(job)
            engine.slot_view(int(job.slots[0]))[7] ^= 1

    settings = soak_settings(session_name, tmp_path, ("call slow",))
    report = run_soak(settings, on_load=spoil)
    assert report.wrong_bytes >= 1
    assert any("wrong byte" in reason for reason in report.reasons())
    assert not report.to_json()["ok"]
