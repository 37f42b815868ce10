"""What several starters need."""

from __future__ import annotations

from collections.abc import Mapping

from hvdkit.errors import LaunchError
from hvdkit.launch.hosts import Host
from hvdkit.launch.job import Job, plan_places
from hvdkit.launch.mpi import Mpi

# Never ask for a password, give up on a silent host, and notice a lost one: mpirun by itself waits for hours.
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_NOTICE_LOSS = ("-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=3")


def ssh_options(job: Job) -> tuple[str, ...]:
    """Make the options that ssh is given, with the user's own.

    Where other hosts outlive a lost one, mpirun is not to notice: it ends the job. hvdrun does by itself.
    """
    return (*SSH_OPTIONS, *(() if job.elastic else _NOTICE_LOSS), *job.ssh_options)


def library_variables(job: Job, mpi: Mpi) -> dict[str, str]:
    """Make mpi4py load the libmpi of this mpirun: by itself it prefers the wheel's, and each rank would be alone."""
    chosen = "MPI4PY_LIBMPI" in job.environ or "MPI4PY_MPIABI" in job.environ
    return {"MPI4PY_LIBMPI": mpi.library} if mpi.site and mpi.library and not chosen else {}


def unless_set(variables: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Leave out the variables that the user has set."""
    return {name: value for name, value in variables.items() if name not in environ}


def fill_hosts(job: Job) -> tuple[tuple[str, int], ...]:
    """Fill the hosts in their order: (name, ranks) of each that gets any."""
    return plan_places(job.ranks, job.hosts if not job.local else (Host("localhost", job.ranks),))


def refuse_ipv6(job: Job, who: str) -> None:
    """Raise LaunchError for addresses that a starter's list of hosts has no way to write."""
    addresses = [host.name for host in job.hosts if ":" in host.name]
    if addresses and not job.local:
        raise LaunchError(
            f"{who} cannot take an IPv6 address on its command line: {', '.join(addresses)}. "
            "Give the host a name in /etc/hosts or in DNS, and use that."
        )


def refuse_users(job: Job, who: str) -> None:
    """Raise LaunchError for hosts with a user name, where a starter knows only hosts."""
    logins = [host.login for host in job.hosts if host.user]
    if logins:
        raise LaunchError(
            f"{who} cannot take a user name with a host: {', '.join(logins)}. "
            "Put 'User NAME' for that host in ~/.ssh/config, and use the host's name alone."
        )


def refuse_ssh_options(job: Job, who: str) -> None:
    """Raise LaunchError for -p and -i, where there is no ssh."""
    if job.ssh_options:
        raise LaunchError(
            f"{who} does not use ssh, so -p and -i mean nothing to it. Leave them out, or: --launcher ssh."
        )
