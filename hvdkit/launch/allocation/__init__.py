"""Hosts from the allocation that hvdrun runs in, read from the variables that the scheduler sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hvdkit.launch.allocation import default_hostfile, lsf, pbs, sge, slurm
from hvdkit.launch.hosts import FoundHosts

# A launcher pod's hostfile comes last: inside a scheduler's job the scheduler knows better.
_READERS: tuple[Callable[[Mapping[str, str], int | None], FoundHosts | None], ...] = (
    slurm.read,
    pbs.read,
    lsf.read,
    sge.read,
    default_hostfile.read,
)


def read_allocation(environ: Mapping[str, str], slots: int | None = None) -> FoundHosts | None:
    """Find the hosts of this job; None outside of any allocation.

    environ: the variables; one that is empty counts as not set.
    slots: what the user wants on every host, whatever the scheduler counts; None for its own count.
    Raises LaunchError for an allocation that cannot be understood: it is never taken for none.
    """
    variables = {name: value for name, value in environ.items() if value.strip()}
    for read in _READERS:
        found = read(variables, slots)
        if found is not None:
            return found
    return None
