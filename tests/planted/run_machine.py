"""Run one state machine quickly, without shrinking: does it find what is planted?

Usage: python run_machine.py FOLDER_OF_MACHINES MODULE.CLASS
The package under test is whatever PYTHONPATH says. Same inputs every time.
"""

import importlib
import sys

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

QUICK = settings(
    max_examples=600,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def main(folder, name):
    sys.path.insert(0, folder)
    module, _, machine = name.rpartition(".")
    run_state_machine_as_test(
        getattr(importlib.import_module(module), machine), settings=QUICK
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
