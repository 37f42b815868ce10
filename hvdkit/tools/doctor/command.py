"""hvdkit doctor: the command."""

from __future__ import annotations

import argparse
import json

from hvdkit.config import read_environment

_EXPLANATION = """\
Look at what is installed here, try what can be tried, and tell what works, what would be taken, and what is wrong.
"""

_EPILOG = """\
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
    parser.add_argument(
        "--settings", action="store_true", help="only every setting: its value, and where that comes from"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Carry out the command; returns the exit code."""
    if options.settings:
        from hvdkit.tools.doctor.show.settings import show_settings

        show_settings(as_json=options.json)
        return 0
    # What these need would slow down every other command.
    from hvdkit.tools.doctor.checks import check_host
    from hvdkit.tools.doctor.finding import exit_code
    from hvdkit.tools.doctor.look.collect import collect
    from hvdkit.tools.doctor.show.document import build_document

    facts = collect(read_environment())
    findings = check_host(facts)
    if options.json:
        print(json.dumps(build_document(facts, findings), indent=2))
    else:
        from rich.console import Console

        from hvdkit.tools.doctor.show.table import print_report

        print_report(facts, findings, Console())
    return exit_code(findings)
