"""Which running job of this user a command is about."""

from __future__ import annotations

from collections.abc import Mapping

from hvdkit.errors import LaunchError
from hvdkit.launch.introspect.query_server import query_job
from hvdkit.launch.job.ranks import count_ranks


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
    lines = [f"  {command} {each}    {_describe(folder)}" for each, folder in jobs.items()]
    problem = "You have several jobs on this host" if name is None else f"You have no job {name} on this host"
    raise LaunchError("\n".join([f"{problem}. Choose one:", *lines]))


def _describe(folder: str) -> str:
    try:
        job = query_job(folder, "job")["job"]
    except LaunchError as error:
        return str(error)
    return f"{count_ranks(job['size'])} of {job['command']}"
