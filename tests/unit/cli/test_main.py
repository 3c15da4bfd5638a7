"""The command line: one sentence, the right exit code, never a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shmoffload
from shmoffload import cli
from shmoffload.errors import NoSessionError, RegionTooSmallError

ROOT = Path(__file__).parents[3]
RUN_TIMEOUT_S = 60.0


def run(*words, stdout=subprocess.PIPE):
    """Run the command line as a person would: another process, no stdin."""
    return subprocess.run(
        [sys.executable, "-m", "shmoffload.cli", *words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )


def exit_code_of(words):
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    return caught.value.code


BAD = {
    "verb": (["statuss"], "unknown verb statuss: did you mean status?"),
    "no such verb": (["xyzzy"], "unknown verb xyzzy: known are serve, replay"),
    "status option": (
        ["status", "--jsn"],
        "unknown option --jsn: did you mean --json?",
    ),
    "status word": (["status", "qqq"], "unknown option qqq: known: --session NAME"),
    "no value": (["status", "--session"], "--session: expected one argument"),
    "serve option": (["serve", "--confg", "x"], "--config"),
    "serve without a file": (["serve"], "Missing option '--config'"),
    "no such file": (["serve", "-c", "/nope.toml"], "/nope.toml cannot be read"),
}


@pytest.mark.parametrize(("words", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(words, sentence, capsys):
    assert exit_code_of(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("shmoffload: ")
    assert sentence in err
    assert err.count("\n") == 1


def test_help_names_every_verb(capsys):
    assert exit_code_of(["--help"]) == 0
    out = capsys.readouterr().out
    for verb in ("serve", "status", "doctor", "clean", "verify", "demo", "version"):
        assert f"  {verb} " in out
    assert exit_code_of([]) == 2
    assert exit_code_of(["status", "--help"]) == 0
    assert "3 no session" in capsys.readouterr().out
    assert exit_code_of(["serve", "--help"]) == 0


def test_version(capsys):
    assert exit_code_of(["version"]) == 0
    assert capsys.readouterr().out == f"{shmoffload.__version__}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NoSessionError("none\nhere"), 3),
        (RegionTooSmallError("none here"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_expected_failures_become_exit_codes(monkeypatch, capsys, error, code):
    def fail(_words):
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert exit_code_of(["status"]) == code
    err = capsys.readouterr().err
    assert err in ("", "shmoffload: none here\n")


def test_our_own_bug_keeps_its_traceback(monkeypatch):
    def fail(_words):
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_dispatch", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["status"])


def test_reader_that_left_is_no_error():
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = run("--help", stdout=write_end)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def test_as_a_process():
    done = run("serve", "--confg", "x")
    assert done.returncode == 2
    assert done.stderr.startswith("shmoffload: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_break_nothing(closed):
    command = f"exec {sys.executable} -m shmoffload.cli version {closed}"
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_full_output_is_one_sentence():
    with open("/dev/full", "w") as full:
        done = run("--help", stdout=full)
    assert done.returncode == 1
    assert done.stderr.startswith("shmoffload: the output cannot be written")
    assert done.stderr.count("\n") == 1
