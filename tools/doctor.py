"""``shmoffload doctor`` from a checkout that is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shmoffload.cli import main

if __name__ == "__main__":
    main(["doctor", *sys.argv[1:]])
