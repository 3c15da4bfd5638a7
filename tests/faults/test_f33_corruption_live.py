"""F33: what a disk did to a block is a miss and a number, under a live engine.

A thousand of each kind, in the worker's process: ``tests/unit/worker/test_corruption``.
"""

import random
import shutil

import engine_kit as kit
import pytest
from faults_kit import check_quiet, finish, keys, make_config, put_in_tiers
from late_faults_kit import WAIT_S, files_in, word

from shmoffload.engine import Engine
from shmoffload.testing.faults.damage import Damage, damage
from shmoffload.wire.layout import (
    HEADER_BYTES,
    header_matches,
    namespace_digest,
    seal_header,
)
from shmoffload.wire.session import TierWord

pytestmark = pytest.mark.timeout(300)
NUM = 6


def tier(kind, tmp_path):
    return {
        "type": kind,
        "path": str(tmp_path),
        "max_bytes": "1MiB",
        "min_free": 0,
        "nice": 0,
    }


def load_each(engine, *ns):
    """Load block by block, bytes compared; return which came."""
    came = []
    for n in ns:
        ctx = kit.request(engine, f"load-{n}")
        if kit.load(engine, ctx, keys(n), timeout_s=WAIT_S):
            came.append(n)
        finish(engine, ctx)  # one try per request
    return came


@pytest.mark.parametrize("kind", ["slab", "fs"])
@pytest.mark.parametrize("how", list(Damage))
def test_f33_damage_is_a_counted_miss_and_is_gone(session_name, tmp_path, kind, how):
    with Engine(make_config(session_name, [tier(kind, tmp_path)], slots=16)) as engine:
        put_in_tiers(engine, *range(NUM))
        said = damage(tmp_path, how, random.Random(33))
        assert said
        came = load_each(engine, *range(NUM))
        num_lost = NUM - len(came)
        # A cut slab loses what lay behind the cut; what is appended to one, nothing.
        if how is Damage.SWAP:
            assert num_lost == 2
        elif kind == "slab" and how in (Damage.TRUNCATE, Damage.APPEND):
            assert num_lost == (0 if how is Damage.APPEND else word_bad(engine))
        else:
            assert num_lost == 1
        assert word_bad(engine) == num_lost
        assert word(engine, TierWord.RESIDENT_BLOCKS) == len(came)
        kit.drop_primary(engine)
        assert load_each(engine, *range(NUM)) == came
        assert word_bad(engine) == num_lost  # read once: it was removed
        kit.drop_primary(engine)
        put_in_tiers(engine, *range(NUM))
        assert load_each(engine, *range(NUM)) == list(range(NUM))
        check_quiet(engine)


def word_bad(engine):
    return word(engine, TierWord.BLOCKS_BAD)


@pytest.mark.parametrize("kind", ["slab", "fs"])
def test_f33_damage_between_two_lives_of_an_engine(session_name, tmp_path, kind):
    """Payload, header and padding of every block but one; then a fresh start."""
    config = make_config(session_name, [tier(kind, tmp_path)], slots=16)
    with Engine(config) as engine:
        put_in_tiers(engine, *range(NUM))
        stride = engine.config.stride
    places = {
        (path, at): data[at : at + stride]
        for path, data in files_in(tmp_path).items()
        if "index" not in path.name
        for at in range(0, len(data) - stride + 1, stride)
        if any(data[at + stride - 4096 : at + stride])  # a header: a block is here
    }
    assert len(places) == NUM
    offsets = [0, kit.BLOCK_BYTES - 1, stride - 4096, stride - 4096 + HEADER_BYTES - 1]
    for (path, at), offset in zip(list(places)[1:], [*offsets, 77], strict=True):
        with path.open("r+b") as file:
            file.seek(at + offset)
            byte = file.read(1)[0]
            file.seek(at + offset)
            file.write(bytes([byte ^ 0x10]))
    with Engine(config) as engine:
        assert len(load_each(engine, *range(NUM))) == 1
        assert word_bad(engine) == NUM - 1


def test_f33_a_header_speaks_for_one_block_only():
    """Key, group, length, namespace, layout and bytes; and for every bit of itself."""
    payload = memoryview(bytes(range(200)))
    names = [namespace_digest("a"), namespace_digest("b")]
    key = b"k" * 32
    group_0, group_1 = key + bytes(4), key + bytes(3) + b"\1"
    header = bytearray(seal_header(group_0, payload, names[0]))
    assert header_matches(memoryview(header), group_0, payload, names[0])
    for other in (
        (group_1, payload, names[0]),
        (b"j" + group_0[1:], payload, names[0]),
        (group_0, payload[:-1], names[0]),
        (group_0, payload, names[1]),
        (group_0, memoryview(bytes(200)), names[0]),
    ):
        assert not header_matches(memoryview(header), *other)
    for bit in range(8 * len(header)):
        header[bit // 8] ^= 1 << bit % 8
        assert not header_matches(memoryview(header), group_0, payload, names[0])
        header[bit // 8] ^= 1 << bit % 8


def test_f33_a_file_copied_under_another_keys_name(session_name, tmp_path):
    """Of another group as well; the block that was copied stays good."""
    config = make_config(session_name, [tier("fs", tmp_path)], slots=16)
    with Engine(config) as engine:
        put_in_tiers(engine, 0, 1)
        (folder,) = tmp_path.iterdir()
        names = [key.hex() for key in keys(0, 1)]
        source, target = (folder / name[:2] / name for name in names)
        shutil.copyfile(source, target)
        assert load_each(engine, 0, 1) == [0]
        assert word_bad(engine) == 1
        assert not target.exists()
        assert source.exists()
    other_group = names[0][:-2] + "01"
    shutil.copyfile(source, source.with_name(other_group))
    with Engine(config) as engine:
        assert word(engine, TierWord.RESIDENT_BLOCKS) == 2
        key = bytes.fromhex(other_group)
        assert kit.load(engine, kit.request(engine, "g"), [key]) == 0
        assert word_bad(engine) == 1
        assert load_each(engine, 0) == [0]
