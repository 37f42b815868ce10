"""Hosts of the allocation that hvdrun runs in, from the variables that the scheduler sets."""

from __future__ import annotations

from collections.abc import Mapping

from hvdkit.launch.allocations.sagemaker import read_default_hostfile, read_sagemaker
from hvdkit.launch.allocations.schedulers import SCHEDULERS
from hvdkit.launch.hostfiles import FoundHosts


def read_allocation(environ: Mapping[str, str], slots: int | None = None) -> FoundHosts | None:
    """Find the hosts of this job; None outside of any allocation.

    environ: the variables; an empty one counts as not set.
    slots: the user's number for every host, in place of the scheduler's; None for the scheduler's.
    Raises LaunchError for an allocation that cannot be parsed: it is never treated as no allocation.
    """
    variables = {name: value for name, value in environ.items() if value.strip()}
    # The default hostfile comes last: inside a scheduler's job the scheduler's list takes precedence.
    for read in (*(scheduler.read for scheduler in SCHEDULERS), read_sagemaker, read_default_hostfile):
        found = read(variables, slots)
        if found is not None:
            return found
    return None
