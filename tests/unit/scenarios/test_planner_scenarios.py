"""Scenarios of the planner: what is loaded, offered and when, by their ids.

Most rows run against a manager that accepts everything; what depends on the real
one says so.
"""

from manager_kit import Rig as ManagerRig
from planner_kit import HIT, MISS, PENDING, RETRY, Rig

from shmoffload.core.types import OffloadPolicy
from shmoffload.core.window_scan import scan_window


def gpu_blocks(jobs):
    return [list(job.gpu_block_ids) for job in jobs]


def in_flight(**config):
    """A request of one block whose store is open."""
    rig = Rig(**config)
    request = rig.request("a", 12)
    rig.admit(request)
    meta = rig.step(tokens=[(request, 12)])
    assert len(meta.stores) == 1
    return rig, request, meta


def test_s03_after_a_load_the_policy_decides_what_is_offered():
    """After a load, REQUEST_LEVEL offers the loaded block too."""
    for policy, expected in (
        (OffloadPolicy.REQUEST_LEVEL, [1, 2, 3, 4, 5, 6]),
        (OffloadPolicy.BLOCK_LEVEL, [4, 5, 6]),
    ):
        rig = Rig(tokens=4, per_block=3, policy=policy)
        request = rig.request("a", 24)
        rig.manager.answers[rig.key(request, 0, 3)] = HIT
        assert rig.admit(request) == 12
        meta = rig.step()
        assert gpu_blocks(meta.loads) == [[1, 2, 3]]
        assert not meta.stores
        rig.ack(meta)
        assert gpu_blocks(rig.step(tokens=[(request, 12)]).stores) == [expected]


def test_s05_purely_local_hit_is_offered_from_block_0():
    """The real manager then drops what it has."""
    manager_rig = ManagerRig(8)
    rig = Rig(manager=manager_rig.manager)
    earlier = rig.request("earlier", 24)
    rig.admit(earlier)
    rig.ack(rig.step(tokens=[(earlier, 24)]))
    request = rig.request("a", 36)
    request.block_hashes[:2] = earlier.block_hashes
    assert rig.admit(request, local=24) == 0
    assert rig.planner._states["a"].next_store_idx == 0
    (store,) = rig.step(tokens=[(request, 12)]).stores
    assert list(store.keys) == [rig.key(request, 2)]


def test_s30_refused_blocks_are_offered_again_with_more():
    rig = Rig()
    request = rig.request("a", 24)
    rig.admit(request)
    rig.manager.room = 0
    assert not rig.step(tokens=[(request, 12)]).stores
    rig.manager.room = 2
    (store,) = rig.step(tokens=[(request, 12)]).stores
    assert list(store.keys) == [rig.key(request, 0), rig.key(request, 1)]
    assert rig.planner.counters.stores_refused == 1


def test_s31_what_the_manager_left_out_is_not_offered_again():
    rig = Rig()
    request = rig.request("a", 36)
    rig.admit(request)
    first, second, third = (rig.key(request, i) for i in range(3))
    rig.manager.takes = lambda key: key == second
    (store,) = rig.step(tokens=[(request, 24)]).stores
    assert (list(store.keys), list(store.gpu_block_ids)) == ([second], [2])
    rig.step(tokens=[(request, 12)])
    assert rig.manager.named("prepare_store") == [
        ("prepare_store", (first, second)),
        ("prepare_store", (third,)),
    ]


def test_s32_finish_hook_once_and_before_the_last_completion():
    rig, request, meta = in_flight()
    rig.planner.request_finished(request)
    rig.planner.request_finished(request)
    rig.step()
    assert "a" in rig.planner._states
    assert rig.planner.has_pending_push_work()
    rig.ack(meta)
    rig.step()
    words = [entry[0] for entry in rig.manager.named("finished", "complete_store")]
    assert words == ["finished", "complete_store"]
    assert not rig.planner._states
    assert not rig.planner.has_pending_push_work()


def test_s33_finishing_step_is_offer_then_finish_then_step_end():
    rig = Rig()
    request = rig.request("a", 12)
    rig.admit(request)
    rig.manager.room = 0
    rig.step(tokens=[(request, 12)])
    rig.manager.room = 1
    rig.planner.request_finished(request)
    rig.manager.log.clear()
    assert len(rig.step().stores) == 1
    words = [entry[0] for entry in rig.manager.log]
    assert words == ["prepare_store", "finished", "step_end"]


def test_s43_readmission_waits_for_the_store_in_flight():
    rig, request, meta = in_flight()
    flush = rig.step(preempted_req_ids=["a"]).jobs_to_flush
    assert flush == {meta.stores[0].job_id}
    rig.manager.log.clear()
    assert rig.planner.get_num_new_matched_tokens(request, 0) == (None, False)
    assert rig.manager.log == []


def test_s44_readmission_after_the_ack_offers_from_block_0():
    rig, request, meta = in_flight()
    rig.step(preempted_req_ids=["a"])
    rig.ack(meta)
    request.num_computed_tokens = 0
    rig.manager.log.clear()
    assert rig.admit(request) == 0
    assert rig.planner._states["a"].next_store_idx == 0
    assert not rig.step(tokens=[(request, 12)]).stores  # the manager has it
    offers = rig.manager.named("prepare_store")
    assert offers == [("prepare_store", (rig.key(request, 0),))]


