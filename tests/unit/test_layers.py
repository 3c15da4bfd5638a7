"""Who may import what; a layer that is only a habit does not last."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "shmoffload"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TOOLS = sorted((ROOT / "tools").rglob("*.py"))
RUN_TIMEOUT_S = 60.0

PURE_STDLIB = {
    "__future__",
    "abc",
    "array",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "math",
    "operator",
    "types",
    "typing",
}
NEVER = {"pickle", "marshal", "multiprocessing", "shelve", "cloudpickle", "dill"}


def imports_of(source, *, package):
    """Dotted names that a source text imports, ``from x import y`` as ``x.y``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, *filter(None, [node.module])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def imports_of_file(path):
    package = ".".join(path.relative_to(ROOT).parent.parts)
    return imports_of(path.read_text(), package=package)


def layer_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_within(name, module):
    return name == module or name.startswith(module + ".")


def faults(allowed, layers):
    """Imports in ``layers`` that ``allowed`` refuses, as text."""
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in SOURCES
        if layer_of(path) in layers
        for name in sorted(imports_of_file(path))
        if not allowed(name)
    ]


def test_the_core_is_pure():
    def allowed(name):
        return (
            name.split(".")[0] in PURE_STDLIB | {"numpy"}
            or is_within(name, "shmoffload.core")
            or is_within(name, "shmoffload.errors")
        )

    assert faults(allowed, {"core"}) == []


@pytest.mark.parametrize("layer", ["wire", "worker", "supervisor"])
def test_only_the_words_of_the_core_are_shared(layer):
    def allowed(name):
        return not is_within(name, "shmoffload.core") or is_within(
            name, "shmoffload.core.types"
        )

    assert faults(allowed, {layer}) == []


def test_wire_knows_nobody_above_it():
    def allowed(name):
        return name.split(".")[0] != "shmoffload" or any(
            is_within(name, f"shmoffload.{module}")
            for module in ("wire", "core.types", "errors")
        )

    assert faults(allowed, {"wire"}) == []


def test_heavy_libraries_have_one_door_each():
    others = {layer_of(path) for path in SOURCES} - {"cuda_ipc", "vllm"}
    assert faults(lambda name: not is_within(name, "torch"), others) == []
    others = {layer_of(path) for path in SOURCES} - {"vllm"}
    assert faults(lambda name: not is_within(name, "vllm"), others) == []


@pytest.mark.parametrize(
    "path", [*SOURCES, *TOOLS], ids=lambda path: str(path.relative_to(ROOT))
)
def test_nobody_runs_code_that_comes_from_outside(path):
    assert {name.split(".")[0] for name in imports_of_file(path)} & NEVER == set()
    called = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert called & {"eval", "exec", "__import__"} == set()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_introduce_themselves_and_stay_short(path):
    tree = ast.parse(path.read_text())
    assert len(path.read_text().splitlines()) <= 400
    if path.name not in ("__init__.py", "__main__.py"):
        introduction = ast.get_docstring(tree) or ""
        for part in ("Covers:", "Does not cover:", "Who calls it:"):
            assert part in introduction


def test_the_reader_of_imports_sees_every_form():
    source = (
        "import os.path, pickle as p\nfrom a.b import c\nfrom . import d\n"
        "from ..core import e\ndef f():\n    import torch\n"
    )
    assert imports_of(source, package="shmoffload.wire") == {
        "os.path",
        "pickle",
        "a.b.c",
        "shmoffload.wire.d",
        "shmoffload.core.e",
        "torch",
    }


@pytest.mark.parametrize(
    "module",
    [
        "shmoffload.worker.__main__",
        "shmoffload.worker.tiers.slab",
        "shmoffload.worker.tiers.fs",
        "shmoffload.worker.tiers.memory",
        "shmoffload.testing.faults.tier",
        "shmoffload.supervisor.__main__",
        "shmoffload.cli.status",
        "shmoffload.cli.doctor",
        "shmoffload.cli.clean",
        "shmoffload.cli.verify",
        "shmoffload.engine",
    ],
)
def test_light_processes_import_nothing_heavy(module):
    code = (
        "import importlib, sys\n"
        f"importlib.import_module({module!r})\n"
        "heavy = {'torch', 'vllm', 'pandas', 'multiprocessing'}\n"
        "print(sorted(heavy & {name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
