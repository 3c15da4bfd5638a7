"""Every shipped tier passes the conformance suite."""

from shmoffload.testing.tier_tests import TierTests
from shmoffload.wire.config import TierConfig
from shmoffload.worker.tiers.fs import FsTier
from shmoffload.worker.tiers.memory import MemoryTier
from shmoffload.worker.tiers.slab import SlabTier


class TestSlab(TierTests):
    tier_class = SlabTier

    def make_config(self, tmp_path):
        return TierConfig(
            type="slab", name="s", path=str(tmp_path), max_bytes="1MiB", min_free=0
        )


class TestFs(TierTests):
    tier_class = FsTier

    def make_config(self, tmp_path):
        return TierConfig(
            type="fs", name="f", path=str(tmp_path), max_bytes="1MiB", min_free=0
        )


class TestMemory(TierTests):
    tier_class = MemoryTier

    def make_config(self, tmp_path):
        return TierConfig(type="memory", name="m")
