"""Find the hosts of the allocation that hvdrun runs in, from the scheduler's variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hvdkit.launch.allocations.sagemaker import read_default_hostfile, read_sagemaker
from hvdkit.launch.allocations.schedulers import SET_SLOTS, AllocationReader, list_schedulers
from hvdkit.launch.hostfiles import FoundHosts, Host
from hvdkit.launch.hostfiles.names import set_slots

__all__ = ["AllocationReader", "FoundHosts", "Host", "read_allocation"]


def read_allocation(environ: Mapping[str, str], slots: int | None = None) -> FoundHosts | None:
    """Find the hosts of this job; None outside of any allocation.

    environ: the variables; an empty variable counts as not set.
    slots: the user's number for every host, in place of the scheduler's; None for the scheduler's.
    Raises LaunchError for an allocation that cannot be parsed: it is never treated as no allocation.
    """
    variables = {name: value for name, value in environ.items() if value.strip()}
    for read in (*(scheduler.read for scheduler in list_schedulers()), read_sagemaker):
        found = read(variables)
        if found is not None:
            found = replace(
                found, more_slots_hint=", or ".join(filter(None, (found.more_slots_hint, SET_SLOTS))), allocated=True
            )
            if slots:
                return replace(found, hosts=set_slots(found.hosts, slots), ranks=None)
            return replace(found, notes=(*found.notes, *filter(None, (found.slots_hint,))))
    # Last, because inside a scheduler's job the scheduler's list takes precedence.
    return read_default_hostfile(variables, slots)
