"""Which rank this is, and what depends on the host it runs on."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import NamedTuple

_RANKS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("PMIX_RANK", "", ""),
)


class Place(NamedTuple):
    """A rank's place in the job; 0 for a size that the launcher does not tell."""

    rank: int
    size: int
    local_size: int
    host: str


def read_place(environ: Mapping[str, str]) -> Place:
    """Tell the rank from the launcher's variables; alone if there are none."""
    host = environ.get("PMIX_HOSTNAME") or environ.get("PMI_HOSTNAME") or socket.gethostname()
    for rank, size, local_size in _RANKS:
        if environ.get(rank, "").isdigit():
            return Place(int(environ[rank]), int(environ.get(size, 0)), int(environ.get(local_size, 0)), host)
    return Place(0, 1, 1, host)


def adapt_environment(environ: Mapping[str, str], local_size: int, cores: int) -> dict[str, str]:
    """Build the command's environment: what depends on the host is settled here, where the host can be seen."""
    variables = {k: v for k, v in environ.items() if not k.startswith("HVDKIT_CONTROL")}
    variables["HVDKIT_AGENT"] = "1"
    if local_size:
        variables.setdefault("OMP_NUM_THREADS", str(max(1, cores // local_size)))
    if local_size >= cores:  # ranks that poll without yielding would take the cores from those that compute
        variables.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    return variables
