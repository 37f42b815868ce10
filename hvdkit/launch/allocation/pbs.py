"""PBS's allocation (PBS Pro, OpenPBS, Torque)."""

from __future__ import annotations

from collections.abc import Mapping

from hvdkit.launch.allocation.file import read_listed
from hvdkit.launch.hosts.host import FoundHosts
from hvdkit.launch.hosts.pbs import PBS

_MORE = "ask PBS for more with select=...:mpiprocs=N, or say how many here with --slots-per-host"


def read(environ: Mapping[str, str], slots: int | None = None) -> FoundHosts | None:
    """Read the hosts of a PBS job from its nodefile; None outside of PBS."""
    path = environ.get("PBS_NODEFILE")
    if path is None:
        return None
    source = f"PBS job {environ.get('PBS_JOBID', '')}".rstrip()
    return read_listed(PBS, path, source, slots, more=_MORE, once="Its nodefile names each host once")
