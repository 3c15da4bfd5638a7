"""Our figures through vLLM's own Prometheus half: declared, zero first, exact."""

import errno
import functools
import types

import pytest
from adapter_kit import END, HIT, MISS, keys_of, server, settings_of, slab
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadPromMetrics,
    get_connector_metric_definitions,
)
from vllm.v1.kv_offload import base as vllm_base
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from shmoffload.testing.faults.control import Call, Control
from shmoffload.testing.poll import wait_until
from shmoffload.vllm.report import metrics
from shmoffload.vllm.report.metric_names import ALLOCATION_SIZE, DEFINITIONS
from shmoffload.wire.session import Fault, TierWord

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BLOCK_BYTES = 16 * 1024
HAS_INFO = hasattr(vllm_base, "ConfigInfo")


class Page:
    """What ``/metrics`` shows: vLLM's class over a registry of its own."""

    def __init__(self):
        self._registry = CollectorRegistry()
        kinds = {
            kind: functools.partial(kind, registry=self._registry)
            for kind in (Counter, Gauge, Histogram)
        }
        extra = {
            "spec_name": "ShmOffloadingSpec",
            "spec_module_path": "shmoffload.vllm.spec",
            "cpu_bytes_to_use": 1 << 20,
        }
        config = types.SimpleNamespace(
            kv_transfer_config=types.SimpleNamespace(kv_connector_extra_config=extra)
        )
        self._prom = OffloadPromMetrics(config, kinds, ["model_name"], {0: ["tiny"]})

    def take(self, manager):
        """Do what the scheduler, the wire and the API server do with an answer."""
        stats = manager.get_stats()
        if stats is not None and not stats.is_empty():
            self._prom.observe(stats.data, 0)

    def value(self, name, *labels):
        """Return a series, None if it is not there."""
        kind, labelnames, _ = DEFINITIONS[name]
        suffix = "_total" if kind.name == "COUNTER" else ""
        return self._registry.get_sample_value(
            name + suffix,
            {"model_name": "tiny", **dict(zip(labelnames, labels, strict=True))},
        )

    def series(self):
        """Return (name, labels) of all samples, without Prometheus' own."""
        return {
            (sample.name.removesuffix("_total"), tuple(sample.labels.items()))
            for family in self._registry.collect()
            for sample in family.samples
            if not sample.name.endswith("_created")
        }


@pytest.fixture
def two(session_name, tmp_path):
    """A server with a disk and a memory tier."""
    tiers = [slab(tmp_path), {"type": "memory", "max_bytes": "8MiB"}]
    with server(settings_of(session_name, tiers)) as started:
        yield started


def test_definitions_are_vllms_where_the_name_is():
    """Same kind and labels as vLLM's own: dashboards keep working."""
    theirs = TieringOffloadingSpec.build_metric_definitions({"store_threshold": 2})
    ours = metrics.metric_definitions({})
    shared = [name for name in ours if name.startswith("vllm:kv_offload_")]
    assert len(shared) > 15
    for name in shared:
        assert isinstance(ours[name], type(theirs[name])), name
        assert ours[name].labelnames == theirs[name].labelnames, name
    assert not set(ours) & set(get_connector_metric_definitions())
    assert all(ours[name].documentation for name in ours)


def test_every_name_is_there_from_the_first_answer_on(two):
    """Zeros, with every label, before anything happened; none undeclared."""
    page = Page()
    page.take(two.manager)
    found = {name for name, _ in page.series()}
    assert found >= set(DEFINITIONS) - {ALLOCATION_SIZE}
    for name, labels in page.series():
        if name in DEFINITIONS and DEFINITIONS[name].kind.name == "COUNTER":
            assert page.value(name, *dict(labels[1:]).values()) == 0, (name, labels)
    for tier in ("1:slab", "2:memory"):
        assert page.value("vllm:shmoffload_tier_up", tier) == 1
    assert page.value("vllm:shmoffload_slots", "free") == 32
    for method in metrics.METHODS:
        assert page.value("vllm:shmoffload_adapter_errors", method) == 0


def test_an_undeclared_series_ends_the_server(two):
    """Why the test above matters; vLLM's rule, as it is today."""
    stats = two.manager.get_stats()
    stats.increase_counter("vllm:shmoffload_unknown")
    with pytest.raises(AssertionError):
        Page()._prom.observe(stats.data, 0)
    stats = two.manager.get_stats()
    stats.set_gauge("vllm:shmoffload_tier_up", 1, ("1:slab", "more"))
    with pytest.raises(AssertionError):
        Page()._prom.observe(stats.data, 0)


