"""hvdkit: the command line of everything that is not running a job."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hvdkit import __version__
from hvdkit.errors import HvdkitError
from hvdkit.tools.bench.command import add_command as add_bench
from hvdkit.tools.build_horovod.command import add_command as add_build_horovod
from hvdkit.tools.compare.command import add_command as add_compare
from hvdkit.tools.doctor.command import add_command as add_doctor
from hvdkit.tools.hosts.command import add_command as add_hosts
from hvdkit.tools.migrate.command import add_command as add_migrate
from hvdkit.tools.profile.command import add_command as add_profile
from hvdkit.tools.stacks.command import add_command as add_stacks
from hvdkit.tools.submit.command import add_command as add_submit


def build_parser() -> argparse.ArgumentParser:
    """Build the parser; each subcommand stores the function that carries it out as `run`.

    It returns the exit code, or None for 0.
    """
    parser = argparse.ArgumentParser(
        prog="hvdkit",
        description="Tools around training on many ranks. Jobs are started by hvdrun: see hvdrun --help.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hvdkit {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_doctor(commands)
    add_build_horovod(commands)
    add_hosts(commands)
    add_submit(commands)
    add_compare(commands)
    add_migrate(commands)
    add_profile(commands)
    add_bench(commands)
    add_stacks(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the hvdkit command; returns the exit code, 0 for a command that gives none."""
    options = build_parser().parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except HvdkitError as error:
        print(f"hvdkit: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
