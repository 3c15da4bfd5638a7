"""A live replay under random faults of every kind; see ``shmoffload.testing.soak``.

Covers: options, progress, the report's file, exit status 0 green, 1 not, 2 bad input.
Does not cover: the run and its verdict.
Who calls it: ``make soak MINUTES=10 [SEED=n]``; a person.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shmoffload.errors import BadInputError, ShmoffloadError
from shmoffload.testing.soak.driver import run_soak
from shmoffload.testing.soak.settings import SoakSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shmoffload.testing.soak.report import SoakReport


def main() -> int:
    """Run one soak; return the exit status."""
    options = _options()
    out = Path(
        options.out or f"{tempfile.gettempdir()}/shmoffload-soak-{options.seed}.json"
    )
    log = out.with_suffix(".log")
    print(f"repeat with: make soak MINUTES={options.minutes:g} SEED={options.seed}")
    try:
        with tempfile.TemporaryDirectory(prefix="shmoffload-soak-") as folder:
            settings = SoakSettings(
                minutes=options.minutes,
                seed=options.seed,
                session=f"soak-{os.getpid()}",
                folder=Path(folder),
                kinds=tuple(options.kind),
                min_faults=options.min_faults,
            )
            settings.check()
            with _words_to(log):
                report = run_soak(settings, on_piece=_show)
        out.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    except KeyboardInterrupt:
        print("soak: interrupted: no report", file=sys.stderr)
        return 130
    except (ShmoffloadError, OSError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2 if isinstance(error, BadInputError) else 1
    print(report.summary())
    print(f"report: {out}   what workers and supervisors said: {log}")
    return 1 if report.reasons() else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--seed",
        type=int,
        default=int(time.time()),
        help="of the requests and the order of faults; the time by default",
    )
    parser.add_argument("--out", default="", help="file of the JSON report")
    parser.add_argument(
        "--kind",
        action="append",
        default=[],
        help="only this kind of fault, like 'worker SIGKILL'; repeatable",
    )
    parser.add_argument(
        "--min-faults", type=int, default=1, help="fewer at open jobs are not green"
    )
    return parser.parse_args()


def _show(report: SoakReport) -> None:
    half = report.quiet.pieces + report.faulty.pieces
    print(
        f"{half} pieces, {report.num_faults} faults at open jobs, "
        f"{report.wrong_bytes} wrong, {len(report.problems)} problems",
        flush=True,
    )


@contextlib.contextmanager
def _words_to(log: Path) -> Iterator[None]:
    """Send standard error, which all processes share, to a file meanwhile."""
    sys.stderr.flush()
    ours = os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(ours, 2)
        os.close(ours)


if __name__ == "__main__":
    sys.exit(main())
