"""Real engines whose tiers fail on command, and what crossed their queues.

Keys have numbers here (``key``, ``keys``); ``engine_kit`` knows their bytes.
"""

import contextlib
import resource
import socket
from pathlib import Path

import engine_kit as kit

from shmoffload.core.types import LookupResult
from shmoffload.testing.poll import wait_until
from shmoffload.wire import messages
from shmoffload.wire.session import Fault, TierWord

HIT, MISS = LookupResult.HIT, LookupResult.MISS
PENDING, RETRY = LookupResult.HIT_PENDING, LookupResult.RETRY
WAIT_S = 60

_numbers = {}


def key(n):
    (made,) = kit.keys_of(n, 1)
    _numbers[made] = n
    return made


def keys(*numbers):
    return [key(n) for n in numbers]


def numbers(of_keys):
    return [_numbers[k] for k in of_keys]


def faulty(control, **more):
    """Configure the tier that ``control`` controls."""
    return {
        "type": "faulty",
        "path": str(control.folder),
        "max_bytes": "4MiB",
        "min_free": 0,
        "nice": 0,
        **more,
    }


def make_config(session, tiers, *, slots=8, **limits):
    """Patient limits: a busy machine looks like a hang."""
    patient = {
        "heartbeat_s": 0.1,
        "hung_after_s": 60.0,
        "job_deadline_s": 60.0,
        "start_timeout_s": 90.0,
        "restart_backoff_s": 0.05,
        "restart_backoff_max_s": 0.2,
        "close_timeout_s": 20.0,
        **limits,
    }
    return kit.make_config(session, tiers, slots=slots, **patient)


# Requests, by number ----------------------------------------------------------------


def look(engine, ctx, *ns):
    """Look keys up in the step that is open."""
    return [engine.lookup(k, ctx) for k in keys(*ns)]


def look_step(engine, ctx, *ns):
    """Look keys up in a step of their own."""
    engine.step_begin()
    answers = look(engine, ctx, *ns)
    engine.on_schedule_end(kit.END)
    return answers


def fill(engine, output):
    """Copy the granted blocks' bytes, as the GPU would."""
    for k, slot in zip(output.keys_to_store, output.slots.tolist(), strict=True):
        engine.slot_view(slot)[:] = kit.bytes_of(k)


def put_in_tiers(engine, *ns):
    """Store blocks by a request that is over; the primary has forgotten them."""
    ctx = kit.request(engine, f"before-{ns[0]}")
    assert kit.store(engine, ctx, keys(*ns)) == keys(*ns)
    assert engine.wait_idle(WAIT_S)
    finish(engine, ctx)
    kit.drop_primary(engine)


def load_right(engine, ctx, *ns):
    """Load blocks that are HIT in the open step; compare every byte."""
    slots = engine.prepare_load(keys(*ns), ctx).tolist()
    for k, slot in zip(keys(*ns), slots, strict=True):
        assert bytes(engine.slot_view(slot)) == kit.bytes_of(k), "wrong bytes"
    engine.complete_load(keys(*ns), ctx)
    return slots


def step_until(engine, is_so, what):
    """Run empty steps until something is so."""
    return wait_until(lambda: kit.step(engine) or is_so(), timeout_s=WAIT_S, what=what)


def look_until(engine, ctx, *ns):
    """Scan in steps until no answer is "not now"; return the answers."""
    last = []

    def is_definite():
        last[:] = look_step(engine, ctx, *ns)
        return not {PENDING, RETRY} & set(last)

    wait_until(is_definite, timeout_s=WAIT_S, what=f"a verdict on {ns}")
    return list(last)


def finish(engine, *contexts):
    for ctx in contexts:
        engine.on_request_finished(ctx)
    kit.step(engine)


def word(engine, which, tier_idx=0):
    return engine.page.get_tier(tier_idx, which)


