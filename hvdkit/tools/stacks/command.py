"""hvdkit stacks: the command."""

from __future__ import annotations

import argparse
import sys

from hvdkit.errors import LaunchError
from hvdkit.launch.doing import format_report, read_answer
from hvdkit.launch.folders import find_jobs
from hvdkit.launch.inquiry import ask_job

_EXPLANATION = """\
Show what every rank of a running hvdrun job is doing now, on all hosts: the Python stacks of all threads, ranks that do
the same together, the odd ones first. To be typed on the host where hvdrun runs, by the same user. The job goes on.
"""

_EXAMPLES = """\
examples:
  hvdkit stacks            the job that runs on this host, or a list of them if there are several
  hvdkit stacks 12345      the job of this name, which is the process number of its hvdrun
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "stacks",
        help="show what all ranks of a running job are doing",
        description=_EXPLANATION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("job", nargs="?", metavar="JOB", help="a job on this host; needless if there is one only")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Carry out the command. Raises LaunchError if it is not clear which job is meant, or if that does not answer."""
    answer = ask_job(choose(options.job, find_jobs()), "stacks")
    job = answer["job"]
    print(f"job {job['name']}: {job['size']} ranks of {job['command']}\n")
    if not answer["ranks"]:
        raise LaunchError("No rank of this job has started yet.")
    sys.stdout.write(format_report(read_answer(answer)))


def choose(name: str | None, jobs: dict[str, str]) -> str:
    """Find the folder of the job that is meant. Raises LaunchError listing all if that is not clear."""
    if name is None and len(jobs) == 1:
        return next(iter(jobs.values()))
    if name in jobs:
        return jobs[name]
    if not jobs:
        raise LaunchError("No hvdrun of yours runs on this host. Type this on the host where hvdrun was started.")
    lines = [f"  hvdkit stacks {each}    {_describe(folder)}" for each, folder in jobs.items()]
    problem = "Several jobs of yours run here" if name is None else f"There is no job {name} of yours on this host"
    raise LaunchError("\n".join([f"{problem}. Say which of these:", *lines]))


def _describe(folder: str) -> str:
    try:
        job = ask_job(folder, "job")["job"]
    except LaunchError as error:
        return str(error)
    return f"{job['size']} ranks of {job['command']}"
