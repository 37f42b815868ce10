"""Shell completion for hvdrun and hvdkit, written by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from hvdkit.optional_import import optional_import

SHELLS = ("bash", "zsh", "fish")


class PrintCompletion(argparse.Action):
    """Print the completion script of a shell, and exit. Raises MissingDependencyError without shtab."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Print it."""
        print(write_completion(parser, str(values)))
        parser.exit()


def write_completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """Write the completion script: options with their choices, and files elsewhere."""
    shtab = optional_import("shtab", "completion")
    _mark(parser, {"FILE": shtab.FILE, "SCRIPT": shtab.FILE, "DIR": shtab.DIRECTORY})
    return str(shtab.complete(parser, shell=shell))


def _mark(parser: argparse.ArgumentParser, files: Mapping[str, Any]) -> None:
    """Tell shtab which options take files, and show it the commands that the parser lists in its help by itself.

    files: by the option's metavar.
    """
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            action.help = "command"
            listed = {each.dest for each in action._choices_actions}
            for name, command in action.choices.items():
                _mark(command, files)
                if name not in listed:
                    action._choices_actions.append(argparse.Action((), name, help=command.description or name))
        elif action.metavar in files:
            action.complete = files[str(action.metavar)]  # type: ignore[attr-defined]
