"""mpirun of Intel MPI."""

from __future__ import annotations

from hvdkit.launch.environment import select_forwarded
from hvdkit.launch.job import Job, Launch
from hvdkit.launch.mpi import Mpi
from hvdkit.launch.starters.common import (
    fill_hosts,
    library_variables,
    refuse_ipv6,
    refuse_users,
    unless_set,
)


def build_intel_mpi(job: Job, mpi: Mpi, *, ssh: bool = False) -> Launch:
    """Build the command line for Intel MPI: one part a host, because its -hosts takes no slots.

    ssh: start its proxies with ssh also where the scheduler could.
    """
    refuse_ipv6(job, mpi.name)
    refuse_users(job, mpi.name)
    variables = {**job.variables, **library_variables(job, mpi)}
    if job.binding is None:
        variables.update(unless_set({"I_MPI_PIN": "0"}, job.environ))
    if job.tcp:
        variables.update(unless_set({"FI_PROVIDER": "tcp"}, job.environ))
    argv = [mpi.mpirun]
    if not job.local:
        argv += ["-bootstrap", "ssh"] if ssh else []
        argv += ["-genvlist", ",".join(select_forwarded({**job.environ, **variables}))]
        if job.ssh_options:
            extra = {"I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": " ".join(job.ssh_options)}
            variables.update(unless_set(extra, job.environ))
    argv += [*(job.binding or ()), *job.starter_arguments]
    parts = [["-n", str(count), "-host", name, *job.agent_command] for name, count in fill_hosts(job)]
    for number, part in enumerate(parts):
        argv += [":", *part] if number else part
    return Launch(tuple(argv), variables)
