"""F52: what the store filter keeps is what a lookup needs, through a real tier.

In vLLM's own scheduler: ``tests/with_vllm/test_scheduler_loop_groups``.
"""

import engine_kit as kit
import pytest
from faults_kit import check_quiet, finish, make_config
from late_faults_kit import WAIT_S, word

from shmoffload.core.types import LookupResult, make_offload_key
from shmoffload.core.window_scan import GroupKeys, match_groups
from shmoffload.engine import Engine
from shmoffload.testing.poll import wait_until
from shmoffload.wire.session import TierWord

pytestmark = pytest.mark.timeout(300)
NUM, WINDOW = 6, 2


def prompt(name):
    """Keys of a prompt's blocks: full attention, a window, a side index."""
    return [
        [make_offload_key(b"%s-%020d" % (name, i), group) for i in range(NUM)]
        for group in range(3)
    ]


def kept(named, window=WINDOW):
    """The store filter: of the window only what a lookup at the end needs."""
    return [*named[0], *named[1][-window:], *named[2]]


def matched(engine, ctx, named, window=WINDOW):
    """Scan by the lookup rule, step by step, until the answer stands."""
    groups = [GroupKeys(named[0]), GroupKeys(named[1], window), GroupKeys(named[2])]

    def scan():
        engine.step_begin()
        found = match_groups(lambda key: engine.lookup(key, ctx), groups)
        engine.on_schedule_end(kit.END)
        return found if found.is_decided else None

    return wait_until(scan, timeout_s=WAIT_S, what="a verdict").num_blocks


def load(engine, ctx, named, num_blocks, window=WINDOW):
    """Load what a match of so many blocks means; every byte is compared."""
    wanted = [*named[0][:num_blocks], *named[2][:num_blocks]]
    wanted += named[1][max(0, num_blocks - window) : num_blocks]
    engine.step_begin()
    assert {engine.lookup(key, ctx) for key in wanted} <= {LookupResult.HIT}
    slots = engine.prepare_load(wanted, ctx).tolist()
    for key, slot in zip(wanted, slots, strict=True):
        assert bytes(engine.slot_view(slot)) == kit.bytes_of(key)
    engine.complete_load(wanted, ctx)
    engine.on_schedule_end(kit.END)
    finish(engine, ctx)
    return wanted


@pytest.fixture
def start(session_name, tmp_path):
    def start(kind="fs"):
        tier = {**kit.slab(tmp_path, min_free=0), "type": kind, "nice": 0}
        return Engine(make_config(session_name, [tier], slots=64))

    return start


def store_prompts(engine, *names):
    for name in names:
        ctx = kit.request(engine, f"store {name}")
        kit.store(engine, ctx, kept(prompt(name)))
        finish(engine, ctx)
    assert engine.wait_idle(WAIT_S)
    kit.drop_primary(engine)


@pytest.mark.parametrize("kind", ["slab", "fs", "memory"])
def test_f52_every_stored_prompt_is_found_again(start, kind):
    names = [b"p%d" % i for i in range(4)]
    with start(kind) as engine:
        store_prompts(engine, *names)
        for name in names:
            ctx = kit.request(engine, f"load {name}")
            assert matched(engine, ctx, prompt(name)) == NUM
            load(engine, ctx, prompt(name), NUM)
        check_quiet(engine)


@pytest.mark.parametrize(
    ("group", "block", "usable"),
    [(0, 3, 3), (2, 4, 4), (2, 0, 0), (1, 5, 0), (1, 4, 0)],
)
def test_f52_one_lost_key_cuts_all_groups_alike(start, tmp_path, group, block, usable):
    """Gone from the disk between lookup and load: the prefix is the least of all.

    Of the window nothing before its last two was kept, so its loss costs all.
    """
    named = prompt(b"p")
    with start() as engine:
        store_prompts(engine, b"p")
        lost = named[group][block].hex()
        (file,) = [path for path in tmp_path.rglob(lost) if path.is_file()]
        file.write_bytes(b"x" * file.stat().st_size)  # the tier believes that it has it
        ctx = kit.request(engine, "load")
        cut = matched(engine, ctx, named)
        # A window was stored for the whole prompt only: a shorter end has none.
        assert cut == 0 or group == 1
        assert word(engine, TierWord.BLOCKS_BAD) == 1
        whole = [GroupKeys(named[0]), GroupKeys(named[2])]
        engine.step_begin()
        found = match_groups(lambda key: engine.lookup(key, ctx), whole)
        engine.on_schedule_end(kit.END)
        assert found.num_blocks == (NUM if group == 1 else usable)
        finish(engine, ctx)
        check_quiet(engine)


@pytest.mark.parametrize(("group", "block"), [(0, 3), (2, 3), (1, 3)])
def test_f52_nothing_past_the_cut_is_loaded(start, tmp_path, group, block):
    """All windows were kept here: the groups agree on what lies before the loss."""
    named = prompt(b"p")
    with start() as engine:
        ctx = kit.request(engine, "store")
        kit.store(engine, ctx, [key for keys in named for key in keys])
        finish(engine, ctx)
        assert engine.wait_idle(WAIT_S)
        kit.drop_primary(engine)
        (file,) = [p for p in tmp_path.rglob(named[group][block].hex()) if p.is_file()]
        file.write_bytes(b"x" * file.stat().st_size)
        ctx = kit.request(engine, "load")
        num_blocks = matched(engine, ctx, named)
        assert num_blocks == (NUM if group == 1 else block)
        loaded = load(engine, ctx, named, num_blocks)
        assert named[group][block] not in loaded
        check_quiet(engine)
