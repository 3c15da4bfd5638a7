"""Which policy a configuration gets."""

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from shmoffload.core.policies.lru import LruPolicy
from shmoffload.core.policies.registry import BUILT_IN, make_policy
from shmoffload.engine import policies as engine_policies
from shmoffload.engine.policies import load_policy
from shmoffload.errors import ConfigError
from shmoffload.wire.config import BUILT_IN_POLICIES, POLICY_GROUP, from_dict


def config(**primary):
    return from_dict({"primary": {"slots": 4, "block_bytes": 64, **primary}})


class Plugged(LruPolicy):
    """What another package could bring."""

    def __init__(self, num_slots):
        super().__init__()
        self.num_slots = num_slots


def no_policy(_num_slots):
    return object()


@pytest.fixture
def _plug_ins(monkeypatch):
    points = EntryPoints(
        EntryPoint(name, f"{__name__}:{target}", POLICY_GROUP)
        for name, target in (
            ("mine", "Plugged"),
            ("odd", "no_policy"),
            ("gone", "Missing"),
        )
    )
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
    monkeypatch.setattr(engine_policies, "entry_points", lambda group: points)


def test_the_configuration_knows_the_built_in_names():
    """The wire may not import the core, so it has its own list."""
    assert set(BUILT_IN_POLICIES) == set(BUILT_IN)
    assert config().primary.policy == "auto"
    for name in BUILT_IN:
        assert config(policy=name).primary.policy == name
        assert load_policy(name, 4) is not load_policy(name, 4)


def test_a_wrong_name_is_refused_with_the_closest_one():
    with pytest.raises(ConfigError, match=r'policy = "rlu".*did you mean lru\?'):
        config(policy="rlu")
    with pytest.raises(ConfigError, match="known are arc, arc2, auto, lru"):
        config(policy="zzz")
    with pytest.raises(ConfigError, match='no eviction policy "zzz"'):
        make_policy("zzz", 4)


@pytest.mark.usefixtures("_plug_ins")
def test_another_package_may_bring_one():
    assert config(policy="mine").primary.policy == "mine"
    policy = load_policy("mine", 4)
    assert isinstance(policy, Plugged)
    assert policy.num_slots == 4


@pytest.mark.usefixtures("_plug_ins")
def test_a_plug_in_that_cannot_be_used_is_named():
    with pytest.raises(ConfigError, match=r"Missing cannot be used .*AttributeError"):
        load_policy("gone", 4)
    with pytest.raises(ConfigError, match="does not return"):
        load_policy("odd", 4)
    with pytest.raises(ConfigError, match="did you mean mine"):
        config(policy="mime")
