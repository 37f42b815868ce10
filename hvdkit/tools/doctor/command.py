"""hvdkit doctor: the command."""

from __future__ import annotations

import argparse

from hvdkit.launch.numbers import ranks
from hvdkit.launch.starter_flags import add_ssh_flags

_EXPLANATION = """\
Look at what is installed here, try what can be tried, and tell what works, what would be taken, and what is wrong.

With -H, --hostfile or inside an allocation of Slurm, PBS or LSF: look at every host of the job, and from each to each
of the others, and time a sum over all of them. Nothing is left running, and nothing is changed.
"""

_EPILOG = """\
examples:
  hvdkit doctor                           this host and this Python environment
  hvdkit doctor --hostfile hosts.txt      every host, over ssh, and the ways between them
  hvdkit doctor -H a:2,b:2 -np 4 --script train.py
                                          the same, and what the script forgets
  hvdkit doctor --json > doctor.json      for programs, or to send to somebody

The exit code is 0 if nothing is wrong (or only noted), 1 if there are warnings, 2 if there are errors.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "doctor",
        help="tell what is installed, what works, what would be taken, and what is wrong",
        description=_EXPLANATION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="look at these hosts, and between them")
    parser.add_argument("--hostfile", metavar="FILE", help="the same from a file, as hvdrun reads it")
    parser.add_argument("--hostfile-format", default="auto", metavar="NAME", help="how to read it; see hvdrun --help")
    parser.add_argument(
        "-np", "--num-proc", dest="ranks", type=ranks, default=0, metavar="N", help="ranks to be started"
    )
    add_ssh_flags(parser)
    parser.add_argument("--script", metavar="FILE", help="also read this training script for what it forgets")
    parser.add_argument(
        "--via",
        choices=("auto", "ssh", "srun"),
        default="auto",
        help="how to reach the hosts; auto: srun for those of a Slurm allocation, else ssh (default: auto)",
    )
    parser.add_argument("--here", action="store_true", help="only this host, also inside an allocation")
    parser.add_argument("--no-allreduce", action="store_true", help="start no small job on the hosts")
    parser.add_argument("--settings", action="store_true", help="only every setting: its value, and its origin")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code. Raises LaunchError for hosts that cannot be understood."""
    if options.settings:
        from hvdkit.tools.doctor.show.settings import show_settings

        show_settings(as_json=options.json)
        return 0
    from hvdkit.tools.doctor.steps import carry_out  # what this needs would slow down every other command

    return carry_out(options)
