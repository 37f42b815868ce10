"""hvdrun: run a job from the command line."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from hvdkit.config import read_environment
from hvdkit.launch.cli.command import check_working_directory
from hvdkit.launch.cli.console import run_command
from hvdkit.launch.cli.options import parse_arguments
from hvdkit.launch.cli.own_arguments import hide_values
from hvdkit.launch.options import LaunchOptions
from hvdkit.launch.plan_start import plan_start
from hvdkit.launch.prepare import prepare
from hvdkit.launch.run.output import Output
from hvdkit.launch.start import run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run hvdrun; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    return run_command("hvdrun", lambda: run_options(parse_arguments(words), read_environment()))


def run_options(options: LaunchOptions, environ: Mapping[str, str]) -> int:
    """Prepare, plan and run a job; returns the exit code."""
    hide_values(options.env)
    check_working_directory()
    output = Output(quiet=options.quiet, shown=options.show_ranks)
    facts = prepare(options, environ, note=output.note)
    return run(plan_start(options, facts), output)


if __name__ == "__main__":
    sys.exit(main())
