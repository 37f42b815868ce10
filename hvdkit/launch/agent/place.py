"""Which rank this is, and what depends on the host it runs on."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from typing import NamedTuple

# (rank, size, ranks of this host) of what hvdrun starts agents through. The first whose rank is set counts: under an
# mpirun inside a Slurm job, Slurm's variables are those of mpirun's daemon. hvdkit.world has the same order.
_RANKS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PALS_RANKID", "PMI_SIZE", "PMI_LOCAL_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_SIZE"),
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
    slurm_rank, slurm_size, slurm_local_size = _read_slurm(environ)
    for rank, size, local_size in _RANKS:
        if environ.get(rank, "").isdigit():
            return Place(
                int(environ[rank]),
                int(environ.get(size, 0)) or (slurm_size if int(environ[rank]) == slurm_rank else 0),
                int(environ.get(local_size, 0)) or (slurm_local_size if int(environ[rank]) == slurm_rank else 0),
                host,
            )
    if slurm_rank >= 0:
        return Place(slurm_rank, slurm_size, slurm_local_size, host)
    return Place(0, 1, 1, host)


def _read_slurm(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """Tell (rank, size, ranks of this host) of a task of a Slurm step; (-1, 0, 0) of anything else."""
    step = environ.get("SLURM_STEP_ID", "")
    size = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", ""))
    if not step.isdigit() or not environ.get("SLURM_PROCID", "").isdigit() or not size.isdigit():
        return -1, 0, 0
    counts: list[int] = []  # "2(x3),1": three nodes with two tasks, then one with one
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)
    node = int(environ.get("SLURM_NODEID", 0))
    return int(environ["SLURM_PROCID"]), int(size), counts[node] if node < len(counts) else 0


def adapt_environment(environ: Mapping[str, str], orders: Mapping[str, str], threads: int) -> dict[str, str]:
    """Build the command's environment: what depends on the host is settled here, where the host can be seen.

    orders: what hvdrun says on top; for a variable that the user has set, that stays. threads: to compute with.
    """
    variables = {k: v for k, v in environ.items() if not k.startswith("HVDKIT_CONTROL")}
    variables["HVDKIT_AGENT"] = "1"
    for name, value in orders.items():
        variables.setdefault(name, value)
    variables.setdefault("OMP_NUM_THREADS", str(threads))
    if threads == 1:  # ranks that poll without yielding would take the cores from those that compute
        variables.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    return variables
