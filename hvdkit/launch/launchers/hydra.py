"""The launchers based on Hydra: mpiexec of MPICH, mpirun of Intel MPI."""

from __future__ import annotations

from hvdkit.launch.launchers.common import (
    LIBFABRIC_TCP,
    fill_hosts,
    forwarded_names,
    job_ssh_options,
    library_variables,
    refuse_ipv6,
    refuse_users,
    unless_set,
)
from hvdkit.launch.plan.job import Job, Launch
from hvdkit.launch.plan.launcher_choice import LauncherChoice


def build_mpich(job: Job, choice: LauncherChoice) -> Launch:
    """Build the command line for MPICH, which by default neither binds ranks nor counts slots."""
    mpi = choice.own_mpi
    refuse_ipv6(job, mpi.name)
    refuse_users(job, mpi.name)
    variables = {**job.variables, **library_variables(job, mpi)}
    if job.tcp:
        variables.update(unless_set({**LIBFABRIC_TCP, "UCX_TLS": "tcp,self,sm"}, job.environ))
    argv = [mpi.mpirun, "-n", str(job.ranks)]
    if job.local:
        argv += ["-hosts", f"localhost:{job.ranks}"]
    else:
        argv += ["-launcher", "ssh"] if choice.ssh else []
        argv += ["-hosts", ",".join(f"{host.name}:{host.slots or 1}" for host in job.hosts)]
        argv += ["-genvlist", ",".join(forwarded_names(job, variables))]
        variables.update(unless_set({"HYDRA_LAUNCHER_EXTRA_ARGS": " ".join(job_ssh_options(job))}, job.environ))
    argv += job.binding or ()
    return Launch((*argv, *job.launcher_arguments, *job.agent_command), variables)


def build_intel_mpi(job: Job, choice: LauncherChoice) -> Launch:
    """Build the command line for Intel MPI: one section per host, because its -hosts accepts no slots."""
    mpi = choice.own_mpi
    refuse_ipv6(job, mpi.name)
    refuse_users(job, mpi.name)
    variables = {**job.variables, **library_variables(job, mpi)}
    if job.binding is None:
        variables.update(unless_set({"I_MPI_PIN": "0"}, job.environ))
    if job.tcp:
        variables.update(unless_set(LIBFABRIC_TCP, job.environ))
    argv = [mpi.mpirun]
    if not job.local:
        argv += ["-bootstrap", "ssh"] if choice.ssh else []
        argv += ["-genvlist", ",".join(forwarded_names(job, variables))]
        if job.ssh_options:
            extra = {"I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": " ".join(job.ssh_options)}
            variables.update(unless_set(extra, job.environ))
    argv += [*(job.binding or ()), *job.launcher_arguments]
    sections = [["-n", str(count), "-host", name, *job.agent_command] for name, count in fill_hosts(job)]
    for number, section in enumerate(sections):
        argv += [":", *section] if number else section
    return Launch(tuple(argv), variables)
