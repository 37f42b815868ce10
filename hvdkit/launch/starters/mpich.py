"""mpiexec (Hydra) of MPICH."""

from __future__ import annotations

from hvdkit.launch.environment import select_forwarded
from hvdkit.launch.job import Job, Launch
from hvdkit.launch.mpi import Mpi
from hvdkit.launch.starters.common import library_variables, refuse_ipv6, refuse_users, ssh_options, unless_set


def build_mpich(job: Job, mpi: Mpi, *, ssh: bool = False) -> Launch:
    """Build the command line for MPICH's Hydra, which neither binds nor counts slots by itself.

    ssh: start its proxies with ssh also where the scheduler could.
    """
    refuse_ipv6(job, mpi.name)
    refuse_users(job, mpi.name)
    variables = {**job.variables, **library_variables(job, mpi)}
    if job.tcp:
        variables.update(unless_set({"FI_PROVIDER": "tcp", "UCX_TLS": "tcp,self,sm"}, job.environ))
    argv = [mpi.mpirun, "-n", str(job.ranks)]
    if job.local:
        argv += ["-hosts", f"localhost:{job.ranks}"]
    else:
        argv += ["-launcher", "ssh"] if ssh else []
        argv += ["-hosts", ",".join(f"{host.name}:{host.slots or 1}" for host in job.hosts)]
        argv += ["-genvlist", ",".join(select_forwarded({**job.environ, **variables}))]
        variables.update(unless_set({"HYDRA_LAUNCHER_EXTRA_ARGS": " ".join(ssh_options(job))}, job.environ))
    argv += job.binding or ()
    return Launch((*argv, *job.starter_arguments, *job.agent_command), variables)
