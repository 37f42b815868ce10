"""mpirun of Open MPI."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from hvdkit.launch.launchers.common import (
    OPEN_MPI_TCP,
    forwarded_names,
    job_ssh_options,
    library_variables,
    refuse_ipv6,
    unless_set,
)
from hvdkit.launch.plan.job import Job, Launch
from hvdkit.launch.plan.launcher_choice import LauncherChoice
from hvdkit.launch.plan.mpi import WITHOUT_FABRICS, Mpi

# Ranks survive each other's end, also ranks that other ranks have started (recoverable), and do not wait at their own
# end for hosts without ranks. Every daemon connects to mpirun itself: by default the 65th and later ones connect
# through others, and would end with them.
_ELASTIC = (
    *("--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1"),
    *("--prtemca", "state_base_recoverable", "1", "--prtemca", "rml_base_radix", "4096"),
)
_BINDING = ("--map-by", "slot", "--bind-to", "none")


def build_open_mpi(job: Job, choice: LauncherChoice) -> Launch:
    """Build the command line for Open MPI 4 (ORTE) or 5 and later (PRRTE).

    Ranks are not bound to cores: a rank has threads (data loading, progress), and by default Open MPI binds.
    """
    mpi = choice.own_mpi
    refuse_ipv6(job, mpi.name)
    argv = [mpi.mpirun]
    if job.root:
        argv.append("--allow-run-as-root")
    argv += ["-np", str(job.ranks), "--host", ",".join(_format_hosts(job))]
    argv += _BINDING if job.binding is None else job.binding
    variables = {**job.variables, **library_variables(job, mpi)}
    if job.elastic:
        argv += _ELASTIC
    if job.tcp:
        variables.update(unless_set(OPEN_MPI_TCP, job.environ))
    if job.local:
        # Inside one host shared memory suffices; detecting fabrics costs a second at each start.
        variables.update(unless_set(WITHOUT_FABRICS, {**job.environ, **variables}))
    else:
        argv += _daemon_parameters(job, mpi, choice.ssh)
        for name in forwarded_names(job, variables):
            argv += ["-x", name]
    return Launch((*argv, *job.launcher_arguments, *job.agent_command), variables)


def _format_hosts(job: Job) -> Iterable[str]:
    if job.local:
        return [f"localhost:{job.ranks}"]  # as many slots as ranks: more ranks than cores are no error here
    return [f"{host.login}:{'auto' if host.slots is None else host.slots}" for host in job.hosts]


def _daemon_parameters(job: Job, mpi: Mpi, ssh: bool) -> list[str]:
    option, prefix, agent, name = (
        ("--prtemca", "PRTE", "plm_ssh_agent", "ssh") if mpi.major >= 5 else ("--mca", "OMPI", "plm_rsh_agent", "rsh")
    )
    # Neither started by the scheduler nor limited to its number of slots.
    over_ssh = [option, "plm", name, option, "ras", "^slurm,tm,lsf,gridengine" if mpi.major < 5 else "^slurm,pbs,lsf"]
    words = over_ssh if ssh else []
    if any(f"{prefix}_MCA_{each}" in job.environ for each in ("plm_ssh_agent", "plm_rsh_agent")):
        return words  # the user's own ssh
    # Without tree spawn every ssh is started here. Open MPI 5's daemons would get the options cut off at the first "=".
    no_tree = agent.replace("agent", "no_tree_spawn")
    return [*words, option, agent, shlex.join(["ssh", *job_ssh_options(job)]), option, no_tree, "1"]
