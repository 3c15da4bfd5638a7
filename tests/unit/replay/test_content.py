"""Block contents: every byte depends on key and position."""

import numpy as np
import pytest

from shmoffload.replay.content import BlockContent


@pytest.mark.parametrize("size", [1, 7, 8, 4096, 4099])
def test_every_changed_byte_is_seen(size):
    content = BlockContent(size)
    view = bytearray(size)
    content.fill(view, b"key-a")
    assert view == content.bytes_of(b"key-a")
    assert content.verify(memoryview(view), b"key-a")
    for i in {0, size // 2, size - 1}:
        view[i] ^= 0x40
        assert not content.verify(view, b"key-a")
        view[i] ^= 0x40
    assert not content.verify(view, b"key-b")
    assert not content.verify(view[:-1], b"key-a")


def test_words_differ_by_key_and_position():
    content = BlockContent(8192)
    a = np.frombuffer(content.bytes_of(b"key-a"), np.uint64)
    b = np.frombuffer(content.bytes_of(b"key-b"), np.uint64)
    assert len(np.unique(np.concatenate([a, b]))) == 2048


def test_content_is_the_same_in_every_run():
    """Another run verifies what this one stored: a change here breaks old slabs."""
    assert (
        BlockContent(16).bytes_of(b"key-a").hex() == "f87d7dcae3861eb2b46d4923d472b8eb"
    )
