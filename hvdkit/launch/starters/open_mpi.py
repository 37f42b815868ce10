"""mpirun of Open MPI."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from hvdkit.launch.environment import select_forwarded
from hvdkit.launch.job import Job, Launch
from hvdkit.launch.mpi import Mpi
from hvdkit.launch.starters.common import library_variables, refuse_ipv6, ssh_options, unless_set

# Inside one host nothing but shared memory is needed; looking for libfabric and UCX costs a second at each start.
_LOCAL_PARAMETERS = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^ofi,uct", "OMPI_MCA_osc": "^ucx"}
# Ranks survive each other's end, those too that ranks have started together (recoverable), and do not wait at their own
# for hosts that have no rank left. Every daemon hangs on mpirun itself: by default the 65th and those after it hang on
# others, and would end with them.
_ELASTIC = (
    *("--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1"),
    *("--prtemca", "state_base_recoverable", "1", "--prtemca", "rml_base_radix", "4096"),
)
_BINDING = ("--map-by", "slot", "--bind-to", "none")


def build_open_mpi(job: Job, mpi: Mpi, *, ssh: bool = False) -> Launch:
    """Build the command line for Open MPI 4 (ORTE) or 5 and later (PRRTE).

    Ranks are not bound to cores: a rank has threads (data loading, progress), and by default Open MPI binds.
    ssh: start its daemons with ssh also where the scheduler could.
    """
    refuse_ipv6(job, mpi.name)
    argv = [mpi.mpirun]
    if job.root:
        argv.append("--allow-run-as-root")
    argv += ["-np", str(job.ranks), "--host", ",".join(_write_places(job))]
    argv += _BINDING if job.binding is None else job.binding
    variables = {**job.variables, **library_variables(job, mpi)}
    if job.elastic:
        argv += _ELASTIC
    if job.tcp:
        # By name, as Open MPI 4 and 5 call shared memory differently; it stays in use inside a host.
        variables.update(unless_set({"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^ofi,uct,openib,usnic"}, job.environ))
    if job.local:
        variables.update(unless_set(_LOCAL_PARAMETERS, {**job.environ, **variables}))
    else:
        argv += _write_daemons(job, mpi, ssh)
        for name in select_forwarded({**job.environ, **variables}):
            argv += ["-x", name]
    return Launch((*argv, *job.starter_arguments, *job.agent_command), variables)


def _write_places(job: Job) -> Iterable[str]:
    if job.local:
        return [f"localhost:{job.ranks}"]  # as many slots as ranks: more ranks than cores are no error here
    return [f"{host.login}:{'auto' if host.slots is None else host.slots}" for host in job.hosts]


def _write_daemons(job: Job, mpi: Mpi, ssh: bool) -> list[str]:
    option, prefix, agent, name = (
        ("--prtemca", "PRTE", "plm_ssh_agent", "ssh") if mpi.major >= 5 else ("--mca", "OMPI", "plm_rsh_agent", "rsh")
    )
    # Neither started by the scheduler nor held to its idea of slots.
    chosen = [option, "plm", name, option, "ras", "^slurm,tm,lsf,gridengine" if mpi.major < 5 else "^slurm,pbs,lsf"]
    words = chosen if ssh else []
    if any(f"{prefix}_MCA_{each}" in job.environ for each in ("plm_ssh_agent", "plm_rsh_agent")):
        return words  # the user has an ssh of their own
    # Without tree spawn every ssh is started here. Open MPI 5's daemons would get the options cut off at the first "=".
    no_tree = agent.replace("agent", "no_tree_spawn")
    return [*words, option, agent, shlex.join(["ssh", *ssh_options(job)]), option, no_tree, "1"]
