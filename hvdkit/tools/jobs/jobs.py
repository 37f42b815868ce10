"""hvdkit jobs: the command; and which running job of this user hvdkit stacks and stop are about."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hvdkit.errors import LaunchError
from hvdkit.launch.introspect.query_server import query_job
from hvdkit.launch.job.ranks import count_ranks
from hvdkit.launch.job.runtime_dir import find_jobs


def select_job(command: str, name: str | None, jobs: Mapping[str, str]) -> str:
    """Find the folder of a job. Raises LaunchError, with a list of jobs, if the choice is ambiguous.

    command: to show in the list. name: of the job; None for the only one. jobs: folders by name.
    """
    if name is None and len(jobs) == 1:
        return next(iter(jobs.values()))
    if name is not None and name in jobs:
        return jobs[name]
    if not jobs:
        raise LaunchError(
            "You have no running hvdrun job on this host. Run this command on the host where hvdrun was started."
        )
    lines = [f"  {command} {each}    {_describe_briefly(folder)}" for each, folder in jobs.items()]
    problem = "You have several jobs on this host" if name is None else f"You have no job {name} on this host"
    raise LaunchError("\n".join([f"{problem}. Choose one:", *lines]))


def _describe_briefly(folder: str) -> str:
    try:
        job = query_job(folder, "job")["job"]
    except LaunchError as error:
        return str(error)
    return f"{count_ranks(job['size'])} of {job['command']}"


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
