"""Documents that tests keep true."""

import re
from pathlib import Path

import msgspec
import pytest

from shmoffload.wire import config

ROOT = Path(__file__).parents[2]
SECTIONS = {
    "session": config.SessionConfig,
    "primary": config.PrimaryConfig,
    "tier": config.TierConfig,
    "limits": config.LimitsConfig,
}


def section_of(name):
    """Rows of one section's table: key -> (default, meaning)."""
    text = (ROOT / "docs/configuration.md").read_text()
    part = re.split(r"^## ", text, flags=re.MULTILINE)
    (body,) = [p for p in part if re.match(rf"`\[+{name}\]+`", p)]
    rows = re.findall(r"^\| `(\w+)` \|(.*?)\| (.+) \|$", body, re.MULTILINE)
    return {key: (default, meaning) for key, default, meaning in rows}


@pytest.mark.parametrize("name", SECTIONS)
def test_every_key_is_documented_with_its_default(name):
    rows = section_of(name)
    fields = {f.name: f for f in msgspec.structs.fields(SECTIONS[name])}
    assert set(rows) == set(fields)
    for key, field in fields.items():
        default = rows[key][0].strip().strip('`"')
        if field.required:
            assert default == "required"
        elif field.default not in (None, "") and key != "policy":
            assert default == str(field.default)
    assert set(config.Config.__struct_fields__) == set(SECTIONS)


def test_the_example_is_a_configuration():
    text = (ROOT / "docs/configuration.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert config.from_toml(example).num_slots > 0


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))],
    ids=lambda path: path.name,
)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
