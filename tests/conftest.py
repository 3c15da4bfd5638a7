"""Fixtures for every test: nothing is left behind, profiles, time limits."""

import os
from pathlib import Path

import hypothesis
import pytest

from shmoffload.testing import leaks
from shmoffload.testing.poll import wait_until

IS_CI = os.environ.get("CI", "").lower() == "true"
PROPERTY_TIMEOUT_S = 400  # shrinking is slow
GONE_TIMEOUT_S = 10.0

_COMMON = {"deadline": None, "print_blob": True}
hypothesis.settings.register_profile("dev", max_examples=50, **_COMMON)
hypothesis.settings.register_profile("ci", max_examples=100, **_COMMON)
hypothesis.settings.register_profile("nightly", max_examples=2000, **_COMMON)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if IS_CI else "dev")
)


def pytest_configure(config):
    leaks.mark_environment()


def pytest_collection_modifyitems(config, items):
    property_dir = Path(__file__).parent / "property"
    for item in items:
        if property_dir in item.path.parents:
            item.add_marker(pytest.mark.timeout(PROPERTY_TIMEOUT_S))


@pytest.fixture
def session_name():
    """A session name that carries this run's mark."""
    return leaks.new_session_name()


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    """Fail a test that leaves a name in /dev/shm or a process of ours."""
    before = leaks.find_leftovers(unmarked_too=IS_CI)
    yield

    def left():
        return leaks.find_leftovers(unmarked_too=IS_CI).since(before)

    try:
        wait_until(
            lambda: not left(),
            timeout_s=GONE_TIMEOUT_S,
            what="the end of what this test started",
        )
    except AssertionError:
        found = left()
        found.remove()
        pytest.fail(f"left behind: {sorted(found.names)} {found.processes}")
