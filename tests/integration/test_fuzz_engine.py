"""Garbage into a whole engine, between the words of its own workers and supervisor.

Also into the session page, every word of which a peer could write.
"""

import time

import msgspec
from engine_kit import drop_primary, keys_of, load, make_config, request, step, store

from shmoffload.engine import Engine
from shmoffload.testing.frames import FrameFuzzer, budget_s, seed
from shmoffload.wire.messages import (
    Detached,
    Hello,
    JobDone,
    Resident,
    decode_from_worker,
    encode_control,
    encode_frame,
)
from shmoffload.wire.session import Word

NUM_NOISE = 20


class Noisy:
    """A channel that says more than its peer does: up to ``NUM_NOISE`` a time."""

    def __init__(self, channel, noise):
        self._channel = channel
        self._noise = noise
        self._left = 0
        self.num_said = 0
        self.is_on = True

    def __getattr__(self, name):
        return getattr(self._channel, name)

    def receive_with_fds(self):
        if self.is_on and self._left:
            self._left -= 1
            self.num_said += 1
            return self._noise(), []
        self._left = NUM_NOISE
        return self._channel.receive_with_fds()

    def receive(self):
        return self.receive_with_fds()[0]


def is_a_lie(frame, tier):
    """Well-formed news of an open job, or of a tier: nobody could tell."""
    try:
        messages = decode_from_worker(frame)
    except msgspec.DecodeError:
        return False
    return any(
        m.job_id in tier._open if isinstance(m, JobDone) else isinstance(m, Hello)
        for m in messages
    )


def worker_noise(fuzzer, engine):
    tier = engine.tiers[0]
    epochs = (engine._epoch, tier.worker_epoch)
    honest = encode_frame([JobDone(*epochs, 10**6), Resident(epochs[1], keys_of(9, 2))])
    while True:
        frame = fuzzer.any_of(
            lambda: honest, lambda: fuzzer.from_worker(epochs, [10**6])
        )
        if not is_a_lie(frame, tier):
            return frame


def scribble(fuzzer, page):
    """Write anything into any word that is read as a number."""
    for _ in range(5):
        word = fuzzer.rng.randrange(Word.NUM_TIERS + 1, 60)
        if word != Word.TEXT_SEQ:
            page.words[word] = fuzzer.rng.choice((0, 1, 2**63, 2**64 - 1))
        base = page.tier_base(0)
        at = base + fuzzer.rng.randrange(60)
        page.words[at] = fuzzer.rng.choice((0, 1, 2**63, 2**64 - 1))


def test_an_engine_under_garbage_serves_on(session_name):
    fuzzer = FrameFuzzer(seed())
    config = make_config(session_name, [{"type": "memory", "max_bytes": "8MiB"}])
    with Engine(config) as engine:
        link, control = engine._links[0], engine._control
        link._channel = worker = Noisy(
            link._channel, lambda: worker_noise(fuzzer, engine)
        )
        control._channel = boss = Noisy(
            control._channel,
            lambda: fuzzer.any_of(
                lambda: encode_control(Detached()), fuzzer.from_supervisor
            ),
        )
        num_rounds = 0
        until = time.monotonic() + budget_s(4)
        while time.monotonic() < until or num_rounds < 3:
            ctx = request(engine, f"r{num_rounds}")
            keys = keys_of(100 * num_rounds, 6)
            assert store(engine, ctx, keys) == keys
            assert engine.wait_idle(30)
            drop_primary(engine)
            assert load(engine, ctx, keys) == len(keys)  # right bytes
            engine.on_request_finished(ctx)
            scribble(fuzzer, engine.page)
            step(engine)
            num_rounds += 1
            assert not engine.is_broken
        engine.manager.check_integrity()
        assert min(worker.num_said, boss.num_said) > 100
        assert link.garbage_frames > 50
        worker.is_on = boss.is_on = False
        assert engine.wait_idle(30)
        table = engine.manager.table
        assert table.num_pending == table.num_quarantined == 0
        assert not engine.has_pending_work()
