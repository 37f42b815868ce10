"""Fails the build for options that do not exist any more, in the command lines of the pages."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any

from sphinx.util import logging

from hvdkit.cli import build_parser as build_tools_parser
from hvdkit.launch.cli.options import build_parser as build_hvdrun_parser

_LOG = logging.getLogger(__name__)
_COMMAND = re.compile(r"(?:^|[\s`(])(hvdrun|hvdkit [a-z][a-z-]*)((?:\s+[^\s`|]+)*)")


def known_options() -> dict[str, set[str]]:
    """Command -> its options; those of subcommands count as the command's."""
    options = {"hvdrun": set(build_hvdrun_parser(everything=True)._option_string_actions)}
    parser = build_tools_parser()
    for name, command in parser.commands.choices.items():
        if isinstance(command, argparse.ArgumentParser):
            options[f"hvdkit {name}"] = set(_options_of(command))
    return options


def _options_of(command: argparse.ArgumentParser) -> Iterator[str]:
    yield from command._option_string_actions
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _options_of(inner)


def unknown_options(text: str, known: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    """Find (command, option) of the command lines in a page whose option the command does not have.

    What follows a program, a script or `--` belongs to that. Commands of hvdkit may pass options on to another one.
    """
    anything = set().union(*known.values())
    for match in _COMMAND.finditer(text):
        command, rest = match[1], match[2].splitlines()[0] if match[2].strip() else ""
        options = known.get(command)
        if options is None:
            continue
        for word in rest.split():
            if word == "--" or re.search(r"(^python|\.py$|\.sh$|^-m$)", word):
                break
            flag = re.match(r"--[a-z][a-z-]+", word.strip("`,;:().'\""))
            if flag and flag[0] not in (options if command == "hvdrun" else anything):
                yield command, flag[0]


def check_source(app: Any, page: str, source: list[str]) -> None:
    """Warn of each unknown option of a page; `sphinx-build -W` makes that an error."""
    if page.startswith(("reference/api", "_generated")):
        return
    for command, option in unknown_options(source[0], app.hvdkit_options):
        _LOG.warning("%s has no option %s", command, option, location=page)


def setup(app: Any) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    app.hvdkit_options = known_options()
    app.connect("source-read", check_source)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
