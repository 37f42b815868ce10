"""SGE's allocation (Grid Engine and its descendants)."""

from __future__ import annotations

from collections.abc import Mapping

from hvdkit.launch.allocation.file import read_listed
from hvdkit.launch.hosts.host import FoundHosts
from hvdkit.launch.hosts.sge import SGE

_MORE = "ask for more with qsub -pe, or say how many here with --slots-per-host"


def read(environ: Mapping[str, str], slots: int | None = None) -> FoundHosts | None:
    """Read the hosts of a parallel environment; None outside of one."""
    path = environ.get("PE_HOSTFILE")
    if path is None:
        return None
    return read_listed(SGE, path, f"SGE job {environ.get('JOB_ID', '')}".rstrip(), slots, more=_MORE)
