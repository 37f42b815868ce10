"""hvdkit jobs, stacks and stop: commands for the running hvdrun jobs of this user on this host."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hvdkit.errors import LaunchError
from hvdkit.launch.introspect.query_server import query_job, stop_job
from hvdkit.launch.introspect.stack_report import ProcessStack, format_report, read_answer
from hvdkit.launch.state.ranks import count_ranks
from hvdkit.launch.state.runtime_dir import find_jobs

_JOBS = """\
List your running hvdrun jobs on this host: name, state, ranks, hosts, GPUs that ranks see, start time and command.
Jobs that you started on other hosts are listed there.
"""
_STACKS = """\
Show the Python stacks of all threads of every rank of a running hvdrun job, on all hosts. Ranks with equal stacks are
shown once; the smallest group comes first. Run this on the host of hvdrun, as the same user. The job is not disturbed.
"""
_STACKS_EXAMPLES = """\
examples:
  hvdkit stacks            the job that runs on this host, or a list if there are several
  hvdkit stacks 12345      the job of this name, which is the process id of its hvdrun
  hvdkit stacks --json     every process of every rank, for programs
"""
_STOP = """\
End one of your hvdrun jobs on this host by SIGTERM to hvdrun: ranks with a SIGTERM handler have hvdrun's --save-timeout
to save. The command returns when the job has ended, and prints its exit code.
"""
_STOP_EXAMPLES = """\
examples:
  hvdkit stop 12345         end this job; `hvdkit jobs` lists your jobs
  hvdkit stop --now 12345   end it without time to save, like Ctrl-C
"""

_NARROWEST = 80  # columns of a table
_ONE_LINE = 10**6  # columns, for a reader that is no terminal: a job is one line


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add jobs, stacks and stop to the commands of hvdkit."""
    parser = commands.add_parser("jobs", help="list your running hvdrun jobs on this host", description=_JOBS)
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.set_defaults(run=list_jobs)
    parser = commands.add_parser(
        "stacks",
        help="show the Python stacks of all ranks of a running job",
        description=_STACKS,
        epilog=_STACKS_EXAMPLES,
    )
    parser.add_argument("job", nargs="?", metavar="JOB", help="a job on this host (default: the only one)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=show_stacks)
    parser = commands.add_parser(
        "stop", help="end a running job, with time to save", description=_STOP, epilog=_STOP_EXAMPLES
    )
    parser.add_argument("job", metavar="JOB", help="name of the job")
    parser.add_argument("--now", action="store_true", help="end the ranks without time to save, like Ctrl-C")
    parser.set_defaults(run=stop)


def select_job(command: str, name: str | None, jobs: Mapping[str, str]) -> str:
    """Find the folder of a job. Raises LaunchError, with a list of jobs, if the choice is ambiguous.

    command: the command to show in the list. name: name of the job; None for the only job. jobs: name -> folder.
    """
    if name is None and len(jobs) == 1:
        return next(iter(jobs.values()))
    if name is not None and name in jobs:
        return jobs[name]
    if not jobs:
        raise LaunchError(
            "You have no running hvdrun job on this host. Run this command on the host where hvdrun was started.",
            code="no-job-runs",
        )
    lines = [f"  {command} {each}    {_describe_briefly(folder)}" for each, folder in jobs.items()]
    problem = "You have several jobs on this host" if name is None else f"You have no job {name} on this host"
    raise LaunchError("\n".join([f"{problem}. Choose one:", *lines]), code="job-not-selected")


def _describe_briefly(folder: str) -> str:
    try:
        job = query_job(folder, "job")["job"]
    except LaunchError as error:
        return str(error)
    return f"{count_ranks(job['size'])} of {job['command']}"


def list_jobs(options: argparse.Namespace) -> None:
    """Carry out the command."""
    jobs = [describe_job(name, directory) for name, directory in find_jobs().items()]
    if options.json:
        print(json.dumps(jobs, indent=2))
    elif jobs:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _ONE_LINE
        print(format_jobs(jobs, width))
    else:
        print("You have no running hvdrun job on this host.")


def describe_job(name: str, directory: str) -> dict[str, Any]:
    """Query the state of a job; if it does not answer, the state is "not responding", and the rest is null."""
    try:
        job = query_job(directory, "job")["job"]
    except LaunchError:
        job = {"state": "not responding"}
    names = ("state", "size", "hosts", "gpus", "since", "command")
    described = {"name": name, **{each: job.get(each) for each in names}}
    described["ranks"] = described.pop("size")
    described["hosts"] = sorted(set(described["hosts"].values())) if described["hosts"] else None
    return described


def format_jobs(jobs: Sequence[Mapping[str, Any]], width: int = _ONE_LINE) -> str:
    """Write a table, one job a line.

    width: of the terminal; hosts and commands for which it has no room continue in the next line of their column.
    """
    from rich.console import Console  # importing rich takes longer than --version needs
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    gpus = ("GPUS",) if any(job.get("gpus") for job in jobs) else ()
    for title in ("JOB", "STATE", "RANKS", "HOSTS", *gpus, "SINCE", "COMMAND"):
        table.add_column(title, no_wrap=title not in ("HOSTS", "COMMAND"), overflow="fold")
    for job in jobs:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job["since"])) if job["since"] is not None else "-"
        ranks = "-" if job["ranks"] is None else str(job["ranks"])
        command = " ".join((job["command"] or "-").splitlines())
        shown = [_describe_gpus(job.get("gpus") or {})] if gpus else []
        row = (job["name"], job["state"] or "-", ranks, _shorten(job["hosts"]), *shown, since, command)
        table.add_row(*map(Text, row))
    out = io.StringIO()
    Console(file=out, width=max(_NARROWEST, width)).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _describe_gpus(gpus: Mapping[str, str]) -> str:
    """Write the GPUs of hosts, as "2 x 8 AMD" for two hosts that have 8 each; "-" without GPUs."""
    counts = Counter(gpus.values())
    return ", ".join(f"{count} x {each}" if count > 1 else each for each, count in counts.items()) or "-"