def num_refused(engine, tier_idx=0):
    """Blocks that the system refused a worker, by what it said."""
    counts = {fault: word(engine, fault.word, tier_idx) for fault in Fault}
    return {fault: n for fault, n in counts.items() if n}


def files_of(control):
    """Block files of a faulty ``fs`` tier, by key."""
    store = Path(control.folder) / "store"
    return {
        bytes.fromhex(path.name): path
        for path in store.rglob("*")
        if path.is_file() and len(path.name) == 2 * len(key(0))
    }


def check_quiet(engine):
    """Assert the quiescent equation: nothing open, nothing kept of any request."""
    assert engine.wait_idle(WAIT_S)
    kit.step(engine)
    manager, table = engine.manager, engine.manager.table
    assert not engine.is_broken
    assert not engine.has_pending_work()
    manager.check_integrity()
    assert table.num_pending == table.num_pinned == table.num_quarantined == 0
    assert len(table.blocks) + table.num_free == table.num_slots
    assert not manager._book.live
    assert not manager._book.closing
    assert not manager._book.request_level_tiers
    assert not manager._scans.undecided
    assert not manager._desk.open
    for tier in engine.tiers:
        assert tier.num_open_jobs == tier.open_store_bytes == 0
        assert tier.num_open_loads == tier.open_load_blocks == 0
        assert not tier._announced
        assert not tier._outbox
    assert [tier.bad_replies for tier in engine.tiers] == [0] * len(engine.tiers)


@contextlib.contextmanager
def not_waiting():
    """Assert that this thread gave the processor up for nobody meanwhile."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    yield
    after = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    assert after == before, f"waited {after - before} times"


# What crossed a queue ----------------------------------------------------------------


class Tap:
    """A worker's queue, listened to at the engine's end.

    Attributes:
        log: what was sent, in order: ("new", request), ("store" or "load", request,
            number...), ("missing", request, number...), ("finished", request).
        done: the answers that came.
        job_ids: of the jobs in ``log``.
    """

    def __init__(self, engine, tier_idx=0):
        self.log, self.done, self.job_ids = [], [], []
        link = engine._links[tier_idx]
        self._channel = link._channel
        link._channel = self

    def said(self, word, req_id=None):
        """Return what was sent of one kind, without the kind's name."""
        return [
            list(entry[1:])
            for entry in self.log
            if entry[0] == word and req_id in (None, entry[1])
        ]

    def of(self, req_id):
        """Return what was sent about one request, without its name."""
        return [(e[0], *e[2:]) for e in self.log if e[1] == req_id]

    def shrink(self, num_bytes):
        """Let the queue hold less, as where the kernel grants less."""
        self._channel._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, num_bytes)

    def fileno(self):
        return self._channel.fileno()

    def close(self):
        self._channel.close()

    def send(self, frame):
        is_sent = self._channel.send(frame)
        if is_sent:
            for message in messages.decode_to_worker(frame):
                self._note(message)
        return is_sent

    def receive(self):
        frame = self._channel.receive()
        if frame is not None:
            self.done += [
                message
                for message in messages.decode_from_worker(frame)
                if isinstance(message, messages.JobDone)
            ]
        return frame

    def _note(self, message):
        if isinstance(message, messages.Announce):
            self.log.append(("new", message.req_id))
        elif isinstance(message, messages.Finished):
            self.log.append(("finished", message.req_id))
        elif isinstance(message, messages.Incomplete):
            self.log.append(("missing", message.req_id, *numbers(message.keys)))
        else:
            kind = "load" if message.is_promotion else "store"
            self.log.append((kind, message.req_id, *numbers(message.keys)))
            self.job_ids.append(message.job_id)


def wait_word(engine, which, value, tier_idx=0):
    """Wait for a worker's word without a step of the engine."""
    wait_until(
        lambda: word(engine, which, tier_idx) >= value,
        timeout_s=WAIT_S,
        what=f"{TierWord(which).name} to reach {value}",
    )
