"""The scheduler loop with three KV groups: full, sliding window, side (F52)."""

import random
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM warn while they are imported
    import loop_kit
    import sched_kv
    from sched_loop import SchedLoop
    from sched_options import CHUNKS_OF_GROUPS, HAS_SYNC_LOADS, Options

from shmoffload.errors import BadInputError
from shmoffload.testing.leaks import new_session_name
from shmoffload.vllm.stale_offers import StaleOffers

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(loop_kit.TIMEOUT_S),
]


def test_random_traffic_with_three_groups(tmp_path):
    reports = loop_kit.run_seeds(tmp_path, is_reset_running=False, is_grouped=True)
    loop_kit.check(reports)
    assert not [fault for report in reports for fault in report.vllm_faults]


def test_running_requests_are_reset_with_three_groups(tmp_path):
    reports = loop_kit.run_seeds(tmp_path, is_reset_running=True, is_grouped=True)
    loop_kit.check(reports)
    loop_kit.check_vllm_faults(reports)


def test_copies_as_of_a_gpu_with_three_groups(tmp_path):
    loop_kit.check_variant(tmp_path, is_grouped=True, num_ranks=2, **loop_kit.CUDA)


def test_planted_stale_offers_are_stored_and_found(tmp_path, monkeypatch):
    """vLLM re-offers, after a reset, GPU blocks that a window has given back."""
    monkeypatch.setattr(StaleOffers, "are_of", lambda offers, req_id: False)
    assert loop_kit.first_wrong(tmp_path, "stale offers")


@pytest.mark.skipif(HAS_SYNC_LOADS, reason="0.33 does not store such blocks")
def test_blocks_with_holes_are_refused(tmp_path):
    """0.32: part of a block may be missing when it is stored (see ``CHUNKS``)."""
    options = Options.draw(
        0, is_reset_running=False, is_grouped=True, num_requests=0, blocks_per_chunk=2
    )
    with pytest.raises(BadInputError, match="blocks_per_chunk = 1"):
        SchedLoop(
            loop_kit.model_dir(tmp_path),
            options.extra_config(tmp_path, new_session_name()),
            options.groups,
            options.num_gpu_blocks,
        )


@pytest.mark.parametrize("blocks_per_chunk", sorted(set(CHUNKS_OF_GROUPS)))
def test_f52_what_was_stored_is_found_again(tmp_path, blocks_per_chunk):
    """What the store filter keeps suffices for the lookup rule of every group."""
    options = Options.draw(
        52,
        is_reset_running=False,
        is_grouped=True,
        num_requests=0,
        blocks_per_chunk=blocks_per_chunk,
        num_slots=400,
        num_gpu_blocks=200,
        is_prompt_only=True,
    )
    rng = random.Random(52)
    loop = SchedLoop(
        loop_kit.model_dir(tmp_path),
        options.extra_config(tmp_path, new_session_name()),
        options.groups,
        options.num_gpu_blocks,
    )
    try:
        for num_tokens in (80, 129, 160, 200, 257, 300):
            prompt = [rng.randrange(sched_kv.VOCABULARY) for _ in range(num_tokens)]
            texts = []
            for _ in range(2):
                assert loop.reset(running=False, connector=False)
                loop.hits.clear()
                req_id = loop.add(prompt, 8)
                assert loop.drain(timeout_s=20)
                texts.append(loop.said[req_id])
            tokens = sched_kv.BLOCK_TOKENS * blocks_per_chunk
            # With a window the last token of a prompt is computed, never loaded.
            assert loop.hits["host"] == (num_tokens - 1) // tokens * tokens
            assert texts[0] == texts[1] == sched_kv.reference(prompt, 8)
        assert not loop.kv.num_mismatches, loop.kv.faults
    finally:
        loop.close()
