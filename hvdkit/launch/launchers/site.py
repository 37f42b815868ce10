"""The launchers of certain sites: mpiexec of Cray PALS, and jsrun of IBM's job step manager under LSF."""

from __future__ import annotations

import shlex

from hvdkit.errors import LaunchError
from hvdkit.launch.launchers.common import (
    LIBFABRIC_TCP,
    fill_hosts,
    refuse_ipv6,
    refuse_ssh_options,
    refuse_users,
    unless_set,
)
from hvdkit.launch.plan.job import Job, Launch
from hvdkit.launch.plan.launcher_choice import LauncherChoice

_PALS = "mpiexec of Cray PALS"


def build_pals(job: Job, choice: LauncherChoice) -> Launch:
    """Build the command line for PALS, which sends the whole environment and fills the hosts with --ppn ranks each.

    Raises LaunchError for hosts with different numbers of ranks, which it cannot express.
    """
    for refuse in (refuse_ipv6, refuse_users, refuse_ssh_options):
        refuse(job, _PALS)
    places = fill_hosts(job)
    counts = [count for _, count in places]
    if any(count != counts[0] for count in counts[:-1]) or counts[-1] > counts[0]:
        raise LaunchError(
            f"{_PALS} puts the same number of ranks on each host, not "
            f"{', '.join(f'{name}:{count}' for name, count in places)}. Give all hosts the same number of slots, or "
            f"request {min(counts) * len(counts)} ranks."
        )
    argv = [choice.own_mpi.mpirun, "-n", str(job.ranks)]
    if not job.local:
        argv += ["--ppn", str(counts[0]), "--hosts", ",".join(name for name, _ in places)]
    argv += ["--cpu-bind", "none"] if job.binding is None else job.binding
    tcp = unless_set(LIBFABRIC_TCP, job.environ) if job.tcp else {}
    return Launch((*argv, *job.launcher_arguments, *job.agent_command), {**job.variables, **tcp})


def build_jsrun(job: Job, choice: LauncherChoice) -> Launch:
    """Build the command line for jsrun: one resource set per host, with all its cores and GPUs, shared by its ranks.

    Raises LaunchError for hosts with different numbers of ranks, which resource sets of one kind cannot express.
    """
    for refuse in (refuse_users, refuse_ssh_options):
        refuse(job, "jsrun")
    counts = [count for _, count in fill_hosts(job)]
    if len(set(counts)) > 1:
        raise LaunchError(
            f"jsrun puts the same number of ranks on each host, not {', '.join(map(str, counts))}. "
            f"Request {min(counts) * len(counts)} ranks, or use another launcher: --launcher mpirun."
        )
    argv = [choice.program, "--nrs", str(len(counts)), "--rs_per_host", "1", "--tasks_per_rs", str(counts[0])]
    argv += ["--cpu_per_rs", "ALL_CPUS", "--gpu_per_rs", "ALL_GPUS"]
    argv += ["--bind", "none"] if job.binding is None else job.binding
    argv += ["--exit_on_error", "1"]
    library = [*(["-tcp"] if job.tcp else []), *job.launcher_arguments]
    if library:  # as in Horovod, --mpi-args are for Spectrum MPI, not for jsrun
        argv += ["--smpiargs", shlex.join(library)]
    return Launch((*argv, *job.agent_command), job.variables)
