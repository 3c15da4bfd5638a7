"""F59: one tier's bad end costs no other its good one; no memory is pulled away.

Orderly ends of single workers: ``tests/crash/test_supervisor``.
"""

import engine_kit as kit
import pytest
from faults_kit import faulty, keys, make_config
from late_faults_kit import (
    WAIT_S,
    engine_process,
    hear,
    patch_workers,
    pids,
    tell,
    wait_nothing_left,
)
from supervisor_kit import is_alive, names_of, pids_of, wait_gone

from shmoffload.engine import Engine
from shmoffload.testing.faults.control import Call
from shmoffload.testing.faults.deaths import Death, resume, strike
from shmoffload.testing.poll import wait_until

pytestmark = pytest.mark.timeout(300)
RAISES_AT_ITS_END = """
from shmoffload.testing.faults.tier import FaultyTier
def close(self):
    raise RuntimeError("a tier's own bug at its end")
FaultyTier.close = close
"""
NUM = 5


@pytest.fixture
def controls(make_control):
    return [make_control(f"tier-{i}") for i in range(3)]


def three(session, controls, **limits):
    tiers = [faulty(control, name=f"t{i}") for i, control in enumerate(controls)]
    return make_config(session, tiers, slots=32, **limits)


def note_the_living(engine, noted):
    """Note which workers live when the engine lets go of its memory."""
    workers = pids(engine)
    real = engine.region.close

    def close():
        noted.append([pid for pid in workers if is_alive(pid)])
        real()

    engine.region.close = close


def check_found_again(session, controls, found):
    """What each tier has after a fresh start; every byte is compared."""
    for control, num in zip(controls, found, strict=True):
        control.clear()
        config = make_config(session, [faulty(control)], slots=32)
        with Engine(config) as engine:
            got = kit.load(engine, kit.request(engine, "l"), keys(*range(NUM)))
            assert got == NUM
            assert engine.tiers[0].num_resident in num
    wait_nothing_left(session)


@pytest.mark.parametrize("how", ["raises", "is dead", "hangs", "is slow"])
def test_f59_the_middle_tier_of_three(session_name, controls, monkeypatch, capfd, how):
    """Jobs run and wait in it; the others end in order, then the memory goes."""
    if how == "raises":
        patch_workers(monkeypatch, f"if tier_idx == 1:{indented(RAISES_AT_ITS_END)}")
    config = three(
        session_name,
        controls,
        close_timeout_s=12.0 if how != "is slow" else 60.0,
        restart_backoff_s=50.0,
        restart_backoff_max_s=60.0,
    )
    noted = []
    with Engine(config) as engine:
        kit.store(engine, kit.request(engine, "a"), keys(*range(NUM)))
        assert engine.wait_idle(WAIT_S)
        note_the_living(engine, noted)
        everybody = pids_of(session_name)
        if how in ("hangs", "is slow"):
            controls[1].hold(Call.PUT)
        elif how == "is dead":
            strike(pids(engine)[1], Death.SIGKILL)
            wait_gone([pids(engine)[1]])
        for n in range(10, 14):  # one runs, the others wait
            kit.store(engine, kit.request(engine, f"r{n}"), keys(n))
        if how in ("hangs", "is slow"):
            controls[1].wait_held(Call.PUT, meanwhile=lambda: kit.step(engine))
        if how == "is slow":
            controls[1].release()
            controls[1].slow(Call.PUT, 0.3)
        if how == "hangs":
            strike(pids(engine)[1], Death.HANG)
        engine.close()
        assert noted == [[]]  # no worker was left that could write there
        assert [tier.num_open_jobs for tier in (engine.tiers[0], engine.tiers[2])] == [
            0,
            0,
        ]
        engine.close()  # again, and by its other name: nothing
        engine.shutdown()
        assert len(noted) == 1
        kit.scan(engine, kit.request(engine, "late"), keys(1))  # a miss, no error
        assert names_of(session_name) == []
        wait_gone(everybody)
    said = capfd.readouterr().err
    assert "tracker" not in said
    assert "Traceback" not in said or how == "raises"
    whole = [NUM + 4]
    middle = {
        "raises": whole,
        "is dead": [NUM],
        "hangs": range(NUM, NUM + 5),
        "is slow": whole,
    }
    check_found_again(session_name, controls, [whole, middle[how], whole])


def indented(code):
    return code.replace("\n", "\n    ")


@pytest.mark.parametrize("what", ["region", "page"])
def test_f59_a_failing_step_of_the_end_skips_no_other(session_name, controls, what):
    """The error comes out once all else is done; the second call is nothing."""
    engine = Engine(three(session_name, controls))
    everybody = pids_of(session_name)
    kit.store(engine, kit.request(engine, "a"), keys(1))

    def fail(*_args):
        raise OSError(5, "Input/output error")

    getattr(engine, what).unlink = fail
    with pytest.raises(OSError, match="Input/output error"):
        engine.close()
    engine.close()
    wait_gone(everybody)
    # Names that could not be removed are no more than that: the next start does it.
    assert {name.rpartition(".")[2] for name in names_of(session_name)} == {
        "region": {"region", "own"},
        "page": {"page"},
    }[what]
    Engine(three(session_name, controls)).close()
    wait_nothing_left(session_name)


ENGINE = """
session, *folders = sys.argv[1:]
tiers = [{"type": "faulty", "name": f"t{i}", "path": path, "max_bytes": "4MiB",
          "min_free": 0, "nice": 0} for i, path in enumerate(folders)]
engine = Engine(kit.make_config(session, tiers))
kit.store(engine, kit.request(engine, "a"), kit.keys_of(0, 5))
say("up")
hear()
engine.close()
engine.close()
say("closed")
"""


@pytest.mark.parametrize("is_hung", [False, True])
def test_f59_exit_code_0_and_no_word_of_a_tracker(
    session_name, controls, capfd, is_hung
):
    """A clean end, and one over a worker that is stopped."""
    folders = [control.folder for control in controls]
    with engine_process(ENGINE, session_name, *folders) as engine:
        assert hear(engine) == "up"
        others = [pid for pid in pids_of(session_name) if pid != engine.pid]
        hung = others[-1] if is_hung else 0
        try:
            if hung:
                strike(hung, Death.HANG)
            tell(engine, "end")
            assert hear(engine) == "closed"
            assert engine.wait(WAIT_S) == 0
        finally:
            if hung:
                resume(hung)
    wait_nothing_left(session_name)
    said = capfd.readouterr().err
    assert "tracker" not in said
    assert "Traceback" not in said
    wait_until(lambda: not names_of(session_name), timeout_s=WAIT_S, what="no name")
