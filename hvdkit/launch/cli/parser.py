"""A parser of options before a command, with a short and a long help, suggestions for typos, and completion."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from hvdkit.entry_points import describe_missing
from hvdkit.errors import HvdkitError
from hvdkit.optional_import import optional_import
from hvdkit.package_settings import check_settings, find_package_settings
from hvdkit.suggestion import did_you_mean

# -np4 and -n4, as mpiexec writes them.
_JOINED_RANKS = re.compile(r"(-np|-n)(\d+|gpu|auto)")


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Prints an option's names once, and its value after the last of them."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        names = ", ".join(action.option_strings)
        return f"{names} {self._format_args(action, action.dest.upper())}"


#: Adds an option to a group, see OptionParser.add.
Add = Callable[..., argparse.Action]


class OptionParser(argparse.ArgumentParser):
    """Parses options; the words after them are the command of the ranks.

    everything: the help has all options; otherwise only those with a brief text.
    """

    def __init__(self, prog: str, *, everything: bool, **options: Any) -> None:
        self.everything = everything
        #: Beginning of the names of options -> the folder in packages/ of the package that is not installed.
        self.missing: dict[str, str] = {}
        super().__init__(prog=prog, formatter_class=Formatter, allow_abbrev=False, add_help=False, **options)

    def add_group(self, title: str, description: str | None = None) -> tuple[argparse._ArgumentGroup, Add]:
        """Add a group to the help; returns it, and `add` for its options."""
        group = self.add_argument_group(title, description)
        return group, functools.partial(self.add, group)

    def add(
        self,
        group: argparse._ActionsContainer,
        *flags: str,
        help: str,
        brief: str | bool = False,
        aliases: Sequence[str] = (),
        **options: Any,
    ) -> argparse.Action:
        """Add an option to a group.

        group: as argparse's.
        flags: its names.
        help: its text in the long help.
        brief: its text in the short help; True for the same text, False to leave it out.
        aliases: names that no help shows.
        options: of argparse's add_argument.
        """
        shown = help if self.everything or brief is True else brief or argparse.SUPPRESS
        action = group.add_argument(*flags, help=shown, **options)
        for alias in aliases:
            self._option_string_actions[alias] = action
        return action

    def error(self, message: str) -> NoReturn:
        """Print one sentence and exit with code 2; the usage line of this many options would hide it."""
        stop = "" if message.endswith(("?", ".")) else "."
        program = self.prog.partition(":")[0]  # without the name of the file that has the option
        self.exit(2, f"{self.prog}: {message}{stop} See {program} --help.\n")

    def split(self, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
        """Split a command line into the options, and the command that follows them.

        Ends with exit code 2, and the nearest option, for an option that does not exist.
        """
        words = list(arguments)
        options: list[str] = []
        while words and words[0].startswith("-") and words[0] != "-":
            word = words.pop(0)
            if word == "--":
                break
            joined = _JOINED_RANKS.fullmatch(word)
            if joined:
                options += joined.groups()
                continue
            action = self._find(word)
            options.append(word)
            if "=" in word or word not in self._option_string_actions:
                continue  # the value is a part of the word
            count = action.nargs if isinstance(action.nargs, int) else 0 if action.nargs == "?" else 1
            options += words[:count]
            del words[:count]
        return options, words

    def _find(self, word: str) -> argparse.Action:
        """Find the option at the beginning of a word."""
        actions: Mapping[str, argparse.Action] = self._option_string_actions
        name = word.partition("=")[0]
        if name in actions:
            return actions[name]
        if word.startswith("-ppn"):
            return self._refuse_joined("-ppn")
        short = actions.get(word[:2])
        if short is not None and not word.startswith("--") and short.nargs is None:
            value = word[2:]
            takes = short.type is None or value.isdecimal()  # -H, -i, -x; -p2222
            longer = any(each.lstrip("-").startswith(name.lstrip("-")) for each in actions if len(each) > 3)
            if takes and not longer:
                return short
        for beginning, folder in self.missing.items():
            if name.startswith(beginning):
                self.exit(2, f"{self.prog}: {describe_missing(name, folder)}\n")
        similar = did_you_mean(name, actions) or did_you_mean("-" + name, actions)
        return self.error(f"unknown option {name}.{similar}")

    def _refuse_joined(self, name: str) -> NoReturn:
        """Let the option's own action refuse it."""
        action = self._option_string_actions[name]
        try:
            action(self, argparse.Namespace(), None, name)
        except argparse.ArgumentError as error:
            self.error(str(error))
        raise AssertionError(f"{name} is not a refused option")


def record_settings(
    action: argparse.Action, namespace: argparse.Namespace, flag: str | None, variables: Mapping[str, str]
) -> None:
    """Check the variables that an option sets, and add them to `namespace.settings`.

    action, namespace, flag: as in argparse.Action.
    variables: with their values.

    Raises argparse.ArgumentError for an invalid value, and if another option has set a variable to another value.
    """
    try:
        check_settings(variables, find_package_settings().values())
    except HvdkitError as error:
        problem = str(error).removeprefix("Invalid settings: ")
        if len(variables) == 1:
            problem = problem.removeprefix(f"{next(iter(variables))}=")  # the option is named before it
        raise argparse.ArgumentError(action, problem) from None
    origins = getattr(namespace, "set_by", {})
    for name, value in variables.items():
        other = origins.get(name, flag)
        if other != flag and namespace.settings[name] != value:
            raise argparse.ArgumentError(None, f"{flag} contradicts {other}; leave one of them out")
    namespace.settings = {**namespace.settings, **variables}
    namespace.set_by = {**origins, **dict.fromkeys(variables, flag)}


SHELLS = ("bash", "zsh", "fish")


class PrintCompletion(argparse.Action):
    """Print the completion script of a shell, and exit. Raises MissingDependencyError without shtab."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Print the script."""
        print(write_completion(parser, str(values)))
        parser.exit()


def write_completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """Write the completion script: options with their choices, and otherwise files."""
    shtab = optional_import("shtab", "completion")
    _mark(parser, {"FILE": shtab.FILE, "SCRIPT": shtab.FILE, "DIR": shtab.DIRECTORY})
    return str(shtab.complete(parser, shell=shell))


def _mark(parser: argparse.ArgumentParser, files: Mapping[str, Any]) -> None:
    """Mark the options that take files for shtab, and list the commands that the help does not list.

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
