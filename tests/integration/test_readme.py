"""The README's example runs as it stands there."""

import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_example_runs_and_prints_what_it_says(session_name, tmp_path):
    text = README.read_text()
    block = text.split("<!-- example: begin -->")[1].split("<!-- example: end -->")[0]
    code = block.strip().removeprefix("```python").removesuffix("```")
    assert len(code.strip().splitlines()) <= 30
    for said, mine in (
        ('"readme"', f'"{session_name}"'),
        ("/tmp/shmoffload-readme", str(tmp_path)),
    ):
        assert said in code
        code = code.replace(said, mine)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["LookupResult.HIT", "b'kkkk'"]
