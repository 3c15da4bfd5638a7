"""F41: who only joined takes nothing along when it ends, however it ends."""

import ast
import json
import os
import signal
from pathlib import Path

import pytest
from late_faults_kit import (
    WAIT_S,
    engine_process,
    hear,
    tell,
    wait_nothing_left,
)
from region_kit import config_of, our_names, running

import shmoffload
from shmoffload.cli import main
from shmoffload.wire import names
from shmoffload.wire.region import PrimaryRegion

pytestmark = pytest.mark.timeout(300)
PACKAGE = Path(shmoffload.__file__).parent
JOINER = """
region = PrimaryRegion.open(config)
say("joined", bytes(region.slot_view(3)[:4]).decode())
for line in sys.stdin:
    if line == "end\\n":
        break
    region.slot_view(5)[:4] = line.strip().encode()
    say("written")
region.close()
say(sorted(name for name in sys.modules if "multiprocessing" in name))
"""


def join(session):
    return running(JOINER, session)


def write(process, words):
    tell(process, words)
    assert process.stdout.readline() == "written\n"


@pytest.mark.parametrize("how", ["orderly", "SIGKILL", "SIGTERM"])
def test_f41_a_joiner_ends_and_all_others_go_on(session_name, how, capfd):
    """The owner, a third process, and a fourth that joins afterwards."""
    region = PrimaryRegion.open(config_of(session_name))
    region.slot_view(3)[:4] = b"mine"
    try:
        with join(session_name) as third, join(session_name) as leaving:
            assert third.stdout.readline() == "joined mine\n"
            assert leaving.stdout.readline() == "joined mine\n"
            write(leaving, "here")
            if how == "orderly":
                tell(leaving, "end")
                assert leaving.stdout.readline() == "[]\n"
                assert leaving.wait(WAIT_S) == 0
            else:
                number = getattr(signal, how)
                leaving.send_signal(number)
                assert leaving.wait(WAIT_S) == -number
            assert our_names(session_name) == [f"shmoffload.{session_name}.region"]
            write(third, "more")
            assert bytes(region.slot_view(5)[:4]) == b"more"
            region.slot_view(3)[:4] = b"last"
            with join(session_name) as fourth:
                assert fourth.stdout.readline() == "joined last\n"
                write(fourth, "four")
            assert bytes(region.slot_view(5)[:4]) == b"four"
    finally:
        region.unlink()  # raises nothing: the name is still there
        region.close()
    assert our_names(session_name) == []
    assert capfd.readouterr().err == ""


ENGINE = """
import logging
engine = Engine(kit.make_config(sys.argv[1], [{"type": "memory", "nice": 0}]))
kit.store(engine, kit.request(engine, "a"), kit.keys_of(0, 4))
assert engine.wait_idle(60)
say("up")
hear()
engine.close()
say(sorted(name for name in sys.modules if "multiprocessing" in name))
"""


def test_f41_no_process_of_a_session_has_a_tracker(session_name, capfd):
    """Nobody tracks: no warning at any end, and no process that would unlink later."""
    with engine_process(ENGINE, session_name) as engine:
        assert hear(engine) == "up"
        tell(engine, "end")
        assert hear(engine) == "[]"
        assert engine.wait(WAIT_S) == 0
    wait_nothing_left(session_name)
    said = capfd.readouterr().err
    assert "tracker" not in said
    assert "leaked" not in said
    importers = [
        str(path)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and "multiprocessing"
        in [*[alias.name for alias in node.names], getattr(node, "module", None)]
    ]
    assert importers == []


def test_f41_doctor_tells_of_a_name_that_went_while_it_is_in_use(session_name, capsys):
    """As systemd does at a logout: everything runs on, and nobody can join."""

    def names_check():
        with pytest.raises(SystemExit) as ended:
            main(["doctor", "--session", session_name, "--json"])
        seen = json.loads(capsys.readouterr().out)["checks"]
        (check,) = [check for check in seen if check["check"] == "names"]
        return ended.value.code, check

    with join(session_name) as holder:
        assert holder.stdout.readline().startswith("joined")
        assert names_check()[1]["ok"]
        names.sweep(session_name)
        assert names_check()[1]["ok"]
        (name,) = our_names(session_name)
        os.unlink(f"/dev/shm/{name}")
        code, check = names_check()
        assert (code, check["ok"]) == (1, False)
        assert f"session {session_name} has lost its name" in check["fact"]
        assert str(holder.pid) in check["fact"]
        assert "RemoveIPC=no" in check["fix"]
        write(holder, "more")
    assert names_check()[1]["ok"]
