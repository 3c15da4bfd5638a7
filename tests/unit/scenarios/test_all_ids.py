"""Every scenario and every control-plane fault has its one test, which runs."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

UNIT = Path(__file__).parents[1]
COLLECT_TIMEOUT_S = 50.0
SKIP = re.compile(r"\bskip(if)?\b|xfail|importorskip")

SCENARIOS = [f"s{n:02}" for n in range(1, 63)]
# Of the list of faults, those that the control plane can have; its numbers have
# holes. Disks, names in memory and processes have theirs elsewhere.
FAULTS = [
    f"f{n:02}"
    for n in (
        *range(1, 6),
        *(9, 10, 11, 13, 14, 16),
        *range(18, 23),
        *range(24, 28),
        *(47, 49, 50, 52, 54),
    )
]
SEED_NAMES = [
    "test_on_new_request_lifecycle",
    "test_prepare_store_cascades_existing_blocks_to_request_level_tiers",
    "test_request_level_policy_stores_all_blocks",
]


def collected(*folders):
    """Ids of the tests that pytest would run there."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *folders],
        cwd=UNIT.parents[1],
        capture_output=True,
        text=True,
        timeout=COLLECT_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_rows_of_the_decisions_that_tests_name_exist():
    decisions = (UNIT.parents[1] / "docs" / "decisions.md").read_text()
    table = decisions.replace("`", "").partition("## Memory")[0]
    named = {
        row
        for folder in (UNIT / "scenarios", UNIT / "faults")
        for path in folder.glob("*.py")
        for line in re.findall(r"\brows? (\".*)", path.read_text())
        for row in re.findall(r'"([^"]+)"', line)
    }
    assert len(named) > 8
    assert [row for row in named if f"| {row}" not in table] == []


def test_each_id_is_collected_once_and_not_skipped():
    folders = [UNIT / "scenarios", UNIT / "faults"]
    ids = collected(*folders)
    found = Counter(
        match[1] for line in ids if (match := re.search(r"::test_([sf]\d\d)_", line))
    )
    assert found == Counter([*SCENARIOS, *FAULTS])
    names = [line.rpartition("::")[2] for line in ids]
    assert [names.count(name) for name in SEED_NAMES] == [1, 1, 1]
    skipping = [
        path.name
        for folder in folders
        for path in folder.glob("*.py")
        if path != Path(__file__)
        and re.search(r"\bskip(if)?\b|xfail|importorskip", path.read_text())
    ]
    assert skipping == []
