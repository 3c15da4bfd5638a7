"""Messages: what is sent is what arrives, garbage is refused, sizes hold."""

import contextlib
import struct
from typing import get_args

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from shmoffload.core.types import OffloadPolicy
from shmoffload.wire import messages as m

u64 = st.integers(0, (1 << 63) - 1)
keys = st.lists(st.binary(min_size=5, max_size=40), max_size=20)
by_type = {
    int: u64,
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=50),
    bytes: st.binary(max_size=100),
    list[bytes]: keys,
    OffloadPolicy: st.sampled_from(OffloadPolicy),
}


def any_of(union):
    """A strategy for any message of a union, built from its fields' types."""
    return st.one_of(
        *(
            st.builds(
                kind,
                **{f.name: by_type[f.type] for f in msgspec.structs.fields(kind)},
            )
            for kind in get_args(union)
        )
    )


@hypothesis.given(sent=st.lists(any_of(m.ToWorker), max_size=5))
def test_frames_to_worker_round_trip(sent):
    assert m.decode_to_worker(m.encode_frame(sent)) == sent


@hypothesis.given(sent=st.lists(any_of(m.FromWorker), max_size=5))
def test_frames_from_worker_round_trip(sent):
    assert m.decode_from_worker(m.encode_frame(sent)) == sent


@hypothesis.given(to=any_of(m.ToSupervisor), back=any_of(m.FromSupervisor))
def test_control_round_trip(to, back):
    assert m.decode_to_supervisor(m.encode_control(to)) == to
    assert m.decode_from_supervisor(m.encode_control(back)) == back


@hypothesis.given(data=st.binary(max_size=200))
def test_garbage_is_refused_or_read_as_messages(data):
    for decode in (
        m.decode_to_worker,
        m.decode_from_worker,
        m.decode_to_supervisor,
        m.decode_from_supervisor,
    ):
        with contextlib.suppress(msgspec.DecodeError):
            decode(data)


@hypothesis.given(data=st.data(), sent=any_of(m.ToWorker))
def test_no_prefix_of_a_frame_is_a_frame(data, sent):
    frame = m.encode_frame([sent])
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(msgspec.DecodeError):
        m.decode_to_worker(frame[:cut])


def test_directions_and_channels_do_not_mix():
    hello = m.encode_frame([m.Hello(1)])
    with pytest.raises(msgspec.DecodeError):
        m.decode_to_worker(hello)
    with pytest.raises(msgspec.DecodeError):
        m.decode_from_worker(m.encode_frame([m.Finished("r")]))
    with pytest.raises(msgspec.DecodeError):
        m.decode_to_supervisor(m.encode_control(m.Detached()))


def test_tags_are_unique_in_each_direction():
    for union in (m.ToWorker, m.FromWorker, m.ToSupervisor, m.FromSupervisor):
        kinds = get_args(union)
        assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds)


def test_largest_job_part_fits_a_frame_at_under_100_bytes_a_key():
    n = m.MAX_KEYS_PER_FRAME
    part = m.JobPart(
        engine_epoch=1 << 62,
        worker_epoch=1 << 62,
        job_id=1 << 62,
        is_promotion=True,
        req_id="r" * 128,
        deadline_s=1e9,
        keys=[i.to_bytes(40, "big") for i in range(n)],
        slots=struct.pack(f"<{n}i", *range(n)),
        num_left=1 << 20,
    )
    frame = m.encode_frame([part])
    assert len(frame) < m.MAX_FRAME_BYTES
    assert len(frame) < 100 * n
