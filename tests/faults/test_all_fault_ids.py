"""Every fault that real systems had has its tests, and they run.

The one list of them. ``tests/unit/faults`` has what the control plane decides,
without a process; ``tests/faults`` has the same promises with a real engine, its
supervisor and its workers, and everything that only they can show. No id is left to
the core alone: an order is seen in a queue, a slot by its bytes.
"""

import re
import sys
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from collect_kit import (  # noqa: E402
    ROOT,
    collected,
    ids_of,
    modules,
    that_skip,
    that_sleep,
)

HERE = Path(__file__).parent
UNIT = TESTS / "unit" / "faults"
WITH_VLLM = TESTS / "with_vllm"
CASES = ROOT.parent / "shared" / "cases.md"

# The numbers have holes.
_NUMBERS = (
    *(1, 2, 3, 4, 5, 9, 10, 11, 13, 14, 16),
    *(18, 19, 20, 21, 22, 24, 25, 26, 27),
    *(29, 30, 33, 34, 36, 38, 39, 40, 41, 42, 43, 45),
    *(47, 49, 50, 52, 54, 56, 57, 59),
)
FAULTS = [f"f{n:02}" for n in _NUMBERS]
# What the control plane can have by itself; disks, memory and processes it has not.
IN_THE_CORE = {f"f{n:02}" for n in _NUMBERS if n < 28 or n in (47, 49, 50, 52, 54)}


def test_the_list_is_that_of_the_cases():
    assert len(set(FAULTS)) == len(FAULTS)
    if CASES.exists():  # beside the checkout, where there is one
        cases = re.findall(r"^\*\*F(\d\d)\b", CASES.read_text(), re.MULTILINE)
        assert [f"f{number}" for number in cases] == FAULTS


def test_each_fault_has_its_tests_which_run():
    core = Counter(ids_of(collected(UNIT), "f"))
    assert core == Counter(IN_THE_CORE), "one test each"
    real = set(ids_of(collected(HERE), "f"))
    assert real == set(FAULTS), "with real processes; none is the core's alone"
    # vLLM need not be installed here; its tests are a job of their own.
    loops = "\n".join(path.read_text() for path in modules(WITH_VLLM))
    assert re.search(r"^def test_f52_\w+\(", loops, re.MULTILINE)
    assert that_skip(HERE, UNIT, but=(Path(__file__).name,)) == []


def test_no_fault_test_sleeps():
    assert that_sleep(HERE, UNIT) == []
