"""An MPI's launcher, as data, and Open MPI's parameters without libfabric and UCX."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Open MPI's parameters that skip the detection of libfabric and UCX, which takes a second at each start: for ranks of
#: one host, and for hosts with no network faster than TCP.
WITHOUT_FABRICS = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^ofi,uct", "OMPI_MCA_osc": "^ucx"}


@dataclass(frozen=True)
class Mpi:
    """An MPI's launcher.

    kind: open_mpi, mpich, intel_mpi or pals.
    site: found on PATH outside this Python's prefix; otherwise it came with the Python environment.
    library: the libmpi installed with it; "" if it is not found.
    session_base: a parameter file of Open MPI 5 sets the parent of the sessions' directories.
    """

    kind: str
    name: str
    version: str
    mpirun: str
    site: bool = False
    library: str = ""
    session_base: bool = False

    @property
    def major(self) -> int:
        """The first number of the version; 0 without one."""
        digits = re.match(r"\d+", self.version)
        return int(digits.group()) if digits else 0
