"""What pytest finds in folders, and what their tests may not do.

For the tests that check lists: each id of a list has its test, which runs.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
COLLECT_TIMEOUT_S = 50.0
_SKIP = re.compile(r"\bskip(if)?\b|xfail|importorskip")


def collected(*folders):
    """Return the ids of the tests that pytest would run there."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=COLLECT_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def ids_of(lines, letters):
    """Return the id of each collected test that is named for one, as ``f01``."""
    pattern = re.compile(rf"::test_([{letters}]\d\d)_")
    return [match[1] for line in lines if (match := pattern.search(line))]


def modules(*folders):
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


def that_skip(*folders, but=()):
    """Return the modules in which a test might be skipped."""
    return [
        path.name
        for path in modules(*folders)
        if path.name not in but and _SKIP.search(path.read_text())
    ]


def that_sleep(*folders):
    """Return where a test calls ``sleep``, however it came by it."""
    return [
        f"{path.name}:{node.lineno}"
        for path in modules(*folders)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", None)) == "sleep"
    ]