def test_s45_store_of_a_reallocated_gpu_block_is_flushed_first():
    rig = Rig()
    first, second = rig.request("a", 24), rig.request("b", 12)
    rig.admit(first)
    meta = rig.step(tokens=[(first, 24)])
    rig.planner.request_finished(first)
    rig.manager.answers[rig.key(second, 0)] = HIT
    rig.admit(second, blocks=[2])
    after = rig.step()
    assert len(after.loads) == 1
    assert after.jobs_to_flush == {meta.stores[0].job_id}
    rig.ack(meta)
    assert not rig.step(block_tables={"b": [2]}).jobs_to_flush


def test_s46_window_group_skips_a_block_whose_gpu_block_was_reused():
    rig = Rig(window_blocks=2)
    first, second = rig.request("a", 36), rig.request("b", 12)
    rig.admit(first, blocks=[1, 2, 3])
    rig.manager.room = 0
    assert not rig.step(tokens=[(first, 24)]).stores  # refused
    rig.admit(second, blocks=[1])  # the window has let go of it
    rig.manager.room = None
    meta = rig.step(tokens=[(first, 12), (second, 12)])
    by_request = {job.req_id: list(job.keys) for job in meta.stores}
    assert by_request == {
        "a": [rig.key(first, 1), rig.key(first, 2)],
        "b": [rig.key(second, 0)],
    }
    # Its stores are fenced at once: it goes on letting go of blocks.
    third = rig.request("c", 12)
    rig.admit(third, blocks=[2])
    (store_of_a,) = (job for job in meta.stores if job.req_id == "a")
    assert rig.step().jobs_to_flush == {store_of_a.job_id}


def test_s47_max_offload_tokens():
    for cap, blocks in ((12, 1), (0, 0), (True, 3), (-1, 3), ("12", 3), (35, 2)):
        rig = Rig()
        request = rig.request("a", 36, kv_transfer_params={"max_offload_tokens": cap})
        rig.admit(request)
        stores = rig.step(tokens=[(request, 36)]).stores
        assert sum(len(job.keys) for job in stores) == blocks, cap


def test_s48_decoded_blocks():
    for prompt_only, blocks in ((True, 0), (False, 1)):
        rig = Rig(offload_prompt_only=prompt_only)
        request = rig.request("a", 12)
        rig.admit(request, blocks=[1, 2])
        rig.ack(rig.step(tokens=[(request, 12)]))
        request.num_tokens = 24
        rig.hash(request)
        stores = rig.step(tokens=[(request, 12)]).stores
        assert sum(len(job.keys) for job in stores) == blocks
        assert gpu_blocks(stores) == [[2]] * blocks


def test_s49_skip_reading_prefix_cache():
    rig = Rig()
    request = rig.request("a", 12, skip_reading_prefix_cache=True)
    rig.manager.answers[rig.key(request, 0)] = HIT
    assert rig.admit(request) == 0
    assert not rig.manager.named("lookup")
    assert len(rig.step(tokens=[(request, 12)]).stores) == 1


def test_s50_prefix_scan_asks_on_after_pending_and_retry():
    rig = Rig()
    request = rig.request("a", 72)
    for i, answer in enumerate([HIT, PENDING, RETRY, HIT, MISS, HIT]):
        rig.manager.answers[rig.key(request, i)] = answer
    assert rig.planner.get_num_new_matched_tokens(request, 0) == (None, False)
    asked = [key for _, key in rig.manager.named("lookup")]
    assert asked == [rig.key(request, i) for i in range(5)]


def test_s51_window_scan_keeps_its_streak_over_a_pending_block():
    rig = Rig(window_blocks=2)
    request = rig.request("a", 25)
    first, second = rig.key(request, 0), rig.key(request, 1)
    rig.manager.answers = {first: HIT, second: PENDING}
    assert rig.planner.get_num_new_matched_tokens(request, 0) == (None, False)
    assert len(rig.manager.named("lookup")) == 2
    rig.manager.answers[second] = HIT
    assert rig.planner.get_num_new_matched_tokens(request, 0) == (24, True)


def test_s52_waits_for_the_load_of_another_request():
    rig = Rig(gpu_prefix_cache=True)
    first, second = rig.request("a", 12), rig.request("b", 12)
    second.block_hashes[:] = first.block_hashes
    rig.manager.answers[rig.key(first, 0)] = HIT
    assert rig.admit(first) == 12
    meta = rig.step()
    assert rig.planner.get_num_new_matched_tokens(second, 0) == (None, False)
    rig.ack(meta)  # now the GPU's own prefix cache has it
    assert rig.admit(second, local=12) == 0
    assert not rig.step().loads


def test_window_scan_row_by_row():
    """From the end; MISS and RETRY break a run, PENDING does not."""
    for answers, window, expected in (
        ([HIT, HIT, HIT, MISS], 2, (3, True)),
        ([HIT, MISS, HIT, HIT, MISS], 2, (4, True)),
        ([HIT, MISS, HIT], 2, (1, True)),
        ([MISS, HIT, MISS], 2, (0, True)),
        ([HIT, HIT, RETRY], 2, (2, False)),
        ([HIT, PENDING, PENDING], 2, (3, False)),
        ([HIT], 4, (1, True)),
        ([], 2, (0, True)),
    ):
        found = scan_window(answers.__getitem__, range(len(answers)), window)
        assert tuple(found) == expected, answers
