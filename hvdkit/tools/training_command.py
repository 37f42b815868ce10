"""The training command of tools: hvdrun's options and a script, or the whole command of a launcher.

hvdkit COMMAND -np 2 -H node1:1,node2:1 -- python train.py
hvdkit COMMAND -- mpirun -np 2 python train.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hvdkit.config import read_environment
from hvdkit.errors import LaunchError
from hvdkit.launch.cli.options import build_parser
from hvdkit.launch.detect.hosts import find_hosts
from hvdkit.launch.run.own_arguments import hide_values

_IN_HELP = {"np", "hosts", "hostfile", "network_interfaces", "verbose"}
_NOT_TAKEN = {"help", "help_all", "version", "dry_run", "command", "print_completion"}
#: Options of hvdrun that choose hosts and numbers of ranks.
PLACEMENT = frozenset(
    {"np", "hosts", "hostfile", "hostfile_format", "slots_per_host", "config_file", "host_discovery_script"}
)
_PYTHON_LAUNCHERS = {
    "hvdkit.launch": "hvdrun",
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
}
#: Launchers, with the options that give the number of ranks.
_LAUNCHERS = {
    "hvdrun": ("-np", "-n", "--num-proc"),
    "horovodrun": ("-np", "--num-proc"),
    "mpirun": ("-np", "-n", "--np", "-c"),
    "mpiexec": ("-np", "-n", "--np", "-c"),
    "mpiexec.hydra": ("-np", "-n"),
    "orterun": ("-np", "-n", "--np", "-c"),
    "prterun": ("-np", "-n", "--np", "-c"),
    "srun": ("-n", "--ntasks"),
    "jsrun": ("-n", "--nrs", "-p", "--np"),
    "aprun": ("-n",),
    "torchrun": ("--nproc-per-node", "--nproc_per_node"),
    "accelerate": ("--num_processes",),
}


@dataclass(frozen=True)
class HvdrunOption:
    """An option for hvdrun, as it was typed. name: of its value in hvdrun's namespace."""

    name: str
    words: tuple[str, ...]


def add_hvdrun_options(parser: argparse.ArgumentParser, *, shown: Collection[str] = ()) -> None:
    """Add hvdrun's options to the parser, except names that it has; they are in `hvdrun`, as HvdrunOptions.

    shown: names of values, beside the usual ones, whose options the help shows.
    """
    group = parser.add_argument_group("ranks", "All other options of hvdrun are accepted too: see hvdrun --help.")
    hvdrun = build_parser()
    for action in hvdrun._actions:
        names = [name for name, each in hvdrun._option_string_actions.items() if each is action]
        flags = [name for name in names if name not in parser._option_string_actions]
        if flags and action.dest not in _NOT_TAKEN:
            group.add_argument(
                *flags,
                action=_Keep,
                nargs=action.nargs,
                metavar=action.metavar,
                help=action.help if action.dest in {*_IN_HELP, *shown} else argparse.SUPPRESS,
                dest="hvdrun",
                name=action.dest,
                check=action.type,
            )
    parser.set_defaults(hvdrun=())


class _Keep(argparse.Action):
    def __init__(self, *, name: str, check: Any, **settings: Any) -> None:
        super().__init__(**settings)
        self._name, self._check = name, check

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        flag, words = str(option_string), [values] if isinstance(values, str) else list(values or ())
        if callable(self._check):
            try:
                for word in words:
                    self._check(word)
            except (argparse.ArgumentTypeError, ValueError) as error:
                raise argparse.ArgumentError(self, str(error)) from None
        if self._name == "env":
            hide_values(words)
        typed = (f"{flag}={words[0]}",) if len(words) == 1 and flag.startswith("--") else (flag, *words)
        namespace.hvdrun = (*namespace.hvdrun, HvdrunOption(self._name, typed))


