"""The command `hvdkit`, which has the subcommands that do not start a job."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

from hvdkit import __version__
from hvdkit.entry_points import describe_error, describe_missing
from hvdkit.errors import HvdkitError
from hvdkit.launch.cli.console import run_command
from hvdkit.launch.cli.parser import SHELLS, PrintCompletion
from hvdkit.suggestion import did_you_mean

#: The entry points by which other packages add commands. Each is an `add_command(commands)`, as in our modules.
ENTRY_POINTS = "hvdkit.commands"

# Title of a group in the help -> its commands -> their modules, which are imported when they are needed.
_GROUPS = {
    "running jobs": {
        "jobs": "hvdkit.tools.jobs",
        "stacks": "hvdkit.tools.jobs",
        "stop": "hvdkit.tools.jobs",
    },
    "batch systems and hosts": {
        "submit": "hvdkit.tools.submit.command",
        "hosts": "hvdkit.tools.hosts",
    },
    "diagnosis and performance": {
        "doctor": "hvdkit.tools.doctor.command",
        "compare": "hvdkit.tools.compare.command",
        "profile": "hvdkit.tools.profile.command",
        "bench": "hvdkit.tools.bench.command",
    },
    "installation and scripts": {
        "examples": "hvdkit.tools.examples",
        "docs": "hvdkit.tools.docs",
    },
}
_MODULES = {name: module for group in _GROUPS.values() for name, module in group.items()}

#: Commands of the packages in packages/ -> the folder there; the distribution is hvdkit-FOLDER.
_PACKAGES = {"migrate": "migrate", "plan": "planner", "build-horovod": "horovod"}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, `PROG: MESSAGE. See PROG --help.`, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        """End with exit code 2; for missing arguments with their choices and the first example of the help."""
        if message.startswith("the following arguments are required"):
            message += "".join(
                f". {action.metavar} is one of {', '.join(action.choices)}"
                for action in self._actions
                if action.choices and not action.option_strings and not isinstance(action, argparse._SubParsersAction)
            )
            example = re.search(r"^examples:\n +(\S+(?: \S+)*)", self.epilog or "", re.MULTILINE)
            message += f". Example: {example[1]}" if example else ""
        stop = "" if message.endswith("?") else "."
        self.exit(2, f"{self.prog}: {message.rstrip('.')}{stop} See {self.prog} --help.\n")


class _Commands(argparse._SubParsersAction):  # type: ignore[type-arg]
    """Holds the subcommands and the one-line help of each."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.summaries: dict[str, str] = {}

    def add_parser(self, name: str, *, help: str | None = None, **options: Any) -> Any:
        """Add a subcommand."""
        self.summaries[name] = help or ""
        defaults = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        return super().add_parser(name, **{**defaults, **options})


class TopParser(Parser):
    """hvdkit's own parser: its help lists the commands in groups."""

    commands: _Commands

    def format_help(self) -> str:
        """Write the help, with the groups after the options."""
        summaries = self.commands.summaries
        groups = [(title, list(modules)) for title, modules in _GROUPS.items()]
        groups.append(("from other packages", [name for name in summaries if name not in _MODULES]))
        width = max(map(len, summaries), default=0)
        lines = [super().format_help()]
        for title, names in groups:
            rows = [f"  {name:{width}}  {summaries[name]}\n" for name in names if name in summaries]
            lines += [f"\n{title}:\n", *rows] if rows else []
        closing = "hvdkit COMMAND --help shows the options of a command. Documentation: hvdkit docs"
        return "".join([*lines, f"\n{closing}\n"])


def build_parser(names: Iterable[str] | None = None) -> TopParser:
    """Build the parser; each subcommand stores the function that carries it out as `run`.

    `run` returns the exit code, or None for 0.
    names: the commands to load; None for all. With None, a command whose package cannot be loaded is listed with the
    reason.
    """
    parser = TopParser(
        prog="hvdkit",
        usage="hvdkit [-h] [--version] [--print-completion SHELL] COMMAND ...",
        description="Tools for training on many ranks. hvdrun starts jobs: see hvdrun --help.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hvdkit {__version__}")
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        metavar=f"{{{','.join(SHELLS)}}}",
        help="print the completion script for a shell and exit",
    )
    commands = parser.add_subparsers(
        action=_Commands, parser_class=Parser, prog="hvdkit", dest="name", metavar="COMMAND", help=argparse.SUPPRESS
    )
    assert isinstance(commands, _Commands)
    parser.commands = commands
    external = _find_external()
    for name in (*_MODULES, *external) if names is None else names:
        _add(name, external, parser.commands, required=names is not None)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the hvdkit command; returns the exit code, 0 for a command that gives none."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    name = words[0] if words and not words[0].startswith("-") else None
    return run_command("hvdkit" if name is None else f"hvdkit {name}", lambda: _run(name, words))


def _run(name: str | None, words: Sequence[str]) -> int:
    if name is not None:
        check_name(name, {*_MODULES, *_find_external()})
    elif not words:
        raise HvdkitError("no command was given. See hvdkit --help.")
    parser = build_parser(None if name is None else [name])
    options, unknown = parser.parse_known_args(words)
    command = parser.commands.choices.get(name or "", parser)
    if unknown:
        flags = [flag for flag in command._option_string_actions if flag.startswith("--")]
        hint = did_you_mean(unknown[0].partition("=")[0], flags)
        command.error(f"unknown argument{'s' * (len(unknown) > 1)} {' '.join(unknown)}{'.' * bool(hint)}{hint}")
    return int(options.run(options) or 0)


def check_name(name: str, names: Iterable[str]) -> None:
    """Raise HvdkitError for a command that does not exist, with the cure."""
    names = sorted(names)
    if name in names:
        return
    if name in _PACKAGES:
        raise HvdkitError(describe_missing("this command", _PACKAGES[name]))
    if name == "completion":
        raise HvdkitError(f"write: hvdkit --print-completion {{{','.join(SHELLS)}}}. See hvdkit --help.")
    hint = did_you_mean(name, [*names, *_PACKAGES], 0.6) or f" The commands are {', '.join(names)}."
    raise HvdkitError(f"there is no such command.{hint} See hvdkit --help.")


def _find_external() -> dict[str, EntryPoint]:
    """Return the commands of other packages by name; ours cannot be replaced."""
    return {each.name: each for each in entry_points(group=ENTRY_POINTS) if each.name not in _MODULES}


def _add(name: str, external: Mapping[str, EntryPoint], commands: _Commands, *, required: bool) -> None:
    """Add a command to the parser.

    required: if the package that has the command cannot be loaded, True raises HvdkitError, and False shows the problem
    as the command's help.
    """
    if name in commands.choices:
        return  # its module was loaded for another command and has added this one too
    if name in _MODULES:
        import_module(_MODULES[name]).add_command(commands)
        return
    entry = external[name]
    try:
        entry.load()(commands)
    except (Exception, SystemExit) as error:  # whatever a package raises at its import
        package = entry.dist.name if entry.dist is not None else entry.value
        problem = f"the package {package} cannot be loaded: {describe_error(error)}"
        if required:
            raise HvdkitError(f"{problem}. Update or remove this package.") from error
        commands.summaries[name] = problem
