"""Planted bugs: each one has to be found, by the name of what it breaks.

Covers: that the state machines of ``tests/property`` can fail, invariant by
invariant. A patch begins with the machine that has to find it and the invariant
that has to be named.
Does not cover: the machines themselves.

A patch that does not apply any more fails here: plant the bug anew.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATCHES = sorted(HERE.glob("*.patch"))
MIN_PATCHES = 10
RUN_TIMEOUT_S = 50.0


def run(*command, **more):
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
        **more,
    )


def find(package_at, machine):
    """Run a machine against the package in a folder."""
    env = {**os.environ, "PYTHONPATH": str(package_at)}
    command = [HERE / "run_machine.py", ROOT / "tests" / "property", machine]
    return run(sys.executable, *command, env=env, cwd=package_at)


def header(patch, word):
    match = re.search(rf"^{word}: (.+)$", patch.read_text(), re.MULTILINE)
    assert match, f"{patch.name} has no line '{word}: ...'"
    return match[1]


def test_there_are_enough():
    assert len(PATCHES) >= MIN_PATCHES
    assert len({header(patch, "Breaks") for patch in PATCHES}) >= MIN_PATCHES


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
def test_planted_bug_is_found(patch, tmp_path):
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "shmoffload", tmp_path / "shmoffload", ignore=ignored)
    applied = run("patch", "-p1", "--fuzz=0", "-i", patch, cwd=tmp_path)
    assert applied.returncode == 0, applied.stdout + applied.stderr
    found = find(tmp_path, header(patch, "Machine"))
    said = found.stdout + found.stderr
    assert found.returncode != 0, "nobody has found it"
    broken = re.findall(r"INV-\d+", header(patch, "Breaks"))
    assert any(re.search(rf"\b{name}\b", said) for name in broken), said[-3000:]
