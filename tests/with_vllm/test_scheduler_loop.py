"""vLLM's scheduler and connector over our spec: no byte is ever wrong.

SHMOFFLOAD_LOOP_SEEDS sets the number of seeds (vLLM 0.32 or 0.33, whichever runs).
"""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM warn while they are imported
    import loop_kit
    from sched_cuda import TricklingDevice
    from sched_late import LosingWorker

    from shmoffload.vllm.copies.fence import ResetFence

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(loop_kit.TIMEOUT_S),
]


def test_random_traffic_never_reads_a_wrong_byte(tmp_path):
    """Aborts, preemptions, resets, slow and killed tiers."""
    reports = loop_kit.run_seeds(tmp_path, is_reset_running=False)
    loop_kit.check(reports)
    assert not [fault for report in reports for fault in report.vllm_faults]


def test_running_requests_are_reset(tmp_path):
    """The same with ``reset_running_requests``, at which vLLM 0.32 may fail itself."""
    reports = loop_kit.run_seeds(tmp_path, is_reset_running=True)
    loop_kit.check(reports)
    loop_kit.check_vllm_faults(reports)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_copies_as_of_a_gpu_never_give_a_wrong_byte(tmp_path, num_ranks):
    """vLLM's calls meet streams and events; bytes arrive bit by bit and late."""
    loop_kit.check_variant(tmp_path, num_ranks=num_ranks, **loop_kit.CUDA)


@pytest.mark.parametrize("is_reset_running", [False, True])
def test_two_ranks_of_which_one_is_late(tmp_path, is_reset_running):
    """Each has a part of every block; a slot is free when both have let go of it."""
    loop_kit.check_variant(tmp_path, is_reset_running=is_reset_running, num_ranks=2)


def test_planted_a_copy_that_is_reported_before_its_end_is_found(tmp_path, monkeypatch):
    is_past = TricklingDevice.is_past
    monkeypatch.setattr(
        TricklingDevice, "is_past", lambda *args: is_past(*args) or True
    )
    monkeypatch.setattr(TricklingDevice, "time_between_s", lambda *args: 0.001)
    assert loop_kit.first_wrong(tmp_path, "early ends")


def test_planted_a_fence_that_asks_rank_0_alone_is_found(tmp_path, monkeypatch):
    hold = ResetFence.hold

    def hold_rank_0(fence):
        hold(fence)
        fence._behind = [behind for behind in fence._behind if not behind[0]]

    monkeypatch.setattr(ResetFence, "hold", hold_rank_0)
    assert loop_kit.first_wrong(tmp_path, "fence of rank 0")


def test_planted_a_store_that_copies_nothing_is_found(tmp_path):
    def plant(worker, get_region):
        return LosingWorker(worker, get_region, one_in=20)

    assert loop_kit.first_wrong(tmp_path, "lost stores", plant=plant)


def test_planted_a_fence_that_never_holds_is_found(tmp_path, monkeypatch):
    """Slots of before a reset are given away at once, while GPU workers copy."""

    def passes_at_once(fence):
        was_held, fence._is_held = fence._is_held, False
        return was_held

    monkeypatch.setattr(ResetFence, "is_passed", passes_at_once)
    assert loop_kit.first_wrong(tmp_path, "open fence")
