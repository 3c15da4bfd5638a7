"""Transfers of the planner, beside the scenarios."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_kit import HIT, FakeRequest, Rig


def test_load_starts_inside_a_block_that_is_partly_local():
    rig = Rig(tokens=4, per_block=3)
    request = rig.request("a", 24)
    rig.manager.answers = {rig.key(request, i, 3): HIT for i in range(2)}
    assert rig.admit(request, local=16) == 8
    (load,) = rig.step().loads
    assert load.keys == [rig.key(request, 1, 3)]
    assert load.gpu_block_ids == [5, 6]
    assert load.gpu_blocks_skipped == 1


def test_blocks_refused_at_the_end_are_counted():
    rig = Rig()
    request = rig.request("a", 24)
    rig.admit(request)
    rig.manager.room = 0
    rig.step(tokens=[(request, 24)])
    rig.planner.request_finished(request)
    rig.step()
    assert rig.planner.counters.blocks_never_stored == 2


def test_final_store_of_the_same_step_is_flushed_too():
    """Blocks freed at the end of a step may be handed out before the last offer."""
    rig = Rig()
    first, second = rig.request("a", 12), rig.request("b", 12)
    rig.admit(first, blocks=[7])
    rig.manager.room = 0
    rig.step(tokens=[(first, 12)])
    rig.planner.request_finished(first)
    rig.manager.room = 1
    rig.admit(second, blocks=[7])
    meta = rig.step()
    assert [job.req_id for job in meta.stores] == ["a"]
    assert meta.jobs_to_flush == {meta.stores[0].job_id}


def test_complete_only_when_every_gpu_worker_has_reported():
    rig = Rig(num_gpu_workers=2)
    request = rig.request("a", 12)
    rig.admit(request)
    meta = rig.step(tokens=[(request, 12)])
    rig.ack(meta)
    assert not rig.manager.named("complete_store")
    rig.ack(meta)
    assert len(rig.manager.named("complete_store")) == 1
    rig.ack(meta)
    assert rig.planner.counters.unknown_completions == 1


def test_reset_flushes_and_offers_again():
    rig = Rig()
    request = rig.request("a", 12)
    rig.admit(request)
    meta = rig.step(tokens=[(request, 12)])
    rig.planner.reset_cache()
    after = rig.step(tokens=[(request, 0)])
    assert after.jobs_to_flush == {meta.stores[0].job_id}
    assert len(after.stores) == 1
    rig.ack(meta)
    assert rig.manager.named("reset", "complete_store")[0] == ("reset",)


def test_unknown_requests_change_nothing():
    rig = Rig()
    stranger = FakeRequest("x", 12, num_tokens=12)
    assert rig.planner.get_num_new_matched_tokens(stranger, 0) == (0, False)
    rig.planner.update_state_after_alloc(stranger, [1], 0)
    rig.planner.request_finished(stranger)
    rig.step(tokens=[(stranger, 12)])
    assert [e[0] for e in rig.manager.log] == ["step_end"]
    assert rig.planner.counters.unknown_requests == 3


@given(
    st.integers(0, 60),
    st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans()), max_size=40),
)
def test_inv_41_42_43_45_stores_are_contiguous_and_once(prompt, moves):
    """Whatever is refused and whenever copies end: no hole, no block twice."""
    rig = Rig(tokens=2, per_block=2)
    request = rig.request("a", prompt)
    rig.admit(request)
    stored, metas = [], []
    state = rig.planner._states["a"]

    def collect(meta):
        stored.extend(key for job in meta.stores for key in job.keys)
        metas.append(meta)

    for tokens, has_room, acks in moves:
        rig.manager.room = None if has_room else 0
        before = state.next_store_idx
        left = request.num_tokens - request.num_computed_tokens
        collect(rig.step(tokens=[(request, min(tokens, left))]))
        assert before <= state.next_store_idx <= len(state.gpu_block_ids) // 2
        if acks:
            rig.ack(metas.pop())
    rig.manager.room = None
    request.num_computed_tokens = request.num_tokens
    rig.planner.request_finished(request)
    collect(rig.step())
    for meta in metas:
        rig.ack(meta)
    assert stored == [rig.key(request, i, 2) for i in range(prompt // 4)]
    assert rig.manager.named("finished", "prepare_store")[-1] == ("finished", "a")
    assert len(rig.manager.named("finished")) == 1
    assert not rig.planner._states
    assert not rig.planner.has_pending_push_work()


@pytest.mark.parametrize(("cap", "tokens"), [(12, 12), (23, 12), (0, 0), (None, 36)])
def test_max_load_tokens(cap, tokens):
    rig = Rig()
    request = rig.request("a", 36, kv_transfer_params={"max_load_tokens": cap})
    rig.manager.answers = {rig.key(request, i): HIT for i in range(3)}
    assert rig.planner.get_num_new_matched_tokens(request, 0) == (tokens, tokens > 0)
