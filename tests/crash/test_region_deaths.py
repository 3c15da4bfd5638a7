"""Processes that race for the primary region, and die at the wrong moment.

Names that are left and memory that is not there: F34 and F40 in ``tests/faults``.
"""

import contextlib
import os
import random

import pytest
from region_kit import (
    OPEN,
    START_TIMEOUT_S,
    STAY,
    config_of,
    our_names,
    running,
)

from shmoffload.core.types import SlotState
from shmoffload.testing.poll import wait_until
from shmoffload.wire import names
from shmoffload.wire.region import PrimaryRegion


@pytest.mark.timeout(180)
def test_race_of_four_makes_one_region(session_name):
    for round_idx in range(5):
        with contextlib.ExitStack() as stack:
            racers = [
                stack.enter_context(running(OPEN + STAY, session_name))
                for _ in range(4)
            ]
            inodes = {racer.stdout.readline().strip() for racer in racers}
            assert len(inodes) == 1
            assert inodes != {""}
        if round_idx % 2:  # odd rounds begin with a leftover, even ones with nothing
            names.sweep(session_name)
    names.sweep(session_name)
    assert our_names(session_name) == []


def test_owner_killed_while_its_worker_lives(session_name):
    """This process's mapping plays the worker that still writes."""
    region = PrimaryRegion.open(config_of(session_name))
    try:
        with running(OPEN + "region.own()\n" + STAY, session_name) as engine:
            assert engine.stdout.readline()
        fresh = PrimaryRegion.open(config_of(session_name), timeout_s=0.5)
        assert os.fstat(fresh.fd).st_ino != os.fstat(region.fd).st_ino
        fresh.own()
        fresh.unlink()
        fresh.close()
    finally:
        region.unlink()
        region.close()


@pytest.mark.timeout(180)
def test_no_kill_shows_a_ready_slot_with_wrong_bytes(session_name):
    """The crash contract of the slot table, at random instants."""
    writer = f"""
import random
{OPEN}
say("go")
rnd, generation = random.Random(os.getpid()), 0
while True:
    slot, generation = rnd.randrange(64), generation + 1
    key = make_offload_key(rnd.randbytes(32))
    region.hand_out(slot, generation, key, 4096)
    region.slot_view(slot)[:] = key[:32] * 128
    region.publish(slot, generation)
"""
    keeper = PrimaryRegion.open(config_of(session_name))
    num_ready = 0
    for _ in range(15):
        with running(writer, session_name) as process:
            assert process.stdout.readline() == "go\n"
            generations = random.randrange(1, 400)

            def has_worked(wanted=generations):
                return max(keeper.record(slot)[0] for slot in range(64)) >= wanted

            wait_until(has_worked, timeout_s=START_TIMEOUT_S, what="hand-outs")
        for slot in range(64):
            _, state, key, num_bytes = keeper.record(slot)
            if state is SlotState.READY:
                num_ready += 1
                assert num_bytes == 4096
                assert bytes(keeper.slot_view(slot)) == key[:32] * 128
            keeper.set_state(slot, 0, SlotState.FREE)
    assert num_ready > 15
    keeper.unlink()
    keeper.close()
