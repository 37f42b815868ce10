"""The default hostfile of an MPI, named by a variable of Open MPI, MPICH or Intel MPI.

The MPI Operator of Kubernetes sets these variables in its launcher pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hvdkit.errors import LaunchError
from hvdkit.launch.hostfiles import FoundHosts, find_hostfile
from hvdkit.launch.hostfiles.names import is_slots

# The file, its dialect, and the variable with the slots of hosts that have none in the file. The MPI Operator writes
# pod:slots for Intel MPI too, which Intel's own -hostfile does not allow.
_VARIABLES = (
    ("PRTE_MCA_prte_default_hostfile", "openmpi", "PRTE_MCA_prte_set_default_slots"),
    ("OMPI_MCA_orte_default_hostfile", "openmpi", "OMPI_MCA_orte_set_default_slots"),
    ("HYDRA_HOST_FILE", "kubernetes", ""),
    ("I_MPI_HYDRA_HOST_FILE", "kubernetes", "I_MPI_PERHOST"),
)


def read_default_hostfile(environ: Mapping[str, str], slots: int | None = None) -> FoundHosts | None:
    """Read the hosts of the default hostfile; None if no variable names one."""
    for name, dialect, default in _VARIABLES:
        if name in environ:
            found = find_hostfile(environ[name], dialect, slots or _read_default_slots(environ, default))
            return replace(found, source=f"{name}={environ[name]}", allocated=True)
    return None


def _read_default_slots(environ: Mapping[str, str], name: str) -> int | None:
    value = environ.get(name, "").strip()
    if value in ("", "cores", "allcores", "all"):
        return None
    if not is_slots(value):
        raise LaunchError(
            f"{name}={value!r} is not a number of slots. Correct it, or use --slots-per-host, which overrides it."
        )
    return int(value)
