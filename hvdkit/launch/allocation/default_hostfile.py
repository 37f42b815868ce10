"""The hostfile that an MPI would take by itself, from the variables of Open MPI, MPICH and Intel MPI.

The MPI Operator of Kubernetes sets them in its launcher pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hvdkit.errors import LaunchError
from hvdkit.launch.hosts.dialect import Dialect
from hvdkit.launch.hosts.files import find_hostfile
from hvdkit.launch.hosts.host import FoundHosts
from hvdkit.launch.hosts.kubernetes import KUBERNETES
from hvdkit.launch.hosts.names import is_slots
from hvdkit.launch.hosts.openmpi import OPENMPI

# The file, its dialect, and the variable with the slots of hosts that have none in the file. The MPI Operator writes
# pod:slots for Intel MPI too, which is no dialect of Intel's -hostfile.
_VARIABLES: tuple[tuple[str, Dialect, str], ...] = (
    ("PRTE_MCA_prte_default_hostfile", OPENMPI, "PRTE_MCA_prte_set_default_slots"),
    ("OMPI_MCA_orte_default_hostfile", OPENMPI, "OMPI_MCA_orte_set_default_slots"),
    ("HYDRA_HOST_FILE", KUBERNETES, ""),
    ("I_MPI_HYDRA_HOST_FILE", KUBERNETES, "I_MPI_PERHOST"),
)


def read(environ: Mapping[str, str], slots: int | None = None) -> FoundHosts | None:
    """Read the hosts of the default hostfile; None if no variable names one."""
    for name, dialect, default in _VARIABLES:
        if name in environ:
            found = find_hostfile(environ[name], dialect.name, slots or _read_default(environ, default))
            return replace(found, source=f"{name}={environ[name]}", allocated=True)
    return None


def _read_default(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "").strip()
    if value in ("", "cores", "allcores", "all"):
        return None
    if not is_slots(value):
        raise LaunchError(f"{name}={value!r} is not a number of slots. Say --slots-per-host, which goes before it.")
    return int(value)
