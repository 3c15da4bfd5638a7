"""The slot table alone, against a model that lists who has which slot.

Covers: INV-1, INV-2, INV-3, INV-34 and the words that go to the shared table.
Does not cover: who may evict what (``test_manager_machine``).
"""

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shmoffload.core.slots import PENDING, QUARANTINED, READY, SlotTable
from shmoffload.core.types import SlotState, make_offload_key

NUM_SLOTS = 4
KEYS = [make_offload_key(b"key-%d" % i) for i in range(8)]
pick = st.integers(0, 9)


class SharedTable:
    """What another process reads: the last word of each slot, its generation."""

    def __init__(self):
        self.words = dict.fromkeys(range(NUM_SLOTS), SlotState.FREE)
        self.keys, self.generations = {}, dict.fromkeys(range(NUM_SLOTS), 0)

    def hand_out(self, slot, generation, key, num_bytes):
        assert self.words[slot] is SlotState.FREE, "INV-1: handed out, not free"
        assert generation == self.generations[slot] + 1, "INV-33: generations rise"
        self.words[slot] = SlotState.PENDING
        self.generations[slot], self.keys[slot] = generation, key

    def publish(self, slot, generation):
        assert generation == self.generations[slot], "INV-33: of an earlier holder"
        assert self.words[slot] is SlotState.PENDING, "INV-3: READY from PENDING only"
        self.words[slot] = SlotState.READY

    def set_state(self, slot, generation, state):
        assert generation == self.generations[slot], "INV-33: of an earlier holder"
        self.words[slot] = state


class SlotsMachine(RuleBasedStateMachine):
    """``held``: block -> (state, pins) as it has to be."""

    def __init__(self):
        super().__init__()
        self.shared = SharedTable()
        self.table = SlotTable(NUM_SLOTS, 64, self.shared)
        self.held = {}

    def _some(self, *states):
        return [b for b, (state, _) in self.held.items() if state in states]

    def _free(self):
        return NUM_SLOTS - len(self.held)

    @precondition(lambda self: self._free())
    @rule(key=st.sampled_from(KEYS))
    def reserve(self, key):
        if key not in self.table.blocks:
            block = self.table.reserve(key, "owner")
            assert block.slot not in [b.slot for b in self.held], "INV-1: two holders"
            self.held[block] = (PENDING, 0)

    @precondition(lambda self: self._some(PENDING, QUARANTINED))
    @rule(i=pick, is_good=st.booleans())
    def writer_ends(self, i, is_good):
        blocks = self._some(PENDING, QUARANTINED)
        block = blocks[i % len(blocks)]
        state, pins = self.held[block]
        (self.table.publish if is_good else self.table.abandon)(block)
        if state == QUARANTINED:
            self._let_go(block, pins)
        elif is_good:
            self.held[block] = (READY, 0)
        else:
            del self.held[block]

    def _let_go(self, block, pins):
        if pins == 1:
            del self.held[block]
        else:
            self.held[block] = (QUARANTINED, pins - 1)

    @precondition(lambda self: self._some(READY))
    @rule(i=pick)
    def pin(self, i):
        block = self._some(READY)[i % len(self._some(READY))]
        self.table.pin(block)
        self.held[block] = (READY, self.held[block][1] + 1)

    @rule(i=pick)
    def unpin(self, i):
        blocks = [b for b, (_, pins) in self.held.items() if pins]
        if blocks:
            block = blocks[i % len(blocks)]
            state, pins = self.held[block]
            self.table.unpin(block)
            if state == QUARANTINED:
                self._let_go(block, pins)
            else:
                self.held[block] = (READY, pins - 1)

    @rule(i=pick)
    def evict(self, i):
        idle = [b for b, held in self.held.items() if held == (READY, 0)]
        if idle:
            version = self.table.version
            self.table.evict(idle[i % len(idle)])
            assert self.table.version >= version
            del self.held[idle[i % len(idle)]]

    @precondition(lambda self: self._some(PENDING, READY))
    @rule(i=pick)
    def detach(self, i):
        blocks = self._some(PENDING, READY)
        block = blocks[i % len(blocks)]
        state, pins = self.held[block]
        self.table.detach(block)
        if state == PENDING:
            self.held[block] = (QUARANTINED, 1)  # its writer
        elif pins:
            self.held[block] = (QUARANTINED, pins)
        else:
            del self.held[block]

    @invariant()
    def the_table_equals_the_model(self):
        table = self.table
        resident = {b.key: b for b in self._some(PENDING, READY)}
        assert table.blocks == resident, "INV-1: who is resident"
        for block, held in self.held.items():
            assert (block.state, block.pins) == held, "INV-3: states and pins"
        assert table.num_free == self._free(), "INV-2: free slots"
        assert table.num_pending == len(self._some(PENDING)), "INV-3: PENDING"
        assert table.num_quarantined == len(self._some(QUARANTINED)), "INV-34"
        table.check_integrity()

    @invariant()
    def the_shared_words_tell_the_same(self):
        words = dict.fromkeys(range(NUM_SLOTS), SlotState.FREE)
        for block, (state, _) in self.held.items():
            words[block.slot] = SlotState(state)
            if state != QUARANTINED:
                assert self.shared.keys[block.slot] == block.key, "INV-37: its key"
        assert self.shared.words == words, "INV-34: what other processes see"


def test_slots_machine():
    run_state_machine_as_test(SlotsMachine)
