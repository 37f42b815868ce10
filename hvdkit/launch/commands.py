"""The command line that starts a job, for each MPI. Nothing is started here."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping

from hvdkit.errors import LaunchError
from hvdkit.launch.environment import select_forwarded
from hvdkit.launch.hosts import Host
from hvdkit.launch.job import Job, Launch
from hvdkit.launch.mpi import Mpi

# Never ask for a password, give up on a silent host, and notice a lost one: mpirun by itself waits for hours.
SSH_OPTIONS = (
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=2"),
    *("-o", "ServerAliveCountMax=3"),
)

# Inside one host nothing but shared memory is needed; looking for libfabric and UCX costs a second at each start.
_LOCAL_PARAMETERS = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^ofi,uct", "OMPI_MCA_osc": "^ucx"}


def build_launch(job: Job, mpi: Mpi) -> Launch:
    """Build the command line for whichever MPI was found."""
    return _BUILDERS[mpi.kind](job, mpi)


def build_open_mpi(job: Job, mpi: Mpi) -> Launch:
    """Build the command line for Open MPI 4 (ORTE) or 5 and later (PRRTE).

    Ranks are not bound to cores: a rank has threads (data loading, progress), and by default Open MPI binds.
    """
    _refuse_ipv6(job, mpi)
    argv = [mpi.mpirun]
    if job.root:
        argv.append("--allow-run-as-root")
    argv += ["-np", str(job.ranks), "--host", ",".join(_open_mpi_places(job))]
    argv += ["--map-by", "slot", "--bind-to", "none"]
    variables = {**job.variables, **_library_variables(job, mpi)}
    if job.local:
        variables.update(_unless_set(_LOCAL_PARAMETERS, job.environ))
    else:
        argv += _ssh_arguments(job, mpi)
        for name in select_forwarded({**job.environ, **variables}):
            argv += ["-x", name]
    return Launch((*argv, *job.agent_command), variables)


def build_mpich(job: Job, mpi: Mpi) -> Launch:
    """Build the command line for MPICH's Hydra, which neither binds nor counts slots by itself."""
    _refuse_ipv6(job, mpi)
    _refuse_users(job, mpi)
    variables = {**job.variables, **_library_variables(job, mpi)}
    argv = [mpi.mpirun, "-n", str(job.ranks)]
    if job.local:
        argv += ["-hosts", f"localhost:{job.ranks}"]
    else:
        argv += ["-hosts", ",".join(f"{host.name}:{host.slots or 1}" for host in job.hosts)]
        argv += ["-genvlist", ",".join(select_forwarded({**job.environ, **variables}))]
        variables.update(_unless_set({"HYDRA_LAUNCHER_EXTRA_ARGS": " ".join(SSH_OPTIONS)}, job.environ))
    return Launch((*argv, *job.agent_command), variables)


def build_intel_mpi(job: Job, mpi: Mpi) -> Launch:
    """Build the command line for Intel MPI: one part a host, because its -hosts takes no slots."""
    _refuse_ipv6(job, mpi)
    _refuse_users(job, mpi)
    variables = {**job.variables, **_library_variables(job, mpi), **_unless_set({"I_MPI_PIN": "0"}, job.environ)}
    argv = [mpi.mpirun]
    if not job.local:
        argv += ["-genvlist", ",".join(select_forwarded({**job.environ, **variables}))]
    parts = [["-n", str(count), "-host", name, *job.agent_command] for name, count in _fill(job)]
    for number, part in enumerate(parts):
        argv += [":", *part] if number else part
    return Launch(tuple(argv), variables)


_BUILDERS: Mapping[str, Callable[[Job, Mpi], Launch]] = {
    "open_mpi": build_open_mpi,
    "mpich": build_mpich,
    "intel_mpi": build_intel_mpi,
}


def _open_mpi_places(job: Job) -> Iterable[str]:
    if job.local:
        return [f"localhost:{job.ranks}"]  # as many slots as ranks: more ranks than cores are no error here
    return [f"{host.login}:{'auto' if host.slots is None else host.slots}" for host in job.hosts]


def _ssh_arguments(job: Job, mpi: Mpi) -> list[str]:
    option, prefix, agent = (
        ("--prtemca", "PRTE", "plm_ssh_agent") if mpi.major >= 5 else ("--mca", "OMPI", "plm_rsh_agent")
    )
    if any(f"{prefix}_MCA_{name}" in job.environ for name in ("plm_ssh_agent", "plm_rsh_agent")):
        return []  # the user has an ssh of their own
    # Without tree spawn every ssh is started here. Open MPI 5's daemons would get the options cut off at the first "=".
    no_tree = agent.replace("agent", "no_tree_spawn")
    return [option, agent, shlex.join(["ssh", *SSH_OPTIONS]), option, no_tree, "1"]


def _library_variables(job: Job, mpi: Mpi) -> dict[str, str]:
    """Make mpi4py load the libmpi of this mpirun: by itself it prefers the wheel's, and each rank would be alone."""
    chosen = "MPI4PY_LIBMPI" in job.environ or "MPI4PY_MPIABI" in job.environ
    return {"MPI4PY_LIBMPI": mpi.library} if mpi.site and mpi.library and not chosen else {}


def _unless_set(variables: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in environ}


def _fill(job: Job) -> Iterable[tuple[str, int]]:
    left = job.ranks
    for host in job.hosts if not job.local else (Host("localhost", job.ranks),):
        count = min(left, host.slots or left)
        if count:
            yield host.name, count
        left -= count


def _refuse_ipv6(job: Job, mpi: Mpi) -> None:
    addresses = [host.name for host in job.hosts if ":" in host.name]
    if addresses and not job.local:
        raise LaunchError(
            f"{mpi.name} cannot take an IPv6 address on its command line: {', '.join(addresses)}. "
            "Give the host a name in /etc/hosts or in DNS, and use that."
        )


def _refuse_users(job: Job, mpi: Mpi) -> None:
    logins = [host.login for host in job.hosts if host.user]
    if logins:
        raise LaunchError(
            f"{mpi.name} cannot take a user name with a host: {', '.join(logins)}. "
            "Put 'User NAME' for that host in ~/.ssh/config, and use the host's name alone."
        )
