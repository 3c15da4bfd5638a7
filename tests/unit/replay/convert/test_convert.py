"""Converters: made-up files of each format, the recorded ones there and back."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zstandard

from shmoffload import cli
from shmoffload.errors import TraceError
from shmoffload.replay.convert import read_source
from shmoffload.replay.convert.compact import SourceTrace, TraceRow, write_compact
from shmoffload.replay.convert.sessions import Playback
from shmoffload.replay.traces import read_trace

DATA = Path(__file__).parents[5] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="no recorded traces here")
DELTAS = {"parent", "leaf", "t_ms"}
KINDS = {"parent": "<i4", "leaf": "<i4", "t_ms": "<i8", "n_in": "<i4", "n_out": "<i4"}


def unpack(path):
    """Fields of a compact file by an own reader: plain numbers, parents as nodes."""
    fields = msgspec.msgpack.decode(zstandard.decompress(path.read_bytes()))
    columns = {
        name: np.frombuffer(fields[name], kind).astype(int)
        for name, kind in (KINDS | {"session": "<i4"}).items()
    }
    columns["parent"] = np.arange(len(columns["parent"])) - columns["parent"]
    columns["leaf"] = columns["leaf"].cumsum()
    columns["t_ms"] = columns["t_ms"].cumsum()
    return fields, {name: array.tolist() for name, array in columns.items()}


def lines(*rows):
    return "\n".join(map(json.dumps, rows)) + "\n"


def mooncake(t_ms, num_tokens, ids):
    return {
        "timestamp": t_ms,
        "input_length": num_tokens,
        "output_length": 3,
        "hash_ids": ids,
    }


def qwen(chat, parent, t_s, num_tokens, ids):
    return {
        "chat_id": chat,
        "parent_chat_id": parent,
        "timestamp": t_s,
        "input_length": num_tokens,
        "output_length": 7,
        "type": "text",
        "turn": 1,
        "hash_ids": ids,
    }


def lookup(t_s, request, chunks, *, model="m", chunk_size=256):
    return {
        "timestamp": t_s,
        "request_id": request,
        "model_name": model,
        "chunk_size": chunk_size,
        "seq_len": len(chunks) * chunk_size + 5,
        "dtypes": ["float8_e4m3fn"],
        "shapes": [[32, 256, 128]],
        "chunk_hashes": chunks,
    }


def session(*requests, scope="local"):
    return {"id": "x", "block_size": 64, "hash_id_scope": scope, "requests": requests}


def turn(t_s, ids, **more):
    return {
        "t": t_s,
        "type": "s",
        "in": len(ids) * 64 + 3,
        "out": 9,
        "hash_ids": ids,
    } | more


@pytest.fixture
def convert(tmp_path):
    """Write a source, convert it, return the workload and the plain columns."""

    def run(content, *, block_tokens, name="source", playback=None):
        path = tmp_path / name
        if isinstance(content, dict):
            path.mkdir()
            for file, text in content.items():
                (path / file).write_text(text)
        else:
            path.write_text(content)
        out = tmp_path / "out.ptrace.zst"
        write_compact(read_source(path, playback=playback), out)
        return read_trace(out, block_tokens=block_tokens), unpack(out)[1]

    return run


def test_mooncake_is_milliseconds_and_512_tokens(convert):
    rows = [mooncake(0, 1100, [5, 6, 7]), mooncake(2500, 1024, [5, 8])]
    workload, columns = convert(lines(*rows), block_tokens=512)
    first, second = workload.requests
    assert second.arrival_s == 2.5
    assert [len(r.hashes) for r in (first, second)] == [2, 2]  # the tail is partial
    assert first.hashes[0] == second.hashes[0]
    assert columns["session"] == [-1, -1]


def test_rows_are_put_in_order_of_arrival(convert):
    rows = [mooncake(900, 512, [1]), mooncake(100, 512, [2]), mooncake(900, 512, [3])]
    _, columns = convert(lines(*rows), block_tokens=512)
    assert columns["t_ms"] == [100, 900, 900]
    assert columns["leaf"] == [0, 1, 2]


def test_qwen_is_seconds_and_16_tokens_and_knows_chats(convert):
    workload, columns = convert(
        lines(
            qwen(55, -1, 1.25, 40, [1, 2, 3]),
            qwen(60, -1, 2.0, 16, [9]),
            qwen(159, 55, 61.114, 48, [1, 2, 4]),
            qwen(160, 159, 70.0, 16, [1]),
        ),
        block_tokens=16,
    )
    assert columns["t_ms"] == [1250, 2000, 61114, 70000]
    assert columns["session"] == [55, 60, 55, 55]
    a, _, c, _ = workload.requests
    assert a.hashes == c.hashes[:2]
    assert c.num_output_tokens == 7


def test_a_content_hash_after_another_prefix_is_another_block(convert):
    rows = [qwen(1, -1, 0, 32, [1, 2]), qwen(2, -1, 1, 32, [3, 2])]
    workload, _ = convert(lines(*rows), block_tokens=16)
    a, b = workload.requests
    assert a.hashes[1] != b.hashes[1]


def test_lmcache_logs_of_a_server(convert):
    workload, columns = convert(
        {
            "lookup_hashes_2_000001.jsonl": lines(
                lookup(1010.5, "r3", ["0xa"], model="other")
            ),
            "lookup_hashes_1_000000.jsonl": lines(
                lookup(1000.0, "r1", ["0xa", "0xb"]),
                lookup(1000.1, "r1", ["0xa", "0xb"]),  # asked again
                lookup(1002.0, "r2", ["0xa", "0xc"]),
            ),
        },
        block_tokens=256,
    )
    assert columns["t_ms"] == [0, 2000, 10500]
    r1, r2, r3 = workload.requests
    assert r1.hashes[0] == r2.hashes[0]
    assert r3.hashes[0] != r1.hashes[0]  # another model
    assert r1.num_input_tokens == 517


def test_sessions_keep_their_names_and_gaps_to_themselves(convert):
    inner = {
        "t": 10,
        "type": "subagent",
        "requests": [turn(3, [1, 5]), turn(8, [1, 6])],
    }
    workload, columns = convert(
        {
            "trace_0001.json": json.dumps(
                session(turn(0, [1, 2]), inner, turn(9000, [1]))
            ),
            "trace_0002.json": json.dumps(session(turn(0, [1, 2]), turn(5, [1, 2, 3]))),
            "trace_0003.json": json.dumps(session(turn(0, [1, 2]), turn(5, [1, 2, 3]))),
            "README.txt": "not a session",
        },
        block_tokens=64,
        playback=Playback(num_users=1),
    )
    times = {0: [], 1: []}  # the third is an exact copy of the second
    for number, t_ms in zip(columns["session"], columns["t_ms"], strict=True):
        times[number].append(t_ms)
    gaps = {n: np.diff(t).tolist() for n, t in times.items()}
    assert gaps[1] == [5000]
    assert gaps[0] == [10_000, 0, 3_600_000]  # sub-agents at its time; 1 h at most
    assert workload.num_distinct == 4 + 3
    assert {r.num_output_tokens for r in workload.requests} == {9}


def test_global_names_are_shared_by_sessions(convert):
    text = json.dumps(session(turn(0, [1, 2]), scope="global"))
    other = json.dumps(session(turn(0, [1, 3]), scope="global"))
    workload, _ = convert({"a.json": text, "b.json": other}, block_tokens=64)
    assert workload.num_distinct == 3


def test_users_play_at_the_same_time(convert, tmp_path):
    files = {
        f"{i}.json": json.dumps(session(turn(0, [i]), turn(3600, [i, 7])))
        for i in range(4)
    }
    _, columns = convert(files, block_tokens=64, playback=Playback(num_users=4))
    assert columns["t_ms"][-1] < 3600e3 + 600e3 + 60e3
    one = read_source(tmp_path / "source", playback=Playback(num_users=1))
    assert max(row.t_ms for row in one.rows) > 3 * 3600e3
    again = read_source(tmp_path / "source", playback=Playback(num_users=1))
    assert again == one


GARBAGE = {
    "empty": "",
    "no JSON": "hello\n",
    "a list": "[1]\n",
    "other fields": '{"a": 1}\n',
    "binary": "\x00\x01",
    "wrong type": lines(mooncake(0, 512, ["x"])),
    "too few blocks": lines(mooncake(0, 5120, [1])),
    "negative": lines(mooncake(-5, 512, [1])),
    "cut off": lines(mooncake(0, 512, [1]))[:-9],
    "qwen without ids": '{"chat_id": 1}\n',
    "two chunk sizes": lines(
        lookup(0, "a", ["0x1"]), lookup(1, "b", ["0x1"], chunk_size=9)
    ),
    "no chunk size": lines(lookup(0, "a", ["0x1"], chunk_size=0)),
    "too long": lines(mooncake(0, 1 << 40, [])),
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_one_sentence_and_exit_code_2(tmp_path, capsys, content):
    source, out = tmp_path / "source", tmp_path / "out"
    source.write_text(content)
    with pytest.raises(SystemExit) as caught:
        cli.main(["convert", str(source), str(out)])
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("shmoffload: ")
    assert told.count("\n") == 1
    assert not out.exists()


def test_bad_sources_and_targets(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.json").write_text("{}")
    for source, words in (("none", "cannot be read"), ("empty", "kv-cache-tester")):
        with pytest.raises(TraceError, match=words):
            read_source(tmp_path / source)
    with pytest.raises(TraceError, match="is no session"):
        read_source(tmp_path / "bad")
    with pytest.raises(TraceError, match="did you mean qwen"):
        read_source(tmp_path, format_name="qwenn")
    one = SourceTrace([TraceRow(0, 1, 1, [])], 16, has_partial_tail=False)
    with pytest.raises(TraceError, match="cannot be written"):
        write_compact(one, tmp_path / "no" / "out")


def test_the_verb_says_what_it_wrote_and_replaces_only_if_told(tmp_path, capsys):
    source, out = tmp_path / "a.jsonl", tmp_path / "a.ptrace.zst"
    source.write_text(lines(mooncake(0, 1024, [1, 2]), mooncake(1500, 512, [1])))
    for words, code, told in (
        ([], 0, "2 requests over 1.5 s, 2 distinct blocks of 512 tokens"),
        ([], 2, "add --force"),
        (["--force"], 0, "2 requests"),
        (["--force", "--users", "0"], 2, "--users"),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(["convert", str(source), str(out), *words])
        assert caught.value.code == code
        captured = capsys.readouterr()
        assert told in captured.out + captured.err


@needs_data
@pytest.mark.data
@pytest.mark.parametrize("name", ["mooncake_conversation", "mooncake_synthetic"])
def test_a_recorded_trace_there_and_back(tmp_path, name):
    fields, columns = unpack(DATA / f"{name}.ptrace.zst")
    parent = columns["parent"]
    rows = []
    for leaf, t_ms, n_in, n_out in zip(
        *(columns[c] for c in ("leaf", "t_ms", "n_in", "n_out")), strict=True
    ):
        path, node = [], leaf
        while node >= 0:
            path.append(node)
            node = parent[node]
        rows.append(mooncake(t_ms, n_in, path[::-1]) | {"output_length": n_out})
    source, out = tmp_path / "a.jsonl", tmp_path / "a.ptrace.zst"
    source.write_text(lines(*rows))
    written = write_compact(read_source(source), out)
    again, columns_again = unpack(out)
    assert columns_again == columns
    for key in ("v", "block_tokens", "partial_tail"):
        assert again[key] == fields[key]
    assert written.num_bytes < 1.02 * (DATA / f"{name}.ptrace.zst").stat().st_size
