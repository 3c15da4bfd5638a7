"""What the next supervisor of a session goes on from."""

import pytest

from shmoffload.supervisor.keeper import TierKeeper
from shmoffload.wire.config import from_dict
from shmoffload.wire.messages import MAX_EPOCH
from shmoffload.wire.session import SessionPage, TierWord


@pytest.mark.parametrize(("word", "goes_on"), [(3, 3), (2**64 - 1, MAX_EPOCH)])
def test_counts_go_on_and_garbage_is_bounded(session_name, word, goes_on):
    config = from_dict(
        {
            "session": {"name": session_name},
            "primary": {"slots": 1, "block_bytes": 4096},
            "tier": [{"type": "memory"}],
        }
    )
    page = SessionPage.open_or_create(config)
    try:
        page.set_tier(0, TierWord.RESTARTS, word)
        page.set_tier(0, TierWord.WORKER_EPOCH, word)
        life = TierKeeper(0, config, page, ["unused"]).life
        assert (life.restarts, life.epoch) == (goes_on, goes_on)
    finally:
        page.unlink(session_name)
        page.close()
