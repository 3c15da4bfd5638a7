"""The executor's kit is shared with the tests of workers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "worker"))
