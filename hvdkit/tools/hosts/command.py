"""hvdkit hosts: the command."""

from __future__ import annotations

import argparse
import sys

from hvdkit.config import read_environment
from hvdkit.errors import LaunchError
from hvdkit.launch.cli.numbers import count
from hvdkit.launch.hostfiles import AUTO, DIALECTS, FoundHosts, find_dialect
from hvdkit.launch.hostfiles.dialects import convert
from hvdkit.launch.plan.resolve_hosts import find_hosts
from hvdkit.tools.hosts.show import SHOWN

_EXPLANATION = """\
Show the hosts and slots that hvdrun reads from a hostfile, from -H, or from the job that this runs in; or write them in
another format. Every error in a file is reported with its line and its cure; the exit code is then 2.
"""

_EXAMPLES = """\
examples:
  hvdkit hosts hosts.txt                             a table of its hosts and slots
  hvdkit hosts --to openmpi $PBS_NODEFILE > hosts    for another tool
  hvdkit hosts -H 'nid[001-004]:8' --to hydra        expanded to single hosts
  hvdkit hosts                                       in a job of Slurm, PBS, LSF or SGE: its hosts and tasks
  hvdkit hosts --from intel names.txt --slots-per-host 4 --to machinefile
  scontrol show hostnames | hvdkit hosts --slots-per-host 4 --to horovod -
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "hosts",
        help="show or convert hostfiles, host lists and allocations",
        description=_EXPLANATION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="a list of hosts; - for standard input")
    parser.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts and slots, as for hvdrun")
    parser.add_argument(
        "--from",
        "--hostfile-format",
        dest="format",
        default=AUTO,
        metavar="NAME",
        help=f"format of the file: {AUTO} (default), {', '.join(sorted(DIALECTS))}",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--to",
        default="table",
        metavar="NAME",
        help=f"what to write: {', '.join(SHOWN)}, or one of these formats (default: table)",
    )
    form.add_argument("--json", dest="to", action="store_const", const="json", help="print JSON, as --to json does")
    parser.add_argument(
        "--slots-per-host", type=count, metavar="N", help="slots of hosts without a number, and of all hosts of a job"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Carry out the command. Raises LaunchError for hosts that cannot be read, or not be written in the format."""
    target = options.to.strip().lower()
    dialect = None if target in SHOWN else find_dialect(target)
    found = _find(options)
    text, notes = (SHOWN[target](found), ()) if dialect is None else convert(found.hosts, dialect)
    for note in (*found.notes, *notes):
        print(f"hvdkit hosts: {note}", file=sys.stderr)
    sys.stdout.write(text)


def _find(options: argparse.Namespace) -> FoundHosts:
    found = find_hosts(
        options.hosts,
        "/dev/stdin" if options.file == "-" else options.file,
        read_environment(),
        format=options.format,
        slots=options.slots_per_host,
    )
    if found is None:
        raise LaunchError(
            "No hosts were given, and this is not a job of Slurm, PBS, LSF or SGE. Give a hostfile, or "
            "-H node1:4,node2:4."
        )
    return found
