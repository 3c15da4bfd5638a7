"""``shmoffload convert``: another project's request trace -> the compact form.

Covers: the verb's options, the closing sentence.
Does not cover: formats (``replay.convert``), printing of errors (``cli``).
Who calls it: ``cli.main``; a person or a script through it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path  # noqa: TC003  (typer reads it)
from typing import Annotated

import typer

from shmoffload.errors import BadInputError
from shmoffload.replay.convert import FORMATS, read_source
from shmoffload.replay.convert.compact import write_compact
from shmoffload.replay.convert.sessions import Playback


def convert_command(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A trace file or directory.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Like my.ptrace.zst.")],
    format_name: Annotated[
        str, typer.Option("--format", help=f"auto, {', '.join(FORMATS)}.")
    ] = "auto",
    users: Annotated[
        int, typer.Option(help="Users that play sessions without a common clock.")
    ] = 32,
    seed: Annotated[int, typer.Option(help="Of their order and pauses.")] = 7,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Convert a trace of Mooncake, Qwen-Bailian, kv-cache-tester or LMCache.

    Exit code 0: written; 2: not such a trace, or OUT cannot be written.
    """
    if users < 1:
        raise BadInputError(f"--users {users}: give 1 or more")
    if os.path.exists(out) and not force:  # not Path's: it may raise
        raise BadInputError(f"{out} exists: give another OUT, or add --force")
    trace = read_source(source, format_name=format_name, playback=Playback(users, seed))
    written = write_compact(trace, out)
    if as_json:
        print(json.dumps(dataclasses.asdict(written), indent=2))
    else:
        print(
            f"{out}: {written.num_requests} requests over {written.span_s:g} s, "
            f"{written.num_blocks} distinct blocks of {written.block_tokens} tokens, "
            f"{written.num_bytes} bytes"
        )
