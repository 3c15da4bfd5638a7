"""The look from outside: what it shows, how it judges, what it costs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shmoffload.cli import status as status_
from shmoffload.errors import BadInputError, NoSessionError
from shmoffload.wire import names
from shmoffload.wire.config import from_dict
from shmoffload.wire.region import PrimaryRegion
from shmoffload.wire.session import Fault, SessionPage, TierState, TierWord, Word

ROOT = Path(__file__).parents[3]
HEALTHY, DEGRADED = 0, 1


def config_of(session):
    return from_dict(
        {
            "session": {"name": session},
            "primary": {"slots": 2, "block_bytes": 4096},
            "tier": [{"type": "memory", "name": "fast"}, {"type": "memory"}],
        }
    )


@pytest.fixture
def page(session_name):
    """The page of a session that looks alive; this process plays everybody."""
    opened = SessionPage.open_or_create(config_of(session_name))
    opened.set(Word.ENGINE_EPOCH, 1)
    opened.set(Word.ENGINE_PID, 4711)
    opened.set(Word.STRIDE_BYTES, 8192)
    opened.set(Word.NUM_SLOTS, 2)
    opened.set(Word.SLOTS_READY, 1)
    opened.set(Word.STEPS, 99)
    opened.set(Word.SUPERVISOR_HEARTBEAT_NS, time.monotonic_ns())
    for tier_idx in range(2):
        opened.set_tier(tier_idx, TierWord.STATE, TierState.UP)
        opened.set_tier(tier_idx, TierWord.STARTED_NS, time.monotonic_ns())
    opened.set_tier(0, TierWord.WORKER_PID, 1234)
    opened.set_tier(0, TierWord.CAPACITY_BYTES, 3 << 20)
    opened.set_tier(0, TierWord.USED_BYTES, 1536)
    opened.set_tier(0, TierWord.HITS, 42)
    opened.set_tier(0, TierWord.JOBS_FAILED, 2)
    opened.set_tier(0, TierWord.BLOCKS_BAD, 3)
    yield opened
    opened.unlink(session_name)
    opened.close()


@pytest.fixture
def owner(page, session_name):
    """The lock that says that the engine lives."""
    region = PrimaryRegion.open(config_of(session_name))
    region.own()
    yield region
    region.unlink()
    region.close()


def look(session, capsys):
    """Return exit code and parsed ``--json``."""
    code = status_.status_command(["--session", session, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_healthy(page, owner, session_name, capsys):
    code, seen = look(session_name, capsys)
    assert (code, seen["status"], seen["problems"]) == (HEALTHY, "healthy", [])
    assert seen["engine"] == {"alive": True, "closed": False, "pid": 4711, "epoch": 1}
    assert seen["primary"]["bytes"] == 16384
    assert seen["counters"]["steps"] == 99
    first = seen["tiers"][0]
    assert (first["name"], first["state"], first["pid"]) == ("fast", "UP", 1234)
    assert (first["hits"], first["errors"], first["used_bytes"]) == (42, 5, 1536)


def test_screen_shows_the_same(page, owner, session_name, capsys):
    page.set_tier_error(1, "disk broke")
    assert status_.status_command(["--session", session_name]) == HEALTHY
    out = capsys.readouterr().out
    assert f"session     {session_name}: healthy" in out
    assert "pid 4711, 99 steps" in out
    assert "1.5 KiB  3 MiB" in out
    assert "disk broke" in out


@pytest.mark.parametrize("state", [s for s in TierState if s is not TierState.UP])
def test_tier_that_is_not_up_degrades(page, owner, session_name, capsys, state):
    page.set_tier(1, TierWord.STATE, state)
    page.set_tier_error(1, "killed by SIGKILL")
    code, seen = look(session_name, capsys)
    assert code == DEGRADED
    assert seen["problems"] == [f"tier memory is {state.name}: killed by SIGKILL"]


@pytest.mark.parametrize("fault", list(Fault))
def test_tier_that_takes_no_stores_degrades(page, owner, session_name, capsys, fault):
    page.set_tier(0, TierWord.BACKING_OFF, fault)
    page.set_tier(0, fault.word, 7)
    code, seen = look(session_name, capsys)
    assert (code, seen["tiers"][0]["backing_off"]) == (DEGRADED, fault.name)
    what, todo = status_._REFUSALS[fault]
    assert seen["problems"] == [f"tier fast takes no stores now ({what}): {todo}"]
    status_.status_command(["--session", session_name])
    out = capsys.readouterr().out
    assert f"\nblocks refused by fast: 7 {what}, 3 corrupt, removed\n" in out
    page.set_tier(0, TierWord.BACKING_OFF, 99)  # of a newer worker
    assert look(session_name, capsys)[0] == HEALTHY


def test_unknown_state_does_not_break_the_screen(page, owner, session_name, capsys):
    page.set_tier(0, TierWord.STATE, 77)
    assert status_.status_command(["--session", session_name]) == DEGRADED
    assert "tier fast is 77" in capsys.readouterr().out


def test_silent_supervisor_degrades(page, owner, session_name, capsys):
    page.set(Word.SUPERVISOR_HEARTBEAT_NS, time.monotonic_ns() - 6 * 10**9)
    code, seen = look(session_name, capsys)
    assert (code, seen["problems"]) == (DEGRADED, ["the supervisor is silent"])
    page.set(Word.SUPERVISOR_HEARTBEAT_NS, 0)
    assert look(session_name, capsys)[0] == DEGRADED


def test_engine_that_is_gone_degrades(page, session_name, capsys):
    code, seen = look(session_name, capsys)
    assert (code, seen["problems"]) == (DEGRADED, ["the engine is gone"])


@pytest.mark.parametrize(
    ("epoch", "is_closed"), [(0, 0), (1, 1), (1, 0)], ids=["never", "closed", "killed"]
)
def test_daemon_without_an_engine_waits_and_is_healthy(
    page, session_name, capsys, epoch, is_closed
):
    page.set(Word.ENGINE_EPOCH, epoch)
    page.set(Word.ENGINE_CLOSED, is_closed)
    for tier_idx in range(2):
        page.set_tier(tier_idx, TierWord.STATE, TierState.STOPPED)
    code, seen = look(session_name, capsys)
    assert (code, seen["status"]) == (HEALTHY, "waiting for an engine")


def test_idle_engine_is_alive(page, owner, session_name, capsys):
    page.set(Word.ENGINE_HEARTBEAT_NS, 1)
    assert look(session_name, capsys)[0] == HEALTHY


def test_without_a_name(page, session_name, monkeypatch, capsys):
    monkeypatch.setattr(status_, "live_sessions", lambda: iter([session_name]))
    status_.status_command([])
    assert session_name in capsys.readouterr().out
    monkeypatch.setattr(status_, "live_sessions", lambda: iter(["a", "b"]))
    with pytest.raises(BadInputError, match=r"2 sessions are live \(a, b\): name one"):
        status_.status_command([])
    monkeypatch.setattr(status_, "live_sessions", lambda: iter([]))
    with pytest.raises(NoSessionError, match="no session is live here: start"):
        status_.status_command([])


def test_dead_page_is_no_session(session_name):
    SessionPage.open_or_create(config_of(session_name)).close()
    with pytest.raises(NoSessionError, match=f'no session "{session_name}" is live'):
        status_.status_command(["--session", session_name])
    assert len(names.sweep(session_name)) == 1  # looking did not remove it


def test_other_page_version_is_no_session(page, session_name):
    page.set(Word.VERSION, 999)
    with pytest.raises(NoSessionError, match="another version"):
        status_.status_command(["--session", session_name])


def test_looking_changes_nothing(page, owner, session_name, capsys):
    before = os.pread(page.fd, 1 << 20, 0)
    look(session_name, capsys)
    assert os.pread(page.fd, 1 << 20, 0) == before


def test_script_works_without_an_installation(page, owner, session_name, tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "tools/status.py", "--session", session_name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert session_name in done.stdout
