"""hvdrun: run a job from the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hvdkit.config import read_environment
from hvdkit.launch.cli.console import run_command
from hvdkit.launch.cli.options import parse_arguments
from hvdkit.launch.start import run_options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run hvdrun; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    return run_command("hvdrun", lambda: run_options(parse_arguments(words), read_environment()))


if __name__ == "__main__":
    sys.exit(main())