def test_nothing_changed_says_nothing(session_name):
    """An answer is sent to another process in every step: it has to be small."""
    with server(settings_of(session_name)) as started:
        assert not started.manager.get_stats().is_empty()
        assert started.manager.get_stats().is_empty()


@pytest.mark.parametrize("takes_all", [True, False])
def test_figures_of_known_traffic_are_exact(two, takes_all):
    """Four blocks stored, two loaded from memory, two from disk, one missed.

    Counters are differences of totals: answers that are not asked for lose nothing.
    """
    page, manager = Page(), two.manager
    page.take(manager)

    def take():
        if takes_all:
            page.take(manager)

    ctx, keys = two.request("a"), keys_of(0, 4)
    two.store(ctx, keys)
    take()
    two.await_written(4, 0)
    two.await_written(4, 1)
    assert two.load(ctx, keys[:2]) == ["host", "host"]
    take()
    two.drop_primary()
    other = two.request("b")
    assert two.load(other, keys[2:]) == ["disk", "disk"]
    late = two.request("c")
    for _ in range(5):  # a request that waits asks again and again
        assert two.scan(late, keys_of(9, 1)) == [MISS]
        manager.on_schedule_end(END)
        take()
    assert manager.prepare_store(keys_of(10, 33), other) is None
    manager.on_schedule_end(END)
    page.take(manager)
    tier, ours = "vllm:kv_offload_tiering_", "vllm:shmoffload_"
    primary, disk, memory = "0:primary", "1:slab", "2:memory"
    assert page.value(ours + "stored_blocks") == 4
    assert page.value(ours + "store_offers") == 2
    assert page.value(ours + "store_offers_refused") == 1
    assert page.value(ours + "resets") == 1
    assert page.value(ours + "requests") == 3
    assert page.value(ours + "lookups", "miss") == 5
    assert [page.value(ours + "loaded_blocks", t) for t in (primary, disk, memory)] == [
        2,
        2,
        0,
    ]
    assert [page.value(tier + "chunk_hits", t) for t in (primary, disk, memory)] == [
        2,
        2,
        0,
    ]
    assert [page.value(tier + "chunk_queries", t) for t in (primary, disk, memory)] == [
        5,
        3,
        1,
    ]
    for label in (disk, memory):
        assert page.value(tier + "write_bytes", label) == 4 * BLOCK_BYTES
        assert page.value(tier + "write_time", label) > 0
        assert page.value(ours + "tier_jobs", label, "cascade") == 1
    assert page.value(tier + "read_bytes", disk) == 2 * BLOCK_BYTES
    assert page.value(tier + "read_bytes", memory) == 0
    assert page.value(tier + "read_time", disk) > 0
    assert page.value(tier + "read_time", memory) == 0
    assert page.value(ours + "tier_jobs", disk, "promotion") == 1
    assert page.value(ours + "tier_blocks", disk, "read") == 2


def test_shares_of_the_primary(session_name):
    """Written, read and quarantined slots are what cannot be evicted."""
    with server(settings_of(session_name, slots=10)) as started:
        page, cpu = Page(), "vllm:kv_offload_cpu_cache_"
        ctx, keys = started.request("a"), keys_of(0, 4)
        started.store(ctx, keys)
        page.take(started.manager)
        assert page.value(cpu + "usage_perc") == 0
        assert started.load(ctx, keys) == ["host"] * 4
        page.take(started.manager)
        assert page.value(cpu + "read_usage_perc") == 0
        assert started.scan(ctx, keys[:2]) == [HIT, HIT]
        started.manager.prepare_load(keys[:2], ctx)
        started.manager.prepare_store(keys_of(9, 3), ctx)
        page.take(started.manager)
        assert page.value(cpu + "read_usage_perc") == 0.2
        assert page.value(cpu + "write_usage_perc") == 0.3
        assert page.value(cpu + "usage_perc") == 0.5
        started.manager.reset_cache()
        page.take(started.manager)
        assert page.value(cpu + "usage_perc") == 0.5
        assert page.value("vllm:shmoffload_slots", "quarantined") == 5
        assert page.value("vllm:shmoffload_reset_fence_held") == 1
        started.manager.on_reset_flushed()
        page.take(started.manager)
        assert page.value(cpu + "usage_perc") == 0


