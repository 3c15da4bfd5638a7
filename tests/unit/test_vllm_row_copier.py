"""Copies between rows and slots: what, in which order, and the end of them."""

import threading

import pytest

from shmoffload.testing.poll import wait_until
from shmoffload.vllm.staging.row_copier import RowCopier, RowCopies

ROW = 4096


class World:
    def __init__(self):
        self.memory = bytearray(4 * ROW)
        self.view = memoryview(self.memory).cast("B", (4, ROW))
        self.slots = [bytearray(ROW) for _ in range(3)]
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.copier = RowCopier(self.view, self.slot_view)

    def slot_view(self, slot):
        self.entered.set()
        assert self.gate.wait(10)
        return memoryview(self.slots[slot])

    def copy(self, rows, slots, *, to_rows, job="job"):
        self.copier.submit(RowCopies(job, [b"k"] * len(rows), rows, slots, to_rows))

    def done(self):
        assert self.copier.wait_idle(10)
        return [c.is_copied for c in iter(self.copier.next_done, None)]


@pytest.fixture
def world():
    world = World()
    yield world
    world.gate.set()
    assert world.copier.close(10)
    world.view.release()  # raises while the copier holds it


def test_rows_go_to_slots_and_back(world):
    world.memory[2 * ROW : 3 * ROW] = b"a" * ROW
    world.copy([2], [1], to_rows=False)
    world.copy([0], [1], to_rows=True)
    assert world.done() == [True, True]
    assert world.slots[1] == b"a" * ROW
    assert world.memory[:ROW] == b"a" * ROW
    assert world.slots[0] == world.slots[2] == bytes(ROW)


@pytest.mark.parametrize(("rows", "slots"), [([9], [0]), ([0, 1], [0]), ([0], [9])])
def test_what_is_not_there_fails_and_the_thread_lives_on(world, rows, slots):
    world.copy(rows, slots, to_rows=True)
    world.copy([0], [0], to_rows=True)
    assert world.done() == [False, True]


def test_a_slot_of_another_length_fails(world):
    world.slots[0] = bytearray(ROW - 1)
    world.copy([0], [0], to_rows=False)
    assert world.done() == [False]


def test_nothing_is_done_before_it_is_copied(world):
    world.gate.clear()
    world.copy([0], [0], to_rows=False)
    assert world.entered.wait(10)
    assert not world.copier.wait_idle(0.01)
    assert world.copier.next_done() is None
    world.gate.set()
    assert world.done() == [True]


def test_close_ends_the_running_copy_and_cancels_the_rest(world):
    world.gate.clear()
    world.copy([0], [0], to_rows=False)
    assert world.entered.wait(10)
    world.copy([1], [1], to_rows=False)
    closer = threading.Thread(target=world.copier.close, args=(10,))
    closer.start()
    wait_until(world.copier.next_done, timeout_s=10, what="the cancelled copy")
    world.gate.set()
    closer.join(10)
    world.copy([2], [2], to_rows=False)  # too late
    assert world.done() == [True, False]
    assert world.slots[1] == bytes(ROW)
