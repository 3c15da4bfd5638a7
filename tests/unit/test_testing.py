"""The test kit tests itself: what waits ends, what is left is found."""

import subprocess
import sys

import pytest

from shmoffload.testing import leaks
from shmoffload.testing.poll import wait_until

NAP = "import sys; print('up', flush=True); sys.stdin.readline()"


def started(*argv, **options):
    """A process that waits for its stdin; it is up when this returns."""
    process = subprocess.Popen(
        [*argv, sys.executable, "-c", NAP, "-m shmoffload.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        **options,
    )
    assert process.stdout.readline() == b"up\n"
    return process


def test_wait_until_returns_the_answer():
    answers = iter([0, "", "done"])
    assert wait_until(lambda: next(answers), timeout_s=10.0, what="x") == "done"


def test_wait_until_names_what_did_not_come():
    with pytest.raises(AssertionError, match=r"0.02 s in vain for peace; .*: \[\]"):
        wait_until(list, timeout_s=0.02, what="peace")


def test_names_of_this_run_are_found_and_removed(session_name):
    before = leaks.find_leftovers()
    path = leaks.SHM_DIR / f"shmoffload.{session_name}.page"
    path.touch()
    found = leaks.find_leftovers().since(before)
    assert found.names == {path.name}
    found.remove()
    assert not path.exists()


def test_names_of_other_runs_are_none_of_ours():
    path = leaks.SHM_DIR / "shmoffload.t0-1.page"
    path.touch()
    assert path.name not in leaks.find_leftovers().names
    assert path.name in leaks.find_leftovers(unmarked_too=True).names
    path.unlink(missing_ok=True)


def test_child_is_found_and_killed():
    before = leaks.find_leftovers()
    with started() as process:
        found = leaks.find_leftovers().since(before)
        assert set(found.processes) == {process.pid}
        found.remove()
        assert process.wait(30.0) == -9
    assert not leaks.find_leftovers().since(before)


def test_process_that_left_our_tree_is_found_by_its_environment():
    before = leaks.find_leftovers()
    with started("sh", "-c", 'exec 3<&0; "$0" "$@" <&3 & exit 0') as shell:
        assert shell.wait(30.0) == 0
        found = wait_until(
            lambda: leaks.find_leftovers().since(before), timeout_s=30.0, what="it"
        )
        assert shell.pid not in found.processes
        found.remove()
        wait_until(
            lambda: not leaks.find_leftovers().since(before),
            timeout_s=30.0,
            what="its end",
        )


def test_later_processes_of_an_earlier_session_are_spared(session_name):
    known = leaks.Leftovers(frozenset({f"shmoffload.{session_name}.page"}), {})
    now = leaks.Leftovers(
        known.names | {f"shmoffload.{session_name}.own"},
        {1: f"shmoffload: {session_name} slab"},
    )
    assert not now.since(known)
    assert now.since(leaks.Leftovers(frozenset(), {}))
