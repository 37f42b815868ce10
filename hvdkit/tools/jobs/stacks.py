"""hvdkit stacks: the command."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from hvdkit.errors import LaunchError
from hvdkit.launch.introspect.query_server import query_job
from hvdkit.launch.introspect.stack_report import ProcessStack, format_report, read_answer
from hvdkit.launch.job.ranks import count_ranks
from hvdkit.launch.job.runtime_dir import find_jobs
from hvdkit.tools.jobs.jobs import select_job

_EXPLANATION = """\
Show the Python stacks of all threads of every rank of a running hvdrun job, on all hosts. Ranks with equal stacks are
shown once; the smallest group comes first. Run this on the host of hvdrun, as the same user. The job is not disturbed.
"""

_EXAMPLES = """\
examples:
  hvdkit stacks            the job that runs on this host, or a list if there are several
  hvdkit stacks 12345      the job of this name, which is the process id of its hvdrun
  hvdkit stacks --json     every process of every rank, for programs
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "stacks",
        help="show the Python stacks of all ranks of a running job",
        description=_EXPLANATION,
        epilog=_EXAMPLES,
    )
    parser.add_argument("job", nargs="?", metavar="JOB", help="a job on this host (default: the only one)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Carry out the command. Raises LaunchError if the job is ambiguous, or does not answer."""
    answer = query_job(select_job("hvdkit stacks", options.job, find_jobs()), "stacks")
    job = answer["job"]
    if not answer["ranks"]:
        raise LaunchError(f"No rank of job {job['name']} has started yet.")
    stacks = read_answer(answer)
    if options.json:
        print(json.dumps({"job": job, "processes": [_encode(stack) for stack in stacks]}, indent=2))
    else:
        print(f"job {job['name']}: {count_ranks(job['size'])} of {job['command']}\n\n{format_report(stacks)}", end="")


def _encode(process: ProcessStack) -> dict[str, Any]:
    """Encode a process for JSON: its threads' frames, the innermost last, or the reason that it has none."""
    threads = [[frame._asdict() for frame in stack] for stack in process.stacks]
    return {**asdict(process), "stacks": threads}
