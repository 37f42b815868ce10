"""hvdkit doctor: the command."""

from __future__ import annotations

import argparse
from dataclasses import fields

from hvdkit.launch.cli.launcher_options import add_ssh_flags
from hvdkit.launch.cli.numbers import positive_int

_EXPLANATION = """\
Find out what is wrong with this host and this Python environment, and print the cure for it.

With -H, --hostfile or inside an allocation of Slurm, PBS or LSF: examine every host of the job and the connections
between them, and time an allreduce over all of them. Nothing is changed, and nothing is left running.
"""

_EPILOG = """\
examples:
  hvdkit doctor                           this host and this Python environment
  hvdkit doctor --verbose                 the same, with tables of all that was found
  hvdkit doctor --hostfile hosts.txt      every host, over ssh, and the connections between them
  hvdkit doctor -H a:2,b:2 -np 4 --script train.py
                                          the same, and mistakes in the script
  hvdkit doctor --json > doctor.json      for programs, or for a bug report

The exit code is 0 without errors, 1 with errors, with --strict also with warnings, 2 for a wrong command line.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "doctor",
        help="find out what is wrong with hosts, networks and this installation",
        description=_EXPLANATION,
        epilog=_EPILOG,
    )
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "-H", "--hosts", metavar="HOST:SLOTS,...", help="examine these hosts and the connections between them"
    )
    where.add_argument("--hostfile", metavar="FILE", help="the same, with the hosts of a file")
    add("--hostfile-format", default="auto", metavar="NAME", help="format of the hostfile; see hvdrun --help")
    add("-np", "--num-proc", dest="ranks", type=positive_int, default=0, metavar="N", help="number of ranks of the job")
    add_ssh_flags(parser)
    add("--script", metavar="FILE", help="also read this training script for common mistakes")
    add(
        "--via",
        choices=("auto", "ssh", "srun"),
        default="auto",
        help="how to start the agents on the hosts; auto: srun in a Slurm allocation, else ssh (default: auto)",
    )
    where.add_argument("--here", action="store_true", help="examine only this host, even inside an allocation")
    add("--no-allreduce", action="store_true", help="do not time an allreduce over the hosts")
    add("--settings", action="store_true", help="print only the settings, their values and origins")
    add("--strict", action="store_true", help="exit with 1 for warnings too, not only for errors")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("-v", "--verbose", action="store_true", help="also print tables of all that was found")
    output.add_argument("-q", "--quiet", action="store_true", help="print only errors and warnings")
    output.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code. Raises LaunchError for hosts that cannot be parsed."""
    if options.settings:
        from hvdkit.tools.doctor.settings import show_settings

        show_settings(as_json=options.json)
        return 0
    # Their imports would slow down every other command.
    from hvdkit.tools.doctor.evaluate import diagnose
    from hvdkit.tools.doctor.options import DoctorOptions

    names = {each.name for each in fields(DoctorOptions)}
    return diagnose(DoctorOptions(**{name: value for name, value in vars(options).items() if name in names}))
