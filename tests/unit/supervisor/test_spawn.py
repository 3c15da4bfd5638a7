"""What a child of ours can import, wherever it is started from."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import shmoffload
from shmoffload.errors import StartError
from shmoffload.supervisor import spawn
from shmoffload.wire.config import from_dict

PACKAGE = Path(shmoffload.__file__).parent
# The child of a child: prints where the package came from.
CHILD = (
    "import subprocess, sys\n"
    "{path}"
    "from shmoffload.supervisor import spawn\n"
    "command = spawn.python_command('shmoffload.supervisor')\n"
    "command[2:] = ['-c', 'import shmoffload; print(shmoffload.__file__)']\n"
    "subprocess.run(command, env=spawn.child_env(), check=True)\n"
)


def package_of_child(*, cwd, path=""):
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if not path:
        env["PYTHONPATH"] = str(PACKAGE.parent)
    run = subprocess.run(
        [sys.executable, "-P", "-c", CHILD.format(path=path)],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return Path(run.stdout.strip()).parent


def test_folder_of_our_name_in_the_working_directory_is_not_imported(tmp_path):
    (tmp_path / "shmoffload").mkdir()
    (tmp_path / "shmoffload" / "__init__.py").write_text("raise SystemExit('decoy')")
    assert package_of_child(cwd=tmp_path) == PACKAGE


def test_checkout_found_through_sys_path_is_imported_by_children_too(tmp_path):
    copy = tmp_path / "checkout" / "shmoffload"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, copy, ignore=ignore)
    path = f"sys.path.insert(0, {str(copy.parent)!r})\n"
    assert package_of_child(cwd=tmp_path, path=path) == copy


def test_package_in_site_packages_needs_no_variable(monkeypatch):
    root = str(PACKAGE.resolve().parent)
    monkeypatch.setattr(spawn.site, "getsitepackages", lambda: [root])
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert spawn.child_env()["PYTHONPATH"] == "/mine"
    monkeypatch.setattr(spawn.site, "getsitepackages", list)
    assert spawn.child_env()["PYTHONPATH"] == f"/mine:{root}"


def test_failure_to_start_is_a_sentence_and_leaks_nothing(monkeypatch):
    def refuse(*_, **__):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(spawn.subprocess, "Popen", refuse)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(StartError, match="Resource temporarily unavailable"):
        spawn.spawn_embedded(from_dict({"primary": {"block_bytes": 1, "slots": 1}}))
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_daemon_that_does_not_answer_is_no_missing_daemon(
    tmp_path, monkeypatch, session_name
):
    """A second supervisor beside it would write the same page."""
    monkeypatch.setenv("SHMOFFLOAD_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    assert spawn.connect_daemon(session_name) is None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.bind(str(tmp_path / f"{session_name}.sock"))
        assert spawn.connect_daemon(session_name) is None  # nobody listens
        deaf.listen(0)
        waiting = spawn.connect_daemon(session_name)  # fills the backlog
        with pytest.raises(StartError, match="does not answer"):
            spawn.connect_daemon(session_name)
        waiting.close()
