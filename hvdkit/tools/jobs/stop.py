"""hvdkit stop: the command."""

from __future__ import annotations

import argparse

from hvdkit.errors import LaunchError
from hvdkit.launch.introspect.query_server import stop_job
from hvdkit.launch.job.runtime_dir import find_jobs
from hvdkit.tools.jobs.jobs import select_job

_EXPLANATION = """\
End one of your hvdrun jobs on this host by SIGTERM to hvdrun: ranks with a SIGTERM handler have hvdrun's --save-timeout
to save. The command returns when the job has ended, and prints its exit code.
"""

_EXAMPLES = """\
examples:
  hvdkit stop 12345         end this job; `hvdkit jobs` lists your jobs
  hvdkit stop --now 12345   end it without time to save, like Ctrl-C
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of hvdkit."""
    parser = commands.add_parser(
        "stop",
        help="end a running job, with time to save",
        description=_EXPLANATION,
        epilog=_EXAMPLES,
    )
    parser.add_argument("job", metavar="JOB", help="name of the job")
    parser.add_argument("--now", action="store_true", help="end the ranks without time to save, like Ctrl-C")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Carry out the command. Raises LaunchError if there is no such job, or if it does not answer."""
    directory = select_job("hvdkit stop", options.job, find_jobs())
    code = stop_job(directory, now=options.now)
    if code is None:
        raise LaunchError(
            f"Job {options.job} has ended; its hvdrun did not report an exit code. See the output of the job."
        )
    print(f"Job {options.job} has ended with exit code {code}.")