def test_failures_have_a_reason(session_name, tmp_path):
    """A killed worker: the tier goes down, is started again, and says so."""
    with server(settings_of(session_name, [slab(tmp_path)])) as started:
        page = Page()
        page.take(started.manager)
        ctx, keys = started.request("a"), keys_of(0, 2)
        started.store(ctx, keys)
        started.await_written(2)
        started.drop_primary()
        spoil(tmp_path)
        wait_until(
            lambda: started.scan_to_end(ctx, keys[:1]) == [MISS],
            timeout_s=30.0,
            what="a miss for a bad block",
        )
        started.manager.on_schedule_end(END)
        page.take(started.manager)
        ours = "vllm:shmoffload_"
        assert page.value(ours + "tier_blocks_failed", "1:slab", "bad_block") == 1
        assert page.value(ours + "tier_jobs_failed", "1:slab", "blocks_failed") == 1
        assert (
            page.value("vllm:kv_offload_tiering_promotion_job_failures", "1:slab") == 1
        )
        started.engine._control.kill_worker(
            0, started.engine.tiers[0].worker_epoch, reason="a test", now_s=0.0
        )

        def is_back():
            started.manager.lookup(keys_of(7, 1)[0], ctx)
            started.manager.on_schedule_end(END)
            page.take(started.manager)
            return started.tier_word(TierWord.RESTARTS) == 1 and bool(
                started.engine.tiers[0].is_up
            )

        wait_until(is_back, timeout_s=30.0, what="a restart")
        assert page.value(ours + "tier_worker_restarts", "1:slab") == 1


def test_what_the_system_refused_is_told_apart(session_name, tmp_path):
    """A full disk, and a broken one, want different persons."""
    faults, page = Control(tmp_path), Page()
    tiers = [{"type": "faulty", "path": str(tmp_path), "min_free": 0, "nice": 0}]
    with server(settings_of(session_name, tiers)) as started:
        ctx = started.request("a")
        refused = "vllm:shmoffload_tier_blocks_refused"
        backing_off = "vllm:shmoffload_tier_backing_off"

        def value(name, reason):
            page.take(started.manager)
            return page.value(name, "1:faulty", reason)

        for i in range(3):
            faults.fail(Call.PUT, errno.EIO)
            started.store(ctx, keys_of(i, 1))
            wait_until(
                lambda i=i: value(refused, "io") == i + 1,
                timeout_s=60.0,
                what="a refused block",
            )
            assert value(refused, "no_space") == 0
        wait_until(
            lambda: value(backing_off, "io") == 1, timeout_s=60.0, what="backing off"
        )
        assert value(backing_off, "no_space") == 0
        failed = "vllm:shmoffload_tier_blocks_failed"
        assert value(failed, "storage_refused") == 3
        started.engine.page.set_tier(0, TierWord.BACKING_OFF, Fault.NO_SPACE)
        assert (value(backing_off, "no_space"), value(backing_off, "io")) == (1, 0)


def spoil(folder):
    """Overwrite the payloads in a tier's files, as a bad disk would."""
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > BLOCK_BYTES:
            with path.open("r+b") as file:
                data = file.read()
                file.seek(0)
                file.write(bytes(byte ^ 0x55 for byte in data))


def test_what_is_not_ours_to_count_is_left_out(two):
    """A page of a daemon that served others before: this server starts at zero."""
    two.engine.page.set_tier(0, TierWord.RESTARTS, 7)
    started = metrics.Metrics(two.engine, settings_of("x", _tiers_of(two)))
    page = Page()
    page.take(types.SimpleNamespace(get_stats=started.take))
    assert page.value("vllm:shmoffload_tier_worker_restarts", "1:slab") == 0
    two.engine.page.set_tier(0, TierWord.RESTARTS, 2)  # made anew, and twice since
    page.take(types.SimpleNamespace(get_stats=started.take))
    assert page.value("vllm:shmoffload_tier_worker_restarts", "1:slab") == 2


def _tiers_of(started):
    return [
        {"type": tier.type, "path": tier.path, "max_bytes": tier.max_bytes}
        for tier in started.engine.config.tier
    ]


def test_observations_that_nobody_takes_are_bounded(session_name):
    """``--disable-log-stats`` of a later vLLM: no memory grows."""
    with server(settings_of(session_name)) as started:
        figures = started.manager._metrics
        for _ in range(20_000):
            figures.note_allocation(1)
        assert len(figures._allocations) == 10_000


def test_config_info_fills_what_is_declared(two):
    """0.33 warns of labels that only one side knows."""
    (info,) = two.manager.config_info()
    assert tuple(info) == metrics.config_info_keys({})
    assert info["tiers"] == "1:slab,2:memory"
    assert info["slots"] == 32


@pytest.mark.skipif(not HAS_INFO, reason="0.32 has no config info")
def test_config_info_reaches_the_page(two):
    page = Page()
    stats = two.manager.get_stats()
    stats.set_info(two.manager.config_info())
    page._prom.observe(stats.data, 0)
    labels = next(
        dict(labels)
        for name, labels in page.series()
        if name == "vllm:kv_offload_config_info"
    )
    assert labels["tiers"] == "1:slab,2:memory"
