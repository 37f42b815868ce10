"""hvdkit hosts: the command."""

from __future__ import annotations

import argparse
import sys

from hvdkit.config import read_environment
from hvdkit.errors import LaunchError
from hvdkit.launch.hosts import AUTO, DIALECTS, FoundHosts, find_dialect
from hvdkit.launch.hosts.convert import convert
from hvdkit.launch.where import find_hosts
from hvdkit.tools.hosts.show import SHOWN

_EXPLANATION = """\
Show which hosts and slots hvdrun would read in a hostfile, after -H, or in the job that this runs in; or write them in
another dialect. Every problem of a file is told with its line and its cure; the exit code is then 2.
"""

_EXAMPLES = """\
examples:
  hvdkit hosts hosts.txt                             a table of what it means
  hvdkit hosts --to openmpi $PBS_NODEFILE > hosts    for another tool
  hvdkit hosts -H 'nid[001-004]:8' --to hydra        the hosts one by one
  hvdkit hosts                                       inside a job of Slurm, PBS, LSF or SGE: its hosts and its tasks
  hvdkit hosts --from intel names.txt --slots-per-host 4 --to machinefile
  scontrol show hostnames | hvdkit hosts --slots-per-host 4 --to horovod -
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "hosts",
        help="show or convert a list of hosts: a hostfile of any dialect, -H, or the job's own",
        description=_EXPLANATION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="a list of hosts; - for standard input")
    parser.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="a list of hosts as hvdrun takes it")
    parser.add_argument(
        "--from",
        "--hostfile-format",
        dest="format",
        default=AUTO,
        metavar="NAME",
        help=f"dialect of the file: {AUTO} (default), {', '.join(sorted(DIALECTS))}",
    )
    parser.add_argument(
        "--to",
        default="table",
        metavar="NAME",
        help=f"what to write: {', '.join(SHOWN)}, or one of those dialects (default: table)",
    )
    parser.add_argument(
        "--slots-per-host", type=int, metavar="N", help="slots of hosts without a number, and of all those of a job"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Carry out the command. Raises LaunchError for a list that cannot be read, or not be written as was asked."""
    target = options.to.strip().lower()
    dialect = None if target in SHOWN else find_dialect(target)
    found = _find(options)
    text, notes = (SHOWN[target](found), ()) if dialect is None else convert(found.hosts, dialect)
    for note in (*found.notes, *notes):
        print(f"hvdkit: {note}", file=sys.stderr)
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
            "There is no list of hosts: this is not inside a job of Slurm, PBS, LSF or SGE. "
            "Give a file, or -H node1:4,node2:4."
        )
    return found
