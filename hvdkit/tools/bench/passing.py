"""hvdrun's options, taken by a command that starts ranks itself and passes them on."""

from __future__ import annotations

import argparse
from typing import Any

from hvdkit.launch.cli import build_parser

_TOLD = {"-np", "-H", "--hostfile", "--network-interfaces", "--verbose"}  # in the help of the command as well
_NOT_PASSED = {"-h", "--help", "-v", "--version", "--dry-run", "--wrap", "--alias-horovod"}


def add_hvdruns_options(parser: argparse.ArgumentParser) -> None:
    """Let the parser take all that hvdrun takes, as it was typed, in `hvdrun`."""
    group = parser.add_argument_group("starting the ranks", "All options of hvdrun are taken: see hvdrun --help.")
    for action in build_parser()._actions:
        flags = [flag for flag in action.option_strings if flag not in _NOT_PASSED]
        if flags and not flags[0].startswith("--wrap"):
            told = action.help if _TOLD.intersection(flags) else argparse.SUPPRESS
            group.add_argument(
                *flags, action=_Pass, nargs=action.nargs, metavar=action.metavar, help=told, dest="hvdrun"
            )
    parser.set_defaults(hvdrun=[])


class _Pass(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        flag = str(option_string)
        given = [flag] if not isinstance(values, str) else [f"{flag}={values}"]
        if isinstance(values, str) and not flag.startswith("--"):
            given = [flag, values]
        namespace.hvdrun = [*namespace.hvdrun, *given]
