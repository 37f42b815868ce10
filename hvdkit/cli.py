"""hvdkit: the command line of everything that is not running a job."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from hvdkit import __version__
from hvdkit.config import Setting, read_settings
from hvdkit.errors import HvdkitError
from hvdkit.tools.build_horovod.command import add_command as add_build_horovod
from hvdkit.tools.hosts.command import add_command as add_hosts
from hvdkit.tools.submit.command import add_command as add_submit


def build_parser() -> argparse.ArgumentParser:
    """Build the parser; each subcommand stores the function that carries it out as `run`."""
    parser = argparse.ArgumentParser(
        prog="hvdkit",
        description="Tools around training on many ranks. Jobs are started by hvdrun: see hvdrun --help.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hvdkit {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="tell what this installation would do, and why",
        description="Tell what this installation would do, and why.",
        allow_abbrev=False,
    )
    doctor.add_argument(
        "--settings", action="store_true", required=True, help="every setting: its value, and where that comes from"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON, for programs")
    doctor.set_defaults(run=_show_settings)
    add_build_horovod(commands)
    add_hosts(commands)
    add_submit(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the hvdkit command; returns the exit code, 0 for a command that gives none."""
    options = build_parser().parse_args(arguments)
    try:
        return options.run(options) or 0
    except HvdkitError as error:
        print(f"hvdkit: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _show_settings(options: argparse.Namespace) -> None:
    settings = read_settings()
    if options.json:
        print(json.dumps([_describe(setting) for setting in settings], indent=2))
    else:
        _print_table(settings)


def _describe(setting: Setting) -> dict[str, object]:
    return {
        "name": setting.name,
        "value": setting.value,
        "origin": setting.origin,
        "default": setting.default,
        "variable": setting.variable,
        "horovod": setting.horovod or None,
        "flag": setting.flag or None,
        "help": setting.help,
    }


def _print_table(settings: Sequence[Setting]) -> None:
    from rich.box import SIMPLE  # rich takes longer to load than --version takes to answer
    from rich.console import Console
    from rich.table import Table

    table = Table(title="hvdkit settings", box=SIMPLE)
    for title, wrap in (("variable", False), ("value", False), ("from", False), ("meaning", True)):
        table.add_column(title, no_wrap=not wrap, overflow="fold")
    for setting in settings:
        origin = "environment" if setting.origin == setting.variable else setting.origin
        style = "" if setting.origin == "default" else "bold"
        table.add_row(setting.variable, str(setting.value), origin, setting.help, style=style)
    Console().print(table)
