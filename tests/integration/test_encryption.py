"""Tiers with a key, in real processes; refusals that reach a person, at any time."""

import logging
import os
import signal
import stat
import subprocess
import sys

import pytest
from engine_kit import (
    drop_primary,
    keys_of,
    load,
    make_config,
    request,
    scan,
    slab,
    store,
)
from worker_kit import BLOCK_BYTES, WorkerRig

from shmoffload.cli.status import read_status
from shmoffload.engine import Engine
from shmoffload.errors import TierConfigError
from shmoffload.testing.poll import wait_until
from shmoffload.testing.tier_tests import key_of
from shmoffload.wire import config as wire_config
from shmoffload.wire import names
from shmoffload.wire.session import TierState, TierWord

pytestmark = pytest.mark.timeout(300)
TIMEOUT_S = 60
NUM = 24
KEYS = [key_of(i) for i in range(NUM)]


@pytest.fixture
def key_file(tmp_path):
    return make_key(tmp_path / "key")


def make_key(path, mode=0o600):
    path.write_text(os.urandom(32).hex() + "\n")
    path.chmod(mode)
    return path


def bytes_of_files(path):
    return b"".join(p.read_bytes() for p in path.rglob("*") if p.is_file())


@pytest.mark.parametrize("kind", ["slab", "fs", "memory"])
def test_a_worker_with_a_key(session_name, tmp_path, key_file, kind):
    path = tmp_path / "tier"
    tier = {"type": kind, "max_bytes": "1MiB", "nice": 0, "key_file": str(key_file)}
    if kind != "memory":
        tier["path"] = str(path)
    with WorkerRig(session_name, **tier) as rig:
        rig.ready()
        assert ", encrypted with key " in rig.hello().limits
        for slot, key in enumerate(KEYS):
            rig.fill(slot, key)
        payload = bytes(rig.region.slot_view(0))
        assert rig.run(KEYS, list(range(NUM))) == ([], "")
        back = list(range(NUM, 2 * NUM))
        assert rig.run(KEYS, back, load=True) == ([], "")
        assert all(rig.holds(s, k) for s, k in zip(back, KEYS, strict=True))
        assert rig.word(TierWord.BLOCKS_BAD) == 0
        if kind == "memory":
            return
        found = bytes_of_files(path)
        assert len(found) >= NUM * BLOCK_BYTES
        assert payload[:16] not in found


def restart(rig):
    rig.process.terminate()
    assert rig.exit_code() == 0
    rig.channel.close()
    rig.ready()


@pytest.mark.parametrize("kind", ["slab", "fs"])
def test_another_key_finds_nothing_and_spoils_nothing(
    session_name, tmp_path, key_file, kind
):
    tier = {"type": kind, "path": str(tmp_path / "tier"), "max_bytes": "1MiB"}
    tier |= {"key_file": str(key_file), "nice": 0}
    with WorkerRig(session_name, **tier) as rig:
        rig.ready()
        for slot, key in enumerate(KEYS):
            rig.fill(slot, key)
        assert rig.run(KEYS, list(range(NUM))) == ([], "")
        right = key_file.read_text()
        make_key(key_file)
        restart(rig)
        assert rig.resident() == []
        failed, _ = rig.run(KEYS, list(range(NUM)), load=True)
        assert sorted(failed) == list(range(NUM))
        assert rig.word(TierWord.BLOCKS_MISSED) == NUM
        key_file.write_text(right)
        restart(rig)
        assert sorted(rig.resident()) == sorted(KEYS)
        slots = list(range(NUM))
        assert rig.run(KEYS, slots, load=True) == ([], "")
        assert all(rig.holds(s, k) for s, k in zip(slots, KEYS, strict=True))


def without_a_file(path):
    path.unlink()
    return "does not exist"


def with_a_mode(path):
    path.chmod(0o644)
    return "has mode 0644"


def with_too_little(path):
    path.write_text("secret")
    return "holds 6 bytes that are no key"


def with_a_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")
    return "is a symbolic link"


def with_another_owner(path):
    try:
        os.chown(path, 12345, -1)
    except PermissionError:
        pytest.skip("only root gives files away")
    return "belongs to user 12345"


@pytest.mark.parametrize(
    "spoil",
    [without_a_file, with_a_mode, with_too_little, with_a_link, with_another_owner],
)
def test_a_key_that_cannot_be_used_is_one_sentence_and_exit_code_2(
    session_name, tmp_path, key_file, spoil
):
    what = spoil(key_file)
    tier = {"type": "slab", "path": str(tmp_path / "t"), "key_file": str(key_file)}
    with WorkerRig(session_name, **tier) as rig:
        rig.start()
        hello = rig.hello()
        assert hello.is_config_error
        assert hello.error.startswith(f"key_file = {key_file} {what}")
        assert "\n" not in hello.error
        assert rig.exit_code() == 2
    assert not (tmp_path / "t").exists(), "nothing was made"


def test_an_engine_says_it_with_the_tiers_name(session_name, tmp_path, key_file):
    key_file.chmod(0o640)
    tier = slab(tmp_path / "t", name="disk", key_file=str(key_file))
    with pytest.raises(TierConfigError) as caught:
        Engine(make_config(session_name, [tier]))
    assert caught.value.exit_code == 2
    text = str(caught.value)
    assert text.startswith(f"tier disk: key_file = {key_file} has mode 0640")
    assert text.endswith(f"chmod 600 {key_file}")


