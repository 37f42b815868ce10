"""hvdkit jobs: the command."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hvdkit.errors import LaunchError
from hvdkit.launch.introspect.query_server import query_job
from hvdkit.launch.job.runtime_dir import find_jobs

_EXPLANATION = """\
List your running hvdrun jobs on this host: name, state, ranks, hosts, start time and command. Jobs that you started on
other hosts are listed there.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "jobs",
        help="list your running hvdrun jobs on this host",
        description=_EXPLANATION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Carry out the command."""
    jobs = [describe_job(name, directory) for name, directory in find_jobs().items()]
    if options.json:
        print(json.dumps(jobs, indent=2))
    elif jobs:
        print(format_jobs(jobs))
    else:
        print("You have no running hvdrun job on this host.")


def describe_job(name: str, directory: str) -> dict[str, Any]:
    """Ask a job what it is; of one that does not answer the state is "not responding", and the rest null."""
    try:
        job = query_job(directory, "job")["job"]
    except LaunchError:
        job = {"state": "not responding"}
    names = ("state", "size", "hosts", "since", "command")
    described = {"name": name, **{each: job.get(each) for each in names}}
    described["ranks"] = described.pop("size")
    described["hosts"] = sorted(set(described["hosts"].values())) if described["hosts"] else None
    return described


def format_jobs(jobs: Sequence[Mapping[str, Any]]) -> str:
    """Write a table, one job a line."""
    rows = [("JOB", "STATE", "RANKS", "HOSTS", "SINCE", "COMMAND")]
    for job in jobs:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job["since"])) if job["since"] is not None else "-"
        ranks = "-" if job["ranks"] is None else str(job["ranks"])
        rows.append((job["name"], job["state"] or "-", ranks, _shorten(job["hosts"]), since, job["command"] or "-"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _shorten(hosts: Sequence[str] | None) -> str:
    if not hosts:
        return "-"
    return ",".join(hosts) if len(hosts) <= 3 else f"{hosts[0]} and {len(hosts) - 1} others"
