"""``shmoffload clean``: list what dead sessions have left, remove it when told to.

Covers: the verb's options, the list, ``--json``.
Does not cover: what counts as left over (``cli.leftovers``).
Who calls it: ``cli.main``, ``tools/clean.py``; under 0.3 s of CPU without a tier's
path.

A start sweeps the names of the dead by itself; this is for a machine where none
follows, and for namespaces, which no start removes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from shmoffload.cli.leftovers import (
    KEPT,
    Leftover,
    below_tier_path,
    in_runtime_dir,
    in_shared_memory,
)
from shmoffload.cli.options import Parser
from shmoffload.errors import BadInputError
from shmoffload.wire.sizes import format_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def clean_command(argv: Sequence[str]) -> int:
    """List leftovers; with ``--yes`` remove them.

    Returns:
        0 nothing is left, 1 something is: it was only listed, or did not go.

    Raises:
        BadInputError: wrong options, or no such tier path.
        StartError: the runtime directory is not safely ours.
    """
    options = _parse(argv)
    found = [*in_shared_memory(options.session), *in_runtime_dir(options.session)]
    notes: list[str] = []
    if not options.kept:
        notes = [
            f"{piece.path} stays, {format_size(piece.num_bytes)}: it waits for the "
            f"next engine (primary.persist); --kept lists it"
            for piece in found
            if piece.kind == KEPT
        ]
        found = [piece for piece in found if piece.kind != KEPT]
    for path in options.tier_path:
        pieces, sentences = below_tier_path(path, keep=options.keep)
        found += pieces
        notes += sentences
    rows = [_deal_with(piece, is_told=options.yes) for piece in found]
    is_clean = all(row["removed"] for row in rows)
    if options.json:
        print(json.dumps({"clean": is_clean, "found": rows, "notes": notes}, indent=2))
    else:
        print(_render(rows, notes, is_told=options.yes))
    return 0 if is_clean else 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "clean",
        "List what dead sessions have left; never touches a live one.",
        "0 nothing is left, 1 something is, 2 bad input",
    )
    add = parser.add_argument
    add("--yes", action="store_true", help="remove what is listed")
    add("--session", metavar="NAME", help="names of this session only")
    add(
        "--tier-path",
        metavar="DIR",
        action="append",
        default=[],
        help="also old namespaces below a tier's path; can be given again",
    )
    add(
        "--keep",
        metavar="N",
        type=int,
        default=1,
        help="namespaces of a path that stay, the last used first (default 1)",
    )
    add("--kept", action="store_true", help="also regions that primary.persist keeps")
    add("--json", action="store_true", help="for programs")
    options = parser.read(argv)
    if options.keep < 0:
        raise BadInputError(f"--keep {options.keep}: give 0 or more")
    return options


def _deal_with(piece: Leftover, *, is_told: bool) -> dict[str, Any]:
    """Remove one piece if that was asked for; return its row."""
    removed, problem = False, ""
    if is_told:
        try:
            removed = piece.remove()
            problem = "" if removed else "in use by now, or gone"
        except OSError as error:
            problem = error.strerror or str(error)
    return {
        "kind": piece.kind,
        "path": piece.path,
        "bytes": piece.num_bytes,
        "removed": removed,
        "problem": problem,
    }


def _render(rows: list[dict[str, Any]], notes: list[str], *, is_told: bool) -> str:
    lines = []
    for row in rows:
        state = "removed" if row["removed"] else "left over"
        size = f", {format_size(row['bytes'])}" if row["bytes"] else ""
        problem = f": {row['problem']}" if row["problem"] else ""
        lines.append(f"{state:<9}  {row['kind']}  {row['path']}{size}{problem}")
    lines += notes
    if not rows:
        lines.append("Nothing is left over.")
    elif not is_told:
        total = format_size(sum(row["bytes"] for row in rows))
        lines.append(f"{len(rows)} left over, {total}: add --yes to remove them.")
    return "\n".join(lines)
