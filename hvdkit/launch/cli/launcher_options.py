"""The options of hvdrun for ssh and for the program that starts the ranks."""

from __future__ import annotations

import argparse

from hvdkit.launch.cli.numbers import tcp_port
from hvdkit.launch.cli.parser import Add
from hvdkit.launch.plan.selected_launcher import LAUNCHERS


def add_ssh_flags(group: argparse._ActionsContainer, *, shown: bool = True) -> None:
    """Add the options of ssh."""
    add = group.add_argument
    hide = argparse.SUPPRESS
    add("-p", "--ssh-port", type=tcp_port, metavar="PORT", help="ssh port of all hosts" if shown else hide)
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
