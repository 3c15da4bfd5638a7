"""The command line: ``shmoffload VERB``.

Covers: choosing the verb, turning every expected failure into one sentence on
stderr and an exit code.
Does not cover: what verbs do (``cli.status``, ``serve``, ``replay``, ``demo``, ...).
Who calls it: a person or a unit file; the main thread of its own process.

Exit codes: 0 done, 1 failed or degraded, 2 bad input, 3 no session, 130 Ctrl-C.
Verbs are imported when they are called, so that ``status`` stays cheap.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import shmoffload
from shmoffload.errors import BadInputError, ShmoffloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class _Verb(NamedTuple):
    module: str
    function: str
    help: str


_TYPER_VERBS: Final = {
    "serve": _Verb(
        "shmoffload.cli.serve", "serve_command", "Run the supervisor as a daemon."
    ),
    "replay": _Verb(
        "shmoffload.cli.replay", "replay_command", "Replay a request trace."
    ),
    "stats": _Verb("shmoffload.cli.stats", "stats_command", "Look at a request trace."),
    "sweep": _Verb(
        "shmoffload.cli.sweep", "sweep_command", "Plot hit rate against capacity."
    ),
    "convert": _Verb(
        "shmoffload.cli.convert", "convert_command", "Convert a request trace."
    ),
    "demo": _Verb(
        "shmoffload.cli.demo", "demo_command", "Show it at work in 20 seconds."
    ),
}
_LIGHT_VERBS: Final = {
    "status": _Verb(
        "shmoffload.cli.status", "status_command", "Look at a live session, read-only."
    ),
    "doctor": _Verb(
        "shmoffload.cli.doctor", "doctor_command", "See whether it can work here."
    ),
    "clean": _Verb(
        "shmoffload.cli.clean", "clean_command", "Remove what dead sessions left."
    ),
    "verify": _Verb(
        "shmoffload.cli.verify", "verify_command", "Compare a disk tier's checksums."
    ),
}
"""They read their own options: typer costs more than all their work."""
_HELP: Final = {
    **{name: verb.help for name, verb in (_TYPER_VERBS | _LIGHT_VERBS).items()},
    "version": "Print the version.",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one verb and exit; never returns, never shows an expected traceback.

    Raises:
        SystemExit: always, with the exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _open_missing_streams()
    try:
        code = _dispatch(words)
        sys.stdout.flush()
    except ShmoffloadError as error:
        print(f"shmoffload: {_one_line(error)}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader (head, less) has left. What is still buffered must not raise
        # again when the interpreter flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 128 + signal.SIGPIPE
    except OSError as error:
        # What verbs meet in the world has a sentence by now: this is the output.
        print(f"shmoffload: the output cannot be written: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 1
    raise SystemExit(code)


def _open_missing_streams() -> None:
    """Stand in for closed standard streams: whatever is said then goes nowhere."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (to the end)


def _dispatch(words: list[str]) -> int:
    verb, rest = (words[0], words[1:]) if words else ("--help", [])
    if verb in ("-h", "--help", "help"):
        print(_overview())
        return 0 if words else 2
    if verb in ("version", "--version"):
        print(shmoffload.__version__)
        return 0
    if verb in _LIGHT_VERBS:
        module, function, _ = _LIGHT_VERBS[verb]
        light: Callable[[list[str]], int] = getattr(
            importlib.import_module(module), function
        )
        return light(rest)
    if verb not in _TYPER_VERBS:
        raise BadInputError(f"unknown verb {verb}: {_did_you_mean(verb)}")
    return _run_typer(verb, rest)


def _run_typer(verb: str, words: list[str]) -> int:
    """Run a verb whose options typer reads."""
    import typer
    from typer.exceptions import TyperException

    module, function, help_text = _TYPER_VERBS[verb]
    command: Callable[..., Any] = getattr(importlib.import_module(module), function)
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        help=help_text,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command()(command)
    try:
        result = app(words, prog_name=f"shmoffload {verb}", standalone_mode=False)
    except TyperException as error:
        raise BadInputError(
            f"{_one_line(error.format_message()).rstrip('.')}: "
            f"see `shmoffload {verb} --help`"
        ) from error
    except typer.Abort:
        return 128 + signal.SIGINT
    return result if isinstance(result, int) else 0


def _overview() -> str:
    width = max(map(len, _HELP))
    lines = [f"  {name:<{width}}  {text}" for name, text in _HELP.items()]
    return "\n".join(
        [
            "Usage: shmoffload VERB [OPTIONS]",
            "",
            "Out-of-process, multi-tier KV-cache offloading for LLM inference servers.",
            "",
            *lines,
            "",
            "`shmoffload VERB --help` tells the options of a verb.",
        ]
    )


def _did_you_mean(verb: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(verb, _HELP, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(_HELP)}"


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
