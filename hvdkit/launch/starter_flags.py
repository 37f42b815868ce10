"""The options of hvdrun that say how whatever starts the ranks is to be called."""

from __future__ import annotations

import argparse
import os
import re
import shlex

from hvdkit.errors import LaunchError
from hvdkit.launch.choose import STARTERS
from hvdkit.launch.numbers import port


def add_ssh_flags(parser: argparse.ArgumentParser) -> None:
    """Add those of ssh."""
    parser.add_argument("-p", "--ssh-port", type=port, metavar="PORT", help="of ssh on all hosts")
    parser.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="the private key for ssh")


def add_starter_flags(parser: argparse.ArgumentParser) -> None:
    """Add them; those that horovodrun has too bear its names."""
    add = parser.add_argument
    add("--launcher", choices=STARTERS, help="what starts the ranks; ssh: mpirun, with ssh in place of the scheduler")
    add("--jsrun", dest="launcher", action="store_const", const="jsrun", help="as --launcher")
    add_ssh_flags(parser)
    add("--mpi-args", metavar="ARGS", help='more arguments of the launcher, like --mpi-args="--report-bindings"')
    add("--binding-args", metavar="ARGS", help="how it places ranks and binds them to cores, in place of --bind")
    add(
        "--no-forward-env",
        action="append",
        metavar="PATTERN",
        help="keep variables from the ranks, like 'AWS_*' or '*_TOKEN'; may be repeated. All others reach them, "
        "unencrypted between hosts. What starts a rank, as PATH, is always sent",
    )
    add("--tcp", action="store_true", help="between hosts nothing but TCP")


def read_ssh_options(options: argparse.Namespace) -> tuple[str, ...]:
    """Turn -p and -i into options of ssh. Raises LaunchError for a file that cannot be handed on."""
    number, file = options.ssh_port, options.ssh_identity_file
    if file is not None and not os.path.isfile(file):
        raise LaunchError(f"--ssh-identity-file {file}: there is no such file. Check the path.")
    if file is not None and not re.fullmatch(r"[^\s'\"\\\x00-\x1f]+", os.path.abspath(file)):
        raise LaunchError(
            f"--ssh-identity-file {file!r} has a space or a quote in its path, which launchers do not hand on whole. "
            "Put 'IdentityFile PATH' for these hosts in ~/.ssh/config."
        )
    return (
        *(("-p", str(number)) if number is not None else ()),
        *(("-i", os.path.abspath(file)) if file is not None else ()),
    )


def split_words(flag: str, text: str | None) -> tuple[str, ...] | None:
    """Split the value of a flag as a shell would; None for None. Raises LaunchError for an open quote."""
    try:
        return None if text is None else tuple(shlex.split(text))
    except ValueError as error:
        raise LaunchError(f"{flag} {text!r} cannot be split into words: {error}.") from None
