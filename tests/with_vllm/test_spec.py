"""The spec, through vLLM's own factory, with vLLM's own configuration objects."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    OffloadPolicy,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from shmoffload.errors import BadInputError, ConfigError
from shmoffload.vllm import release
from shmoffload.vllm.spec import ShmOffloadingSpec

# vLLM imports parts of torch late, and those warn about themselves.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BLOCK = 65536
RUN_TIMEOUT_S = 120.0
PATHS = os.pathsep.join(
    filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])
)
DROP_IN = {
    "spec_name": "ShmOffloadingSpec",
    "spec_module_path": "shmoffload.vllm.spec",
    "cpu_bytes_to_use": 1 << 22,
}


def offloading_config(extra=None, *, session="", **changes):
    ours = {"shmoffload": {"session": session}} if session else {}
    fields = {
        "groups": (
            OffloadingGroupConfig(
                tokens_per_block=32, layer_names=("l.0", "l.1"), group_id=0
            ),
        ),
        "worker_kv_bytes_per_block": BLOCK,
        "enable_kv_cache_events": False,
        "extra_config": DROP_IN | ours | (extra or {}),
        "engine_id": "engine0",
        "model": OffloadingModelConfig(name="no/such-model", dtype="float32"),
        "cache": OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=1),
        "parallel": OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
        "kv_cache_layout": "LBHNC",
    }
    return OffloadingConfig(**(fields | changes))


class TestSpec:
    def test_vllms_factory_makes_it(self):
        spec = OffloadingSpecFactory.create_spec(offloading_config())
        assert type(spec) is ShmOffloadingSpec
        assert spec.blocks_per_chunk == 1
        assert spec.offload_prompt_only
        assert not spec.replicated_layout
        assert spec.settings.config.block_bytes == BLOCK
        assert "cpu" in spec.settings.config.session.namespace

    def test_one_copy_for_all_ranks_is_told_to_vllm(self):
        config = offloading_config(replicated_layout=True)
        assert ShmOffloadingSpec(config).replicated_layout
        config = dataclasses.replace(config, canonical_layout=True)
        assert not ShmOffloadingSpec(config).replicated_layout

    @pytest.mark.parametrize(
        ("extra", "error", "sentence"),
        [
            ({"cpu_bytes_to_use": 0}, ConfigError, "holds no block"),
            ({"evict": "lru"}, ConfigError, "unknown key evict"),
            ({"secondary_tiers": [{"type": "obj"}]}, ConfigError, "the nearest is"),
        ],
    )
    def test_a_refusal_is_the_constructors(self, extra, error, sentence):
        with pytest.raises(error, match=sentence):
            OffloadingSpecFactory.create_spec(offloading_config(extra))

    @pytest.mark.parametrize(
        "extra", [{}, {"secondary_tiers": 7}, {"secondary_tiers": [7, {"type": "fs"}]}]
    )
    def test_metrics_are_defined_whatever_the_configuration(self, extra):
        cls = OffloadingSpecFactory.get_spec_cls(DROP_IN)
        definitions = cls.build_metric_definitions(DROP_IN | extra)
        assert all(name.startswith("vllm:") for name in definitions)
        assert definitions
        assert isinstance(cls.config_info_keys(DROP_IN | extra), tuple)

    def test_a_manager_is_made_once_and_gives_everything_back(self, session_name):
        spec = OffloadingSpecFactory.create_spec(
            offloading_config(session=session_name)
        )
        manager = spec.get_manager()
        try:
            assert spec.get_manager() is manager
        finally:
            manager.shutdown()

    def test_notes_are_said_once_by_the_scheduler(self, session_name, caplog):
        config = offloading_config({"tier_poll_interval_s": 1}, session=session_name)
        spec = OffloadingSpecFactory.create_spec(config)
        assert "tier_poll_interval_s" not in caplog.text
        spec.get_manager().shutdown()
        assert caplog.text.count("tier_poll_interval_s has no meaning here") == 1

    def test_a_failed_start_leaves_nothing(self, session_name, tmp_path):
        not_a_directory = tmp_path / "file"
        not_a_directory.write_text("x")
        tier = {"type": "fs", "root_dir": str(not_a_directory / "below")}
        spec = OffloadingSpecFactory.create_spec(
            offloading_config({"secondary_tiers": [tier]}, session=session_name)
        )
        with pytest.raises(BadInputError):
            spec.get_manager()


class TestWorker:
    @pytest.fixture
    def caches(self):
        """KV caches of two layers, as vLLM registers them on a CPU."""
        page = BLOCK // 2
        tensors = [
            CanonicalKVCacheTensor(
                tensor=torch.zeros((4, page), dtype=torch.int8), page_size_bytes=page
            )
            for _ in range(2)
        ]
        refs = [
            CanonicalKVCacheRef(tensor_idx=idx, page_size_bytes=page)
            for idx in range(2)
        ]
        return CanonicalKVCaches(tensors=tensors, group_data_refs=[refs])

    def test_a_worker_is_made_once_and_leaves_nothing(self, session_name, caches):
        spec = OffloadingSpecFactory.create_spec(
            offloading_config(session=session_name)
        )
        worker = spec.get_worker(caches)
        try:
            assert spec.get_worker(caches) is worker
        finally:
            worker.shutdown()

    def test_a_worker_that_cannot_be_leaves_nothing(self, session_name, caches):
        spec = OffloadingSpecFactory.create_spec(
            offloading_config(session=session_name)
        )
        caches.tensors[0].tensor = caches.tensors[0].tensor.to("meta")
        with pytest.raises(Exception, match="meta"):
            spec.get_worker(caches)

    def test_worker_and_scheduler_meet_in_one_region(self, session_name, caches):
        config = offloading_config(session=session_name)
        worker = ShmOffloadingSpec(config).get_worker(caches)
        manager = ShmOffloadingSpec(config).get_manager()
        manager.shutdown()
        worker.shutdown()


def configured(monkeypatch, *, nodes, backend):
    parallel = SimpleNamespace(
        nnodes_within_dp=nodes, distributed_executor_backend=backend
    )
    monkeypatch.setattr(
        "vllm.config.get_current_vllm_config_or_none",
        lambda: SimpleNamespace(parallel_config=parallel),
    )


class TestNodes:
    @pytest.mark.parametrize("backend", ["mp", "ray"])
    def test_several_nodes_are_refused(self, monkeypatch, backend):
        configured(monkeypatch, nodes=2, backend=backend)
        with pytest.raises(BadInputError, match="on several nodes"):
            release.refuse_several_nodes(2)

    @pytest.mark.parametrize(
        ("shared", "is_served"), [([True] * 2, True), ([True, False], False)]
    )
    def test_where_workers_may_be_anywhere_they_are_asked(
        self, monkeypatch, shared, is_served
    ):
        configured(monkeypatch, nodes=1, backend="ray")
        group = SimpleNamespace(cpu_group="the group")
        state = "vllm.distributed.parallel_state"
        monkeypatch.setattr(f"{state}.get_inner_dp_world_group", lambda: group)
        monkeypatch.setattr(
            f"{state}.in_the_same_node_as", lambda pg, source_rank: shared
        )
        if is_served:
            release.refuse_several_nodes(2)
        else:
            with pytest.raises(BadInputError, match="on several nodes"):
                release.refuse_several_nodes(2)

    def test_processes_of_one_node_are_not_asked(self, monkeypatch):
        configured(monkeypatch, nodes=1, backend="mp")
        release.refuse_several_nodes(2)

    def test_one_worker_is_on_one_node(self, monkeypatch):
        configured(monkeypatch, nodes=2, backend="mp")
        release.refuse_several_nodes(1)


class TestWindows:
    @pytest.mark.parametrize(
        ("per_chunk", "window", "is_mended", "is_refused"),
        [
            (2, 4096, False, True),
            (1, 4096, False, False),
            (2, None, False, False),
            (2, 4096, True, False),
        ],
    )
    def test_partial_blocks_of_a_window_are_refused(
        self, monkeypatch, per_chunk, window, is_mended, is_refused
    ):
        model = SimpleNamespace(
            get_sliding_window=lambda: window, disable_sliding_window=False
        )
        scheduler = SimpleNamespace(disable_hybrid_kv_cache_manager=False)
        current = SimpleNamespace(model_config=model, scheduler_config=scheduler)
        monkeypatch.setattr(
            "vllm.config.get_current_vllm_config_or_none", lambda: current
        )
        mended = {"sliding_window_size_in_chunks": 2} if is_mended else {}
        config = SimpleNamespace(
            cache=SimpleNamespace(blocks_per_chunk=per_chunk),
            groups=(SimpleNamespace(**mended),),
        )
        if is_refused:
            with pytest.raises(BadInputError, match="with parts missing"):
                release.refuse_partial_windows(config)
        else:
            release.refuse_partial_windows(config)


class TestRelease:
    def test_this_vllm_is_in_the_tested_range(self, caplog):
        release.warn_if_untested()
        assert caplog.records == []

    @pytest.mark.parametrize("version", ["0.31.9", "0.34.0+cpu", "1.0", "dev"])
    def test_another_is_warned_of_once(self, caplog, version):
        for _ in range(2):
            release.warn_if_untested(version)
        (record,) = caplog.records
        assert "0.32 to 0.33" in record.getMessage()
        assert version in record.getMessage()

    @pytest.fixture
    def loggers(self, monkeypatch):
        """Loggers in the place of vLLM's and ours, with a handler at vLLM's."""
        names = ("vllm", "shmoffload")
        made = {name: logging.getLogger(f"test.{name}") for name in names}
        for logger in made.values():
            monkeypatch.setattr(logger, "handlers", [])
            # pytest would give a logger that does not propagate a handler of its own.
            monkeypatch.setattr(logger, "parent", None)
            monkeypatch.setattr(logger, "propagate", True)
        made["vllm"].addHandler(logging.NullHandler())
        made["vllm"].setLevel(logging.DEBUG)
        monkeypatch.setattr(release, "logging", SimpleNamespace(getLogger=made.get))
        return made

    def test_our_lines_go_where_vllms_go(self, loggers):
        for _ in range(2):
            release.share_log_handlers()
        assert loggers["shmoffload"].handlers == loggers["vllm"].handlers
        assert loggers["shmoffload"].level == logging.DEBUG

    def test_a_logger_that_is_set_up_is_left_alone(self, loggers):
        own = logging.NullHandler()
        loggers["shmoffload"].addHandler(own)
        release.share_log_handlers()
        assert loggers["shmoffload"].handlers == [own]

    def test_policies_by_vllms_names(self):
        whole = release.offload_policy(is_request_level=True)
        assert whole is OffloadPolicy.REQUEST_LEVEL
        assert release.offload_policy(is_request_level=False) is not whole


PROGRAM = """
import json, os, sys, threading
from types import SimpleNamespace
import vllm.v1.kv_offload.factory
import vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics
from vllm.platforms import current_platform

current_platform.device_type

def namespace(fields):
    return SimpleNamespace(**fields)

def seen():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        children = file.read()
    return {
        "names": [n for n in os.listdir("/dev/shm") if sys.argv[1] in n],
        "children": children,
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "files": os.listdir("."),
    }

config = json.loads(sys.argv[2], object_hook=namespace)
config.extra_config = vars(config.extra_config)
config.extra_config["shmoffload"] = vars(config.extra_config["shmoffload"])
before = seen()
from shmoffload.vllm.spec import ShmOffloadingSpec
spec = ShmOffloadingSpec(config)
ShmOffloadingSpec.build_metric_definitions(config.extra_config)
print(json.dumps([before, seen(), spec.settings.config.session.name]))
"""


def test_importing_and_constructing_have_no_side_effect(session_name, tmp_path):
    """Neither a name, a file, a descriptor, a process nor a thread comes of them."""
    config = dataclasses.asdict(offloading_config(session=session_name))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, session_name, json.dumps(config)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": PATHS},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, after, name = json.loads(done.stdout.splitlines()[-1])
    assert name == session_name
    assert after == before
    assert after["names"] == after["files"] == []
