"""Runs seeds of the scheduler loop and prints what they showed.

Covers: seeds, resets of running requests or not, groups, one line a seed or JSON.
Does not cover: the loop (``tests/with_vllm``); a pass mark (the tests there have it).
Who calls it: a person, ``tools/vllm_loop.py --seeds 0-99 --resets all``, with the
Python of ``.venv-vllm`` (tools/vllm_env.sh). The exit status is 1 if one seed read
a wrong byte, said a wrong text, or met an exception of ours.

``--resets none``: of the prefix cache and of our cache, while requests run on.
``--resets all``: half of them with ``reset_running_requests`` as well.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests" / "with_vllm"


def main() -> int:
    """Run the seeds; see the module."""
    words = _arguments()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.path.insert(0, str(TESTS))
    import_module("shmoffload.testing.leaks").mark_environment()
    kit, options = import_module("loop_kit"), import_module("sched_options")
    first, _, last = words.seeds.partition("-")
    reports: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="vllm-loop-") as folder:
        running = kit.seeds(
            Path(folder),
            first=int(first),
            num_requests=words.requests,
            is_reset_running=words.resets == "all",
            is_grouped=words.groups,
        )
        for report in running:
            reports.append(report)
            _show(report, is_json=words.json)
            if report.options.seed >= int(last or first):
                break
    sums = dict(sorted(options.total(reports).items()))
    print(json.dumps({"total": sums}) if words.json else _line(sums))
    return 0 if all(report.is_good for report in reports) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="0-9", help="FIRST-LAST or one seed")
    parser.add_argument("--resets", choices=["none", "all"], default="none")
    parser.add_argument("--groups", action="store_true", help="three KV groups (F52)")
    parser.add_argument("--requests", type=int, default=80, help="of each seed")
    parser.add_argument("--json", action="store_true", help="one JSON object a seed")
    return parser.parse_args()


def _show(report: Any, *, is_json: bool) -> None:  # noqa: ANN401
    if is_json:
        print(json.dumps(report.as_dict()), flush=True)
        return
    numbers = {
        name.removeprefix("num_"): value
        for name, value in vars(report).items()
        if name.startswith("num_") and value
    }
    word = "ok " if report.is_good else "BAD"
    print(
        f"{word} seed {report.options.seed} {report.seconds} s {_line(numbers)} "
        f"hits {report.hits} {'' if report.has_ended else 'ended early '}"
        f"{' '.join(report.vllm_faults)}",
        flush=True,
    )
    if not report.is_good:
        print(report.options)
        for line in (*report.our_faults, *report.details):
            print("  ", line)


def _line(numbers: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in numbers.items())


if __name__ == "__main__":
    sys.exit(main())