def _shorten(hosts: Sequence[str] | None) -> str:
    if not hosts:
        return "-"
    return ",".join(hosts) if len(hosts) <= 3 else f"{hosts[0]} and {len(hosts) - 1} others"


def show_stacks(options: argparse.Namespace) -> None:
    """Carry out the command. Raises LaunchError if the job is ambiguous, or does not answer."""
    answer = query_job(select_job("hvdkit stacks", options.job, find_jobs()), "stacks")
    job = answer["job"]
    if not answer["ranks"]:
        raise LaunchError(f"No rank of job {job['name']} has started yet.", code="no-rank-started")
    stacks = read_answer(answer)
    if options.json:
        print(json.dumps({"job": job, "processes": [_encode(stack) for stack in stacks]}, indent=2))
    else:
        print(f"job {job['name']}: {count_ranks(job['size'])} of {job['command']}\n\n{format_report(stacks)}", end="")


def _encode(process: ProcessStack) -> dict[str, Any]:
    """Encode a process for JSON: its threads' frames, the innermost last, or the reason for their absence."""
    threads = [[frame._asdict() for frame in stack] for stack in process.stacks]
    return {**asdict(process), "stacks": threads}


def stop(options: argparse.Namespace) -> None:
    """Carry out the command. Raises LaunchError if the job does not exist or does not answer."""
    directory = select_job("hvdkit stop", options.job, find_jobs())
    code = stop_job(directory, now=options.now)
    if code is None:
        raise LaunchError(
            f"Job {options.job} has ended; its hvdrun did not report an exit code. See the output of the job.",
            code="exit-code-unknown",
        )
    print(f"Job {options.job} has ended with exit code {code}.")
