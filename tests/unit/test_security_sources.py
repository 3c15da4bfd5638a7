"""Whatever makes a name makes it private and follows nothing: read from the sources.

The runs behind it are tests/faults (F57) and the tests of each module; this one finds
the call that somebody adds next year.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "shmoffload"
LAYERS = ("core", "wire", "worker", "supervisor", "engine", "vllm", "cli")
SOURCES = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if path.relative_to(PACKAGE).parts[0].removesuffix(".py") in LAYERS
    or path.parent == PACKAGE
)
NEVER = {
    "makedirs": "makes what is above with the mode of the umask: one mkdir each, 0700",
    "mkfifo": "we have no pipes with names",
    "mknod": "we have no devices",
    "symlink": "we make no links",
    "symlink_to": "we make no links",
    "link": "we make no links",
    "hardlink_to": "we make no links",
    "touch": "its mode is 0666: os.open with 0o600",
    "write_text": "its mode is 0666 and it follows links: os.open with 0o600",
    "write_bytes": "its mode is 0666 and it follows links: os.open with 0o600",
    "mkstemp": "somewhere else's names: files of a tier are made in its directory",
    "NamedTemporaryFile": "likewise",
    "mkdtemp": "likewise",
    "copyfile": "follows links",
    "chown": "we give nothing away",
}
OUR_WORDS = {"touch"}
"""With an argument: the use of a block, not of a file."""
EXCEPTIONS = {
    # where, what: why that is fine
    ("supervisor/setting.py", "write_text"): "/proc/self/autogroup",
}


def calls_in(tree):
    """Each call with the innermost function around it."""

    def visit(node, function):
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            if isinstance(child, ast.Call):
                yield child, function
            yield from visit(child, child if is_function else function)

    yield from visit(tree, tree)


def name_of(call):
    """``os.open`` is "open", and so is ``open``; the owner tells them apart."""
    if isinstance(call.func, ast.Attribute):
        owner = call.func.value
        return owner.id if isinstance(owner, ast.Name) else "...", call.func.attr
    return "", call.func.id if isinstance(call.func, ast.Name) else ""


def numbers_in(call):
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    return {node.value for node in values if isinstance(node, ast.Constant)}


def writes(call, owner):
    """``open(path, "w")`` or ``path.open("w")``; a mode that is no constant may be."""
    modes = [*call.args, *(k.value for k in call.keywords if k.arg == "mode")]
    if not owner:
        modes = modes[1:]
        return any(
            not isinstance(mode, ast.Constant) or set(str(mode.value)) & set("wax+")
            for mode in modes
        )
    return any(
        isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax+")
        for mode in modes
    )


def may_create(call, function, around):
    """It says so, gives a mode, or gets its flags from somebody else."""
    given = {arg.arg for arg in getattr(getattr(function, "args", None), "args", ())}
    flags = call.args[1] if len(call.args) > 1 else None
    is_given = isinstance(flags, ast.Name) and flags.id in given
    return "O_CREAT" in around or len(call.args) > 2 or is_given


def faults_of(source, where):
    """What is wrong with the calls in a source text, as sentences."""
    found = []
    for call, function in calls_in(ast.parse(source)):
        owner, name = name_of(call)
        around = ast.unparse(function)
        at = f"{where}:{call.lineno}: {name}"
        if (where, name) in EXCEPTIONS:
            continue
        if name in NEVER and not (name in OUR_WORDS and call.args):
            found.append(f"{at}: {NEVER[name]}")
        elif name == "mkdir" and 0o700 not in numbers_in(call):
            found.append(f"{at} without 0o700")
        elif (owner, name) == ("os", "open") and "O_TMPFILE" in around:
            if 0o600 not in numbers_in(call):
                found.append(f"{at} may create, and without 0o600")
        elif (owner, name) == ("os", "open") and may_create(call, function, around):
            if 0o600 not in numbers_in(call):
                found.append(f"{at} may create, and without 0o600")
            if "O_NOFOLLOW" not in around:
                found.append(f"{at} may create, and through a link")
        elif name == "open" and owner != "os" and writes(call, owner):
            if "devnull" not in around:
                found.append(f"{at}: its mode is 0666 and it follows links")
        elif name == "SharedMemory" and 0o600 not in numbers_in(call):
            found.append(f"{at} without 0o600")
        elif name == "bind" and "fchmod" not in around:
            found.append(f"{at}: a socket's file has the mode of the umask")
        elif (owner, name) == ("sqlite3", "connect") and not (
            "mode=ro" in around or "place.open_file(INDEX_NAME" in around
        ):
            found.append(f"{at}: SQLite makes its file 0644 and follows links")
        elif name in ("chmod", "fchmod") and not numbers_in(call) & {0o600, 0o700}:
            found.append(f"{at} to something that others may use")
    return found


@pytest.mark.parametrize(
    "path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_what_makes_a_name_makes_it_private(path):
    where = str(path.relative_to(PACKAGE))
    assert faults_of(path.read_text(), where) == []


@pytest.mark.parametrize(
    "line",
    [
        "os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)",
        "os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)",
        "os.open(name, os.O_RDWR | os.O_CREAT, 0o600)",
        "os.open(name, os.O_RDWR | os.O_TMPFILE)",
        "os.open(name, os.O_NOFOLLOW | flags, 0o666)",
        "os.mkdir(name)",
        "path.mkdir(parents=True)",
        "os.mkdir(name, 0o777)",
        "os.makedirs(name, 0o700)",
        'open(name, "w")',
        'path.write_text("x")',
        'path.open("ab")',
        'open(name, mode="r+")',
        "posix_ipc.SharedMemory(name, posix_ipc.O_CREAT, size=0)",
        "listener.bind(address)",
        "sqlite3.connect(path)",
        "os.chmod(path, 0o666)",
        "os.mkfifo(path, 0o600)",
        "path.touch()",
    ],
)
def test_it_would_be_found(line):
    assert len(faults_of(f"def make(name):\n    {line}\n", "x.py")) == 1


def test_exceptions_are_still_needed():
    for where, name in EXCEPTIONS:
        source = (PACKAGE / where).read_text()
        names = {name_of(call)[1] for call, _ in calls_in(ast.parse(source))}
        assert name in names, (where, name)


def test_peers_are_asked_who_they_are():
    """Whoever connects to a socket of ours could be anybody: SO_PEERCRED, uid."""
    for path in SOURCES:
        source = path.read_text()
        if ".accept()" in source:
            assert "peer_of(sock).uid" in source, path
