"""hvdkit hosts: the command, and hosts as a table and as JSON."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable
from dataclasses import asdict

from hvdkit.config import read_environment
from hvdkit.errors import LaunchError
from hvdkit.launch.cli.numbers import positive_int
from hvdkit.launch.detect.hosts import find_hosts
from hvdkit.launch.hostfiles import AUTO, DIALECTS, FoundHosts, find_dialect
from hvdkit.launch.hostfiles.dialects import convert


def write_json(found: FoundHosts) -> str:
    """Write hosts as JSON: source, hosts, ranks and notes; slots null for as many as the host has cores."""
    hosts = [asdict(host) for host in found.hosts]
    document = {"source": found.source, "hosts": hosts, "ranks": found.ranks, "notes": found.notes}
    return json.dumps(document, indent=2) + "\n"


def write_table(found: FoundHosts) -> str:
    """Write hosts as a table, with their number and the number of all slots under it."""
    from rich.box import SIMPLE  # importing rich takes longer than --version needs
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE)
    table.add_column("host", no_wrap=True)
    table.add_column("slots", justify="right")
    limited, users = any(host.max_slots for host in found.hosts), any(host.user for host in found.hosts)
    if limited:
        table.add_column("most", justify="right")
    if users:
        table.add_column("user")
    for host in found.hosts:
        row = [host.name, "cores" if host.slots is None else str(host.slots)]
        row += [str(host.max_slots or "")] if limited else []
        row += [host.user] if users else []
        table.add_row(*map(Text, row))
    out = io.StringIO()
    console = Console(file=out, width=max(80, *(len(host.name) + 40 for host in found.hosts)))
    console.print(table)
    return f"{found.source}\n{out.getvalue()}{_summarize(found)}\n"


def _summarize(found: FoundHosts) -> str:
    count = f"{len(found.hosts)} host{'s' * (len(found.hosts) != 1)}"
    known = [host.slots for host in found.hosts if host.slots is not None]
    rest = ", and as many as the others have cores" if known else ", as many slots as they have cores"
    slots = f", {sum(known)} slot{'s' * (sum(known) != 1)}" if known else ""
    asked = f"; {found.ranks} ranks were asked for" if found.ranks and found.ranks != sum(known) else ""
    return count + slots + (rest if len(known) < len(found.hosts) else "") + asked


#: Outputs that are not hostfile formats.
SHOWN: dict[str, Callable[[FoundHosts], str]] = {"table": write_table, "json": write_json}


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
    )
    add = parser.add_argument
    add("file", nargs="?", metavar="FILE", help="a list of hosts; - for standard input")
    add("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts and slots, as for hvdrun")
    add(
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
    add(
        "--slots-per-host",
        type=positive_int,
        metavar="N",
        help="slots of hosts without a number, and of all hosts of a job",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Carry out the command. Raises LaunchError for hosts that it cannot read, or not write in the format."""
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
            "No hosts were given, and this is not a job of a scheduler that hvdkit knows. Give a hostfile, or "
            "-H node1:4,node2:4.",
            code="hosts-missing",
        )
    return found
