"""The options of hvdrun for ssh and for the program that starts the ranks."""

from __future__ import annotations

import argparse
import os
import re
import shlex

from hvdkit.errors import LaunchError
from hvdkit.launch.cli.numbers import port
from hvdkit.launch.cli.parser import Add
from hvdkit.launch.plan.launcher_choice import LAUNCHERS


def add_ssh_flags(group: argparse._ActionsContainer, *, shown: bool = True) -> None:
    """Add the options of ssh."""
    add = group.add_argument
    hide = argparse.SUPPRESS
    add("-p", "--ssh-port", type=port, metavar="PORT", help="ssh port of all hosts" if shown else hide)
    add("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh" if shown else hide)


def add_launcher_options(add: Add) -> None:
    """Add the options of launchers; those of horovodrun have its names."""
    add(
        "--launcher",
        choices=LAUNCHERS,
        brief="program that starts the ranks",
        help="program that starts the ranks; ssh is mpirun over ssh, without the scheduler",
    )
    add("--jsrun", action="store_true", help="same as --launcher jsrun")
    add(
        "--mpi-args",
        metavar="ARGS",
        help='additional arguments of the launcher, as --mpi-args="--report-bindings"',
    )
    add(
        "--binding-args",
        metavar="ARGS",
        help="arguments of the launcher that place and bind ranks, instead of --bind",
    )
    add(
        "--no-forward-env",
        action="append",
        metavar="PATTERN",
        help="do not send the variables that match a pattern, as 'AWS_*', to the ranks; may be repeated. All other "
        "variables are sent, unencrypted between hosts. Those of -x, and those that ranks need to start, as PATH, are "
        "always sent",
    )
    add("--tcp", action="store_true", help="use only TCP between hosts")


def choose_launcher(options: argparse.Namespace) -> str:
    """The launcher that the user requires; "" for none. Raises LaunchError for two different ones."""
    if options.jsrun and options.launcher not in (None, "jsrun"):
        raise LaunchError(f"--jsrun contradicts --launcher {options.launcher}. Leave one of them out.")
    return "jsrun" if options.jsrun else options.launcher or ""


def read_ssh_options(options: argparse.Namespace) -> tuple[str, ...]:
    """Turn -p and -i into options of ssh. Raises LaunchError for a file that ssh or the launcher cannot use."""
    number, file = options.ssh_port, options.ssh_identity_file
    if file is not None and not os.path.isfile(file):
        raise LaunchError(f"--ssh-identity-file {file}: there is no such file. Check the path.")
    if file is not None and not re.fullmatch(r"[^\s'\"\\\x00-\x1f]+", os.path.abspath(file)):
        raise LaunchError(
            f"--ssh-identity-file {file!r} has a space or a quote in its path, which launchers do not pass to ssh "
            "correctly. Write 'IdentityFile PATH' for these hosts in ~/.ssh/config."
        )
    return (
        *(("-p", str(number)) if number is not None else ()),
        *(("-i", os.path.abspath(file)) if file is not None else ()),
    )


def split_words(flag: str, text: str | None) -> tuple[str, ...] | None:
    """Split the value of an option as a shell does; None for None. Raises LaunchError for an open quote."""
    try:
        return None if text is None else tuple(shlex.split(text))
    except ValueError as error:
        raise LaunchError(f"{flag} {text!r} cannot be split into words: {error}. Close the quote.") from None