def test_a_worker_without_the_library_says_what_to_install(
    session_name, tmp_path, key_file, monkeypatch
):
    shadow = tmp_path / "shadow" / "cryptography"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").write_text("raise ImportError('not here')\n")
    monkeypatch.setenv("PYTHONPATH", str(shadow.parent), prepend=os.pathsep)
    tier = {"type": "slab", "path": str(tmp_path / "t"), "key_file": str(key_file)}
    with WorkerRig(session_name, **tier) as rig:
        rig.start()
        hello = rig.hello()
        assert hello.is_config_error
        assert "pip install 'shmoffload[encrypt]'" in hello.error
        assert rig.exit_code() == 2
    with WorkerRig(session_name, type="memory", max_bytes="1MiB") as rig:
        rig.ready()  # without a key the library is not looked for


def test_an_engine_over_an_encrypted_tier_and_a_plain_one(
    session_name, tmp_path, key_file
):
    """The plain tier reads the very slots that the other has encrypted from."""
    tiers = [
        slab(tmp_path / "a", name="a", key_file=str(key_file), nice=0),
        slab(tmp_path / "b", name="b", nice=0),
    ]
    config, keys = make_config(session_name, tiers, slots=64), keys_of(0, 20)
    with Engine(config) as engine:
        store(engine, request(engine, "a"), keys)
        assert engine.wait_idle(TIMEOUT_S)
        drop_primary(engine)
        assert load(engine, request(engine, "b"), keys) == len(keys)
    for only in tiers:
        with Engine(make_config(session_name, [only])) as engine:
            assert load(engine, request(engine, "c"), keys) == len(keys)
    make_key(key_file)
    with Engine(make_config(session_name, tiers[:1])) as engine:
        assert scan(engine, request(engine, "d"), keys) == 0


def test_an_adopted_region_has_right_headers_after_encrypted_loads(
    session_name, tmp_path, key_file
):
    """``check_adopted`` reads the headers that a load has to have put there."""
    raw = {
        "session": {"name": session_name, "namespace": "test"},
        "primary": {"block_bytes": 16 * 1024, "slots": 32, "persist": True},
        "tier": [slab(tmp_path / "t", key_file=str(key_file), nice=0)],
    }
    config, keys = wire_config.from_dict(raw), keys_of(0, 10)
    try:
        with Engine(config) as engine:
            store(engine, request(engine, "a"), keys)
            assert engine.wait_idle(TIMEOUT_S)
            drop_primary(engine)
            assert load(engine, request(engine, "b"), keys) == len(keys)
        with Engine(config) as engine:
            assert load(engine, request(engine, "c"), keys) == len(keys)
            assert engine.page.get_tier(0, TierWord.BLOCKS_READ) == 0
    finally:

        def is_swept():
            names.sweep(session_name, kept_too=True)
            return not is_there(names.region_name(session_name))

        wait_until(is_swept, timeout_s=TIMEOUT_S, what="the end of the kept region")


def is_there(name):
    return os.path.exists(f"{names.SHM_DIR}{name}")


# A refusal at a restart ------------------------------------------------------------


def test_a_refusal_at_a_restart_is_logged_once_and_in_status(
    session_name, tmp_path, key_file, caplog, capfd
):
    tier = slab(tmp_path / "t", name="disk", key_file=str(key_file), nice=0)
    config = make_config(session_name, [tier], restart_backoff_s=0.05)
    with caplog.at_level(logging.INFO), Engine(config) as engine:
        key_file.chmod(stat.S_IRUSR | stat.S_IROTH)
        os.kill(engine.page.get_tier(0, TierWord.WORKER_PID), signal.SIGKILL)

        def is_refused():
            engine.step_begin()
            state = engine.page.get_tier(0, TierWord.STATE)
            said = [m for m in caplog.messages if "has mode 0404" in m]
            return state == TierState.REFUSED and said

        wait_until(is_refused, timeout_s=TIMEOUT_S, what="the refusal, and its word")
        sentence = f"key_file = {key_file} has mode 0404"
        status = read_status(engine.page, now_ns=0)
        (problem,) = [p for p in status["problems"] if "disk" in p]
        assert problem.startswith(f"tier disk is REFUSED: {sentence}")
        (shown,) = status["tiers"]
        assert shown["last_error"].startswith(sentence)
        assert scan(engine, request(engine, "a"), keys_of(0, 1)) == 0
    said = [record for record in caplog.records if sentence in record.getMessage()]
    assert [record.levelname for record in said] == ["ERROR"]
    assert said[0].getMessage().startswith(f"tier disk: {sentence}")
    assert sentence not in capfd.readouterr().err  # of supervisor and workers


def test_only_a_tier_with_a_key_loads_the_library():
    code = (
        "import sys, shmoffload.worker.__main__, shmoffload.worker.tiers.slab\n"
        "import shmoffload.cli.doctor\n"
        "found = {'cryptography', 'shmoffload.worker.crypt'} & set(sys.modules)\n"
        "sys.exit(', '.join(found) or None)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=TIMEOUT_S)
