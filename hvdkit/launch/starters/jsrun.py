"""jsrun, inside a job of LSF with IBM's job step manager."""

from __future__ import annotations

import shlex

from hvdkit.errors import LaunchError
from hvdkit.launch.job import Job, Launch
from hvdkit.launch.starters.common import fill_hosts, refuse_ssh_options, refuse_users


def build_jsrun(job: Job, jsrun: str) -> Launch:
    """Build the command line for jsrun: one resource set a host, with all its cores and GPUs, which its ranks share.

    Raises LaunchError for hosts with different numbers of ranks, which resource sets of one kind cannot hold.
    """
    for refuse in (refuse_users, refuse_ssh_options):
        refuse(job, "jsrun")
    counts = [count for _, count in fill_hosts(job)]
    if len(set(counts)) > 1:
        fitting = min(counts) * len(counts)
        raise LaunchError(
            f"jsrun puts equally many ranks on each host, not {', '.join(map(str, counts))}. Ask for {fitting} ranks, "
            "or insist on another launcher: --launcher mpirun."
        )
    argv = [jsrun, "--nrs", str(len(counts)), "--rs_per_host", "1", "--tasks_per_rs", str(counts[0])]
    argv += ["--cpu_per_rs", "ALL_CPUS", "--gpu_per_rs", "ALL_GPUS"]
    argv += ["--bind", "none"] if job.binding is None else job.binding
    argv += ["--exit_on_error", "1"]
    library = [*(["-tcp"] if job.tcp else []), *job.starter_arguments]
    if library:  # as in Horovod, --mpi-args are for Spectrum MPI, and not for jsrun
        argv += ["--smpiargs", shlex.join(library)]
    return Launch((*argv, *job.agent_command), job.variables)
