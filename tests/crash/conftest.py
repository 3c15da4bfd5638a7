"""Fixtures of the crash tests."""

import pytest
from fake_engine import FakeEngine
from supervisor_kit import toml

from shmoffload.wire.config import from_toml


@pytest.fixture
def make_engine(session_name):
    def make(*, daemon=False, **limits):
        return FakeEngine(from_toml(toml(session_name, **limits)), daemon=daemon)

    return make
