"""The kits of the other folders, and tiers that can be made to fail."""

import sys
from pathlib import Path

import pytest

KITS = ("integration", "crash", "unit/worker")
sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in KITS]

from shmoffload.testing.faults.control import Control  # noqa: E402


@pytest.fixture
def make_control(tmp_path):
    """Make controls of faulty tiers; what they hold is let go at the end."""
    made = []

    def make(name="tier", *, inner="slab"):
        made.append(Control(tmp_path / name, inner=inner))
        return made[-1]

    yield make
    for control in made:
        control.clear()


@pytest.fixture
def control(make_control):
    """Return the control of one faulty slab."""
    return make_control()
