"""Options of the verbs that have to start in a moment.

Covers: a parser whose refusals are our errors, ``did you mean``.
Does not cover: verbs whose options typer reads (``cli``).
Who calls it: ``cli.status``, ``doctor``, ``clean``, ``verify``. Importing typer costs
more than all their work.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, NoReturn

from shmoffload.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Parser(argparse.ArgumentParser):
    """A parser of one verb; wrong words are a ``BadInputError``."""

    def __init__(self, verb: str, description: str, exit_codes: str) -> None:
        """Name the verb, say what it does and what its exit codes mean."""
        super().__init__(
            prog=f"shmoffload {verb}",
            description=description,
            epilog=f"Exit code: {exit_codes}.",
            allow_abbrev=False,
        )

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the options.

        Raises:
            BadInputError: an unknown option, with the nearest that exists.
        """
        options, unknown = self.parse_known_args(argv)
        if unknown:
            from difflib import get_close_matches

            actions = [action for action in self._actions if action.option_strings]
            words = [action.option_strings[-1] for action in actions]
            near = get_close_matches(unknown[0], words, n=1)
            known = ", ".join(
                f"{word} {action.metavar}" if action.metavar else word
                for word, action in zip(words, actions, strict=True)
                if word != "--help"
            )
            hint = f"did you mean {near[0]}?" if near else f"known: {known}"
            raise BadInputError(f"unknown option {unknown[0]}: {hint}")
        return options

    def error(self, message: str) -> NoReturn:
        """See ``argparse``."""
        raise BadInputError(f"{message}: see `{self.prog} --help`")
