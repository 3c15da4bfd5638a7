"""``shmoffload serve``: run the supervisor as a daemon, in the foreground.

Covers: the verb's options.
Does not cover: the daemon (``supervisor.daemon``), printing of errors (``cli``).
Who calls it: ``cli.main``; systemd or a person through it.
"""

from __future__ import annotations

import logging
from pathlib import Path  # noqa: TC003  (typer reads it)
from typing import Annotated

import msgspec
import typer

from shmoffload.supervisor.daemon import serve
from shmoffload.wire import config as config_
from shmoffload.worker.registry import check_tier_types


def serve_command(
    config: Annotated[
        Path, typer.Option("--config", "-c", help="TOML file: session, tiers, limits.")
    ],
    session: Annotated[
        str | None, typer.Option(help="Overrides session.name of the file.")
    ] = None,
) -> None:
    """Start and watch the tiers' workers for engines that come and go.

    Stays in the foreground; SIGTERM or Ctrl-C ends it in order.
    """
    checked = config_.load(config, tiers_only=True)
    if session is not None:
        named = msgspec.structs.replace(checked.session, name=session)
        replaced = msgspec.structs.replace(checked, session=named)
        checked = config_.decode(config_.encode(replaced))  # checks the new name
    check_tier_types(checked)
    logging.basicConfig(level=logging.INFO, format="shmoffload serve: %(message)s")
    raise typer.Exit(serve(checked))
