"""``ShmOffloadingSpec``: what vLLM loads.

Covers: the way from vLLM's configuration to a manager or a worker.
Does not cover: anything that they do.
Who calls it: vLLM, by ``spec_name`` and ``spec_module_path``, once in the scheduler
and once in each GPU worker, which may be one process; the API server calls the class
methods only. Importing and constructing start nothing and make no name.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "ShmOffloadingSpec",
        "spec_module_path": "shmoffload.vllm.spec", "cpu_bytes_to_use": 17179869184}}'
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import OffloadingSpec

from shmoffload.errors import ShmoffloadError
from shmoffload.vllm import release
from shmoffload.vllm.setup.settings import Settings, in_vllm_words, read_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        OffloadingManager,
        OffloadingMetricMetadata,
        OffloadingWorker,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig

    from shmoffload.wire.config import Config

log = logging.getLogger(__name__)


class ShmOffloadingSpec(OffloadingSpec):
    """Offloading whose tiers live in processes of their own.

    Attributes:
        settings: what vLLM's configuration means here.
        replicated_layout: vLLM asks for it: whether rank 0 alone stores.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        """Check the configuration; nothing is started.

        Raises:
            BadInputError: a key, a value or the set-up cannot be used.
        """
        super().__init__(config)
        release.share_log_handlers()
        self.settings: Settings = read_settings(config, engine=release.engine_text())
        self.replicated_layout = self.settings.is_replicated
        self._manager: OffloadingManager | None = None
        self._worker: OffloadingWorker | None = None

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Declare every metric that the manager may ever report; never raises."""
        from shmoffload.vllm.report.metrics import metric_definitions

        return metric_definitions(extra_config)

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """Name the labels of ``config_info`` (vLLM 0.33); never raises."""
        from shmoffload.vllm.report.metrics import config_info_keys

        return config_info_keys(extra_config)

    def get_manager(self) -> OffloadingManager:
        """Start the engine and its tiers, at the first call.

        Raises:
            ShmoffloadError: memory, a tier's storage or a process; nothing is left.
        """
        if self._manager is None:
            from shmoffload.engine import Engine
            from shmoffload.vllm.manager import ShmOffloadingManager

            release.warn_if_untested()
            for note in self.settings.notes:
                log.warning("%s", note)
            config = self.settings.config
            with _vllm_words():
                engine = Engine(config, events=self.settings.has_events)
            _say_what_runs(config)
            try:
                self._manager = ShmOffloadingManager(engine, self.settings)
            except BaseException:
                engine.close()
                raise
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Make or join the region and copy to it, from the first call on.

        Raises:
            ShmoffloadError: memory, GPU workers on several nodes, uneven stages, or
                blocks that this vLLM stores in part; nothing of this process is left
                open.
        """
        if self._worker is None:
            from shmoffload.vllm.copies.worker import make_worker
            from shmoffload.wire.names import sweep
            from shmoffload.wire.region import PrimaryRegion

            release.refuse_several_nodes(self.settings.num_ranks)
            release.refuse_partial_windows(self.config)
            release.refuse_uneven_stages(self.config, self.settings.part_bytes)
            config = self.settings.config
            with _vllm_words():
                region = PrimaryRegion.open(
                    config, timeout_s=config.limits.start_timeout_s
                )
            try:
                self._worker = make_worker(kv_caches, region, self.settings)
            except BaseException:
                region.close()
                sweep(config.session.name)  # if nobody else has it
                raise
        return self._worker


@contextlib.contextmanager
def _vllm_words() -> Iterator[None]:
    """Let a refusal name its keys as one types them under vLLM."""
    try:
        yield
    except ShmoffloadError as error:
        raise type(error)(in_vllm_words(str(error))) from error


def _say_what_runs(config: Config) -> None:
    tiers = ", ".join(f"{tier.name} ({tier.type})" for tier in config.tier)
    log.info(
        'session "%s": %d blocks of %d bytes in memory, tiers %s, namespace %s; see '
        "`shmoffload status`",
        config.session.name,
        config.num_slots,
        config.block_bytes,
        tiers or "none",
        config.namespace_digest.hex()[:8],
    )
