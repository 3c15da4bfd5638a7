"""Test modules are imported by bare name: two of one name would hide each other."""

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_two_modules_of_the_tests_have_one_name():
    names = Counter(
        path.name for path in TESTS.rglob("*.py") if path.name != "conftest.py"
    )
    assert [name for name, count in names.items() if count > 1] == []
