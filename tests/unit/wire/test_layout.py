"""Byte layout: sizes, headers that match one block only."""

import struct

import hypothesis
import pytest
from hypothesis import strategies as st

from shmoffload.wire import layout

NAMESPACE = layout.namespace_digest("model")
keys = st.binary(min_size=5, max_size=40)


@pytest.mark.parametrize(
    ("block_bytes", "stride"),
    [
        (1, 8192),
        (4096, 8192),
        (4097, 12288),
        (65536, 69632),
        (1 << 20, (1 << 20) + 4096),
    ],
)
def test_stride(block_bytes, stride):
    assert layout.stride_of(block_bytes) == stride


def test_records_have_the_sizes_that_others_count_on():
    assert layout.SLOT_RECORD_BYTES == 64
    assert layout.HEADER_BYTES <= layout.PAGE_BYTES
    assert len(NAMESPACE) == layout.NAMESPACE_BYTES
    assert layout.namespace_digest("model2") != NAMESPACE


@hypothesis.given(key=keys, payload=st.binary(min_size=1, max_size=300))
def test_header_matches_its_block(key, payload):
    header = layout.seal_header(key, memoryview(payload), NAMESPACE)
    assert len(header) == layout.HEADER_BYTES
    page = memoryview(header + b"whatever lies behind")
    assert layout.header_matches(page, key, memoryview(payload), NAMESPACE)
    assert header == layout.seal_header(key, memoryview(bytearray(payload)), NAMESPACE)


@hypothesis.given(data=st.data(), key=keys, payload=st.binary(min_size=1, max_size=300))
def test_one_flipped_bit_anywhere_is_seen(data, key, payload):
    header = layout.seal_header(key, memoryview(payload), NAMESPACE)
    parts = [bytearray(header), bytearray(payload), bytearray(key)]
    which = data.draw(st.sampled_from([0, 1, 2]))
    bit = data.draw(st.integers(0, len(parts[which]) * 8 - 1))
    parts[which][bit // 8] ^= 1 << bit % 8
    assert not layout.header_matches(
        memoryview(parts[0]), bytes(parts[2]), memoryview(parts[1]), NAMESPACE
    )


def test_header_of_other_key_namespace_or_length_does_not_match():
    payload = memoryview(b"p" * 100)
    key = b"k" * 36
    header = memoryview(layout.seal_header(key, payload, NAMESPACE))
    assert layout.header_matches(header, key, payload, NAMESPACE)
    # A key that ends in zeros is not its own prefix: the length is in the header.
    assert not layout.header_matches(header, key + b"\0", payload, NAMESPACE)
    assert not layout.header_matches(header, key, payload[:99], NAMESPACE)
    assert not layout.header_matches(
        header, key, payload, layout.namespace_digest("other")
    )
    assert not layout.header_matches(memoryview(b""), key, payload, NAMESPACE)


def test_slot_word_is_the_first_aligned_word_of_its_record():
    record = layout.SLOT_RECORD.pack(3 << 8 | 2, 10, 36, 0, b"k" * 36, 0)
    assert struct.unpack_from("<Q", record) == (3 << 8 | 2,)
