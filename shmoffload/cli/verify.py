"""``shmoffload verify``: read every block of a disk tier and compare checksums.

Covers: the verb's options, the locks, the report, ``--json``.
Does not cover: reading and repairing (``worker.scrub``).
Who calls it: ``cli.main``, ``tools/verify.py``; reads as long as the disk takes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from shmoffload.cli.options import Parser
from shmoffload.errors import BadInputError, TierError
from shmoffload.wire.sizes import format_size
from shmoffload.worker.namespaces import folders
from shmoffload.worker.scrub import Findings, scrub

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shmoffload.worker.namespaces import Folder


def verify_command(argv: Sequence[str]) -> int:
    """Scrub every namespace below a tier's path, or one.

    Returns:
        0 every block is right, 1 some are not, also if they were put aside.

    Raises:
        BadInputError: wrong options, no tier's directory, or a worker serves it:
            nothing was read.
        TierError: the system refused midway.
    """
    parser = Parser(
        "verify",
        "Read every block of a slab or fs tier: header, key, length, checksum.",
        "0 all right, 1 bad blocks, 2 bad input, or a worker serves the directory",
    )
    parser.add_argument("path", metavar="DIR", help="a tier's path, or one namespace")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="put bad blocks aside: fs moves them into quarantine/, slab forgets them",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.read(argv)
    with folders(options.path) as opened:
        _claim(options.path, opened)
        try:
            found = [
                findings
                for folder in opened
                for findings in scrub(folder, repair=options.repair)
            ]
        except OSError as error:
            raise TierError(
                f"{options.path} cannot be read on ({error}): see the disk, then "
                f"verify again"
            ) from error
    print(
        json.dumps(_to_json(found), indent=2)
        if options.json
        else _render(found, is_repair=options.repair)
    )
    return 1 if any(findings.num_bad for findings in found) else 0


def _claim(path: str, opened: list[Folder]) -> None:
    """Lock every directory before the first is read.

    Raises:
        BadInputError: there is none, or a worker has one.
    """
    if not opened:
        raise BadInputError(
            f"{path} has no namespace of a tier in it: give the path of a slab or fs "
            f"tier of this user"
        )
    for folder in opened:
        if not folder.try_lock():
            raise BadInputError(
                f"{folder.path} is served by process {folder.holder()}: end its "
                f"session, or verify another namespace by its own directory"
            )


def _to_json(found: list[Findings]) -> dict[str, Any]:
    return {
        "ok": not any(findings.num_bad for findings in found),
        "directories": [
            {
                "path": findings.path,
                "type": findings.kind,
                "blocks": findings.num_blocks,
                "bytes": findings.num_bytes,
                "bad_blocks": findings.num_bad,
                "bad_by_reason": dict(findings.bad),
                "repaired": findings.num_repaired,
                "strangers": findings.num_strangers,
                "first_bad": [
                    {"block": block, "reason": reason}
                    for block, reason in findings.listed
                ],
                "notes": findings.notes,
            }
            for findings in found
        ],
    }


def _render(found: list[Findings], *, is_repair: bool) -> str:
    lines = []
    for findings in found:
        reasons = ", ".join(f"{n} {why}" for why, n in findings.bad.most_common())
        lines.append(
            f"{findings.path} ({findings.kind}): {findings.num_blocks} blocks, "
            f"{format_size(findings.num_bytes)} read, {findings.num_bad} bad"
            + (f" ({reasons})" if reasons else "")
            + (f", {findings.num_repaired} put aside" if is_repair else "")
        )
        lines += [f"  bad  {block}  {reason}" for block, reason in findings.listed]
        if findings.num_bad > len(findings.listed):
            lines.append(f"  and {findings.num_bad - len(findings.listed)} more")
        lines += [f"  {note}" for note in findings.notes]
    num_bad = sum(findings.num_bad for findings in found)
    if num_bad and not is_repair:
        lines.append(f"{num_bad} bad: misses, never data. Add --repair to put aside.")
    return "\n".join(lines)
