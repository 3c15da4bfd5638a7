"""Traces: facts about recorded ones, made-up ones, garbage."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zstandard

from shmoffload.errors import TraceError
from shmoffload.replay.traces import Window, read_trace

DATA = Path(__file__).parents[4] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="no recorded traces here")


def pack(**replaced):
    """Three requests over the tree 0-1-2, 0-3; the last block may be partial."""
    columns = {
        "parent": ("<i4", [1, 1, 1, 3]),  # a node minus its parent; a root's is -1
        "leaf": ("<i4", [2, 1, -2]),
        "t_ms": ("<i8", [1000, 500, 500]),
        "n_in": ("<i4", [1536, 1024, 600]),
        "n_out": ("<i4", [5, 6, 7]),
        "session": ("<i4", [-1, -1, -1]),
    }
    fields = {"v": 1, "block_tokens": 512, "partial_tail": 1, "meta": {}}
    fields |= {
        name: np.array(v, dtype).tobytes() for name, (dtype, v) in columns.items()
    }
    fields |= replaced
    return zstandard.compress(msgspec.msgpack.encode(fields))


@pytest.fixture
def write(tmp_path):
    def to_file(data, name="trace"):
        path = tmp_path / name
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path

    return to_file


def jsonl(*rows):
    return "\n".join(
        json.dumps(
            {"timestamp": t, "input_length": n, "output_length": 3, "hash_ids": ids}
        )
        for t, n, ids in rows
    )


def test_compact_paths_share_their_prefix(write):
    a, b, c = read_trace(write(pack())).requests
    assert [len(r.hashes) for r in (a, b, c)] == [3, 2, 1]
    assert a.hashes[0] == b.hashes[0] == c.hashes[0]
    assert a.hashes[1] != b.hashes[1]
    assert [r.arrival_s for r in (a, b, c)] == [0, 0.5, 1.0]
    assert (b.num_input_tokens, b.num_output_tokens) == (1024, 6)


def test_partial_tail_is_dropped(write):
    n_in = np.array([1535, 511, 600], "<i4").tobytes()
    requests = read_trace(write(pack(n_in=n_in))).requests
    assert [len(r.hashes) for r in requests] == [2, 0, 1]


def test_coarser_blocks_are_every_second_node(write):
    path = write(pack())
    requests = read_trace(path, block_tokens=1024).requests
    assert [len(r.hashes) for r in requests] == [1, 1, 0]
    fine = {h for r in read_trace(path).requests for h in r.hashes}
    assert not fine & {h for r in requests for h in r.hashes}


def test_a_block_is_the_same_in_every_window(write):
    path = write(pack())
    whole = read_trace(path).requests
    part = read_trace(path, window=Window.parse("1.5:2")).requests
    assert [r.hashes for r in part] == [r.hashes for r in whole[1:]]
    assert part[0].arrival_s == 0


def test_a_limit_is_the_first_requests_of_the_window(write):
    path = write(pack())
    whole = read_trace(path).requests
    part = read_trace(path, window=Window.parse("1.5:2"), limit=1).requests
    assert [r.req_id for r in part] == [whole[1].req_id]


def test_two_traces_share_no_block(write):
    mine = read_trace(write(pack(), "a")).requests[0].hashes
    other = read_trace(write(pack(meta={"x": 1}), "b")).requests[0].hashes
    assert not set(mine) & set(other)


def test_jsonl_implies_the_prefix(write):
    path = write(jsonl((0, 1024, [1, 2]), (10, 1024, [3, 2]), (20, 1100, [1, 2, 9])))
    a, b, c = read_trace(path).requests
    assert a.hashes[1] != b.hashes[1]
    assert c.hashes == a.hashes
    assert c.arrival_s == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("text", "span"), [("", (0, np.inf)), ("0:300", (0, 300)), ("5:", (5, np.inf))]
)
def test_windows(text, span):
    window = Window.parse(text)
    assert (window.first_s, window.last_s) == span
    assert window.contains(span[0])
    assert window.contains(span[1])


@pytest.mark.parametrize("text", ["5", "a:b", "9:3", "-1:4", "nan:2"])
def test_bad_windows(text):
    with pytest.raises(TraceError, match="--window"):
        Window.parse(text)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        b"\xff\x00",
        b"{}",
        b"[1]",
        b"3",
        zstandard.compress(b"no msgpack"),
        pack()[:-9],
        pack(v=2),
        pack(leaf=b""),
        pack(leaf=b"abc"),
        pack(leaf=np.array([9, 0, 0], "<i4").tobytes()),
        pack(parent=np.array([0, 1, 1, 3], "<i4").tobytes()),
        pack(parent=np.array([9, 1, 1, 3], "<i4").tobytes()),
        pack(block_tokens=0),
        pack(block_tokens="x"),
        pack(t_ms=np.array([-5, 0, 0], "<i8").tobytes()),
        pack(n_in=None),
        jsonl((0, 5000, [1])).encode(),
        jsonl((0, 512, ["x"])).encode(),
        jsonl((0, -5, [])).encode(),
    ],
)
def test_garbage_is_one_sentence(write, data):
    with pytest.raises(TraceError) as error:
        read_trace(write(data))
    assert "\n" not in str(error.value)
    assert "trace" in str(error.value)


def test_unreadable_empty_window_and_too_fine_blocks(write, tmp_path):
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none")
    with pytest.raises(TraceError, match="widen --window"):
        read_trace(write(pack()), window=Window.parse("50:60"))
    with pytest.raises(TraceError, match="multiple"):
        read_trace(write(pack()), block_tokens=300)


@needs_data
@pytest.mark.data
def test_facts_of_the_recorded_conversation():
    workload = read_trace(
        DATA / "mooncake_conversation.ptrace.zst", window=Window.parse("0:300")
    )
    assert len(workload.requests) == 927
    assert workload.num_blocks == 24_011
    assert workload.num_distinct == 18_887
    assert workload.attainable_hits() == 5_124
    everything = {h for r in workload.requests for h in r.hashes}
    assert workload.attainable_hits(everything) == 24_011