def plan_hvdrun(hvdrun: Sequence[HvdrunOption], script: Sequence[str], *, ranks: str = "2") -> list[str]:
    """Build the command of hvdrun for a script. ranks: its -np if neither options nor an allocation give ranks."""
    placed = any(option.name in PLACEMENT for option in hvdrun)
    if not placed and find_hosts(None, None, read_environment()) is None:
        hvdrun = (*hvdrun, HvdrunOption("np", ("-np", ranks)))
    return [sys.executable, "-m", "hvdkit.launch", *(word for option in hvdrun for word in option.words), "--", *script]


def plan_command(command: Sequence[str], hvdrun: Sequence[HvdrunOption]) -> list[str]:
    """Build the command that starts the ranks: a launcher's unchanged, or hvdrun's for a Python script.

    Raises LaunchError if both hvdrun's options and a launcher's command are given.
    """
    words = strip_dashes(command)
    launcher = find_launcher(words)
    if launcher and hvdrun:
        raise LaunchError(
            f"{hvdrun[0].words[0]} and {launcher} both start ranks. Give the number of ranks to {launcher}, or leave "
            f"{launcher} out.",
            code="launcher-given-twice",
        )
    is_python = bool(words) and (Path(words[0]).name.startswith("python") or words[0].endswith(".py"))
    return plan_hvdrun(hvdrun, words) if hvdrun or (not launcher and is_python) else words


def split_command(command: Sequence[str], hvdrun: Sequence[HvdrunOption]) -> tuple[tuple[HvdrunOption, ...], list[str]]:
    """Return hvdrun's options and the script, for commands that start ranks by themselves.

    For a launcher other than hvdrun only the number of ranks is accepted; LaunchError for other options.
    """
    words = strip_dashes(command)
    launcher = find_launcher(words)
    if not launcher:
        return tuple(hvdrun), words
    plan_command(command, hvdrun)  # refuses options that contradict the launcher
    rest = words[1:] if Path(words[0]).name == launcher else words[3:]
    if launcher == "hvdrun":
        parser = _Parser(prog="hvdrun", add_help=False, allow_abbrev=False)
        add_hvdrun_options(parser)
        words, script = build_parser().split(rest)
        return parser.parse_args(words).hvdrun, script
    rest = rest[1:] if launcher == "accelerate" and rest[:1] == ["launch"] else rest
    ranks: tuple[HvdrunOption, ...] = ()
    while rest and rest[0].startswith("-"):
        flag, equals, value = rest[0].partition("=")
        if flag not in _LAUNCHERS[launcher] or not (equals or rest[1:]):
            raise LaunchError(
                f"{rest[0]} of {launcher} cannot be translated, as hvdkit starts these ranks itself. Give the number "
                f"of ranks and the script in place of {launcher}: -np N -- python train.py.",
                code="launcher-option",
            )
        ranks = (HvdrunOption("np", ("-np", value if equals else rest[1])),)
        rest = rest[1 if equals else 2 :]
    return ranks, [sys.executable, *rest] if rest and rest[0].endswith(".py") else rest


def read_ranks(hvdrun: Sequence[HvdrunOption]) -> int:
    """Read the number of ranks from hvdrun's options; 0 if they give none, or a word."""
    numbers = [option.words[-1].rpartition("=")[2] for option in hvdrun if option.name == "np"]
    return int(numbers[-1]) if numbers and numbers[-1].isdecimal() else 0


def find_launcher(command: Sequence[str]) -> str:
    """Name the launcher that a command runs; "" for any other command."""
    name = Path(command[0]).name if command else ""
    if name.startswith("python") and len(command) > 2 and command[1] == "-m":
        return _PYTHON_LAUNCHERS.get(command[2], "")
    return name if name in _LAUNCHERS else ""


def strip_dashes(command: Sequence[str]) -> list[str]:
    """Remove the -- that ends the options."""
    return list(command[1:] if command[:1] == ["--"] else command)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"hvdrun: {message}. See hvdrun --help.", code="hvdrun-option-invalid")
