"""Parts of command lines that several launchers have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdkit.errors import LaunchError
from hvdkit.launch.hostfiles import Host
from hvdkit.launch.plan.environment import select_forwarded
from hvdkit.launch.plan.job import Job, plan_places
from hvdkit.launch.plan.mpi import Mpi

#: Only TCP between hosts. By name, as Open MPI 4 and 5 name shared memory differently; it stays in use inside a host.
OPEN_MPI_TCP = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^ofi,uct,openib,usnic"}
#: The same for libfabric, under MPICH, Intel MPI and Cray MPICH.
LIBFABRIC_TCP = {"FI_PROVIDER": "tcp"}

_KEEPALIVE = ("-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=3")


def ssh_options(own: Sequence[str] = (), *, timeout_s: int = 10, keepalive: bool = True) -> tuple[str, ...]:
    """Build the options for ssh: no password prompt, a limit for connecting, and detection of a lost host.

    own: the user's -p and -i. keepalive: ssh ends when its host is lost; by default it waits for hours.
    """
    return ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={timeout_s}", *(_KEEPALIVE if keepalive else ()), *own)


def job_ssh_options(job: Job) -> tuple[str, ...]:
    """Build a job's options for ssh.

    In an elastic job mpirun must not detect a lost host, as it would end the job. hvdrun detects it.
    """
    return ssh_options(job.ssh_options, keepalive=not job.elastic)


def forwarded_names(job: Job, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Name the variables to send to other hosts. variables: those that hvdrun sets."""
    return select_forwarded({**job.environ, **variables}, job.forwarded)


def library_variables(job: Job, mpi: Mpi) -> dict[str, str]:
    """Make mpi4py load the libmpi of this mpirun; by default it prefers the wheel's, and each rank would be alone."""
    chosen = "MPI4PY_LIBMPI" in job.environ or "MPI4PY_MPIABI" in job.environ
    return {"MPI4PY_LIBMPI": mpi.library} if mpi.site and mpi.library and not chosen else {}


def unless_set(variables: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Leave out the variables that the user has set."""
    return {name: value for name, value in variables.items() if name not in environ}


def fill_hosts(job: Job) -> tuple[tuple[str, int], ...]:
    """Fill the hosts in their order; returns (name, ranks) of each host with ranks."""
    return plan_places(job.ranks, job.hosts if not job.local else (Host("localhost", job.ranks),))


def refuse_ipv6(job: Job, launcher: str) -> None:
    """Raise LaunchError for addresses that a launcher's list of hosts cannot have."""
    addresses = [host.name for host in job.hosts if ":" in host.name]
    if addresses and not job.local:
        raise LaunchError(
            f"{launcher} does not accept an IPv6 address on its command line: {', '.join(addresses)}. "
            "Give the host a name in /etc/hosts or in DNS, and use that name."
        )


def refuse_users(job: Job, launcher: str) -> None:
    """Raise LaunchError for hosts with a user, where a launcher accepts hosts only."""
    logins = [host.login for host in job.hosts if host.user]
    if logins:
        raise LaunchError(
            f"{launcher} does not accept a user name with a host: {', '.join(logins)}. "
            "Write 'User NAME' for that host in ~/.ssh/config, and use the host's name alone."
        )


def refuse_ssh_options(job: Job, launcher: str) -> None:
    """Raise LaunchError for -p and -i, where no ssh is used."""
    if job.ssh_options:
        raise LaunchError(
            f"{launcher} does not use ssh, so -p and -i have no effect. Remove them, or use --launcher ssh."
        )
