"""mpiexec of Cray PALS."""

from __future__ import annotations

from hvdkit.errors import LaunchError
from hvdkit.launch.job import Job, Launch
from hvdkit.launch.starters.common import fill_hosts, refuse_ipv6, refuse_ssh_options, refuse_users, unless_set

_NAME = "mpiexec of Cray PALS"


def build_pals(job: Job, mpiexec: str) -> Launch:
    """Build the command line for PALS, which sends the whole environment and fills the hosts with --ppn ranks each.

    Raises LaunchError for hosts with different numbers of slots, which it has no way to write.
    """
    for refuse in (refuse_ipv6, refuse_users, refuse_ssh_options):
        refuse(job, _NAME)
    argv = [mpiexec, "-n", str(job.ranks)]
    counts = [count for _, count in fill_hosts(job)]
    if any(count != counts[0] for count in counts[:-1]) or counts[-1] > counts[0]:
        places = ", ".join(f"{name}:{count}" for name, count in fill_hosts(job))
        raise LaunchError(
            f"{_NAME} puts equally many ranks on each host, not {places}. Give all hosts as many slots, or ask for "
            f"{min(counts) * len(counts)} ranks."
        )
    if not job.local:
        argv += ["--ppn", str(counts[0]), "--hosts", ",".join(name for name, _ in fill_hosts(job))]
    argv += ["--cpu-bind", "none"] if job.binding is None else job.binding
    tcp = unless_set({"FI_PROVIDER": "tcp"}, job.environ) if job.tcp else {}
    return Launch((*argv, *job.starter_arguments, *job.agent_command), {**job.variables, **tcp})
