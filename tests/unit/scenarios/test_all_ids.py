"""Every scenario has its one test, which runs. Faults: ``tests/faults``."""

import re
import sys
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path.insert(0, str(TESTS))

from collect_kit import ROOT, collected, ids_of, that_skip  # noqa: E402

SCENARIOS = [f"s{n:02}" for n in range(1, 63)]
SEED_NAMES = [
    "test_on_new_request_lifecycle",
    "test_prepare_store_cascades_existing_blocks_to_request_level_tiers",
    "test_request_level_policy_stores_all_blocks",
]
FOLDER = Path(__file__).parent


def test_rows_of_the_decisions_that_tests_name_exist():
    decisions = (ROOT / "docs" / "decisions.md").read_text()
    table = decisions.replace("`", "").partition("## Memory")[0]
    named = {
        row
        for folder in (FOLDER, TESTS / "unit" / "faults", TESTS / "faults")
        for path in folder.glob("*.py")
        for line in re.findall(r"\brows? (\".*)", path.read_text())
        for row in re.findall(r'"([^"]+)"', line)
    }
    assert len(named) > 8
    assert [row for row in named if f"| {row}" not in table] == []


def test_each_id_is_collected_once_and_not_skipped():
    lines = collected(FOLDER)
    assert Counter(ids_of(lines, "s")) == Counter(SCENARIOS)
    names = [line.rpartition("::")[2] for line in lines]
    assert [names.count(name) for name in SEED_NAMES] == [1, 1, 1]
    assert that_skip(FOLDER) == []
