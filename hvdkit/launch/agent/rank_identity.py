"""Find out the number of this rank, and build its environment for the host that it runs on."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvdkit.ranges import read_counts

# Variables (rank, size, ranks of this host) of the launchers that hvdrun uses. The first with a rank counts: under an
# mpirun inside a Slurm job, Slurm's variables are those of mpirun's daemon. hvdkit.world has the same order.
_RANKS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PALS_RANKID", "PMI_SIZE", "PMI_LOCAL_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("PMIX_RANK", "", ""),
)


_SITE = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../startup/site"))


class RankIdentity(NamedTuple):
    """A rank's numbers in the job; 0 for a size that the launcher does not set.

    joins: running ranks started it; its number is above theirs.
    """

    rank: int
    size: int
    local_size: int
    host: str
    joins: bool = False


def identify_rank(environ: Mapping[str, str], first: int | None = None) -> RankIdentity:
    """Identify the rank by the launcher's variables; without them it is alone.

    first: the number of the first of the ranks that other ranks have started together; None for other ranks.
    """
    if first is not None:
        place = identify_rank(environ)
        return place._replace(rank=first + place.rank, joins=True)
    host = environ.get("PMIX_HOSTNAME") or environ.get("PMI_HOSTNAME") or socket.gethostname()
    slurm_rank, slurm_size, slurm_local_size = _read_slurm(environ)
    for rank, size, local_size in _RANKS:
        number = _read_number(environ, rank)
        if number >= 0:
            by_slurm = number == slurm_rank
            return RankIdentity(
                number,
                max(0, _read_number(environ, size)) or (slurm_size if by_slurm else 0),
                max(0, _read_number(environ, local_size)) or (slurm_local_size if by_slurm else 0),
                host,
            )
    if slurm_rank >= 0:
        return RankIdentity(slurm_rank, slurm_size, slurm_local_size, host)
    return RankIdentity(0, 1, 1, host)


def _read_slurm(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """Read (rank, size, ranks of this host) of a task of a Slurm step; (-1, 0, 0) outside of a step."""
    rank, size = _read_number(environ, "SLURM_PROCID"), _read_number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if _read_number(environ, "SLURM_STEP_ID") < 0 or rank < 0 or size < 0:
        return -1, 0, 0
    node = max(0, _read_number(environ, "SLURM_NODEID"))
    try:
        counts = read_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    except ValueError:
        counts = []
    return rank, size, counts[node] if node < len(counts) else 0


def _read_number(environ: Mapping[str, str], *names: str) -> int:
    """Read the number in the first of these variables that is set; -1 if none is set, or it has no number."""
    text = next((environ[name] for name in names if name in environ), "")
    return int(text) if re.fullmatch("[0-9]{1,10}", text) else -1


def name_process(environ: Mapping[str, str]) -> str:
    """Return the name of this process in Open MPI's launcher, as "namespace:number"; "" without PMIx."""
    namespace, number = environ.get("PMIX_NAMESPACE", ""), environ.get("PMIX_RANK", "")
    return f"{namespace}:{number}" if namespace and number else ""


def survivors_continue(environ: Mapping[str, str]) -> bool:
    """Do the other ranks continue within the job when this rank dies?"""
    return environ.get("HVDKIT_ELASTIC") == "1" and environ.get("HVDKIT_ELASTIC_RESTARTS") != "1"


def plan_elastic_variables(place: RankIdentity, command: Sequence[str]) -> dict[str, str]:
    """Plan the variable of an elastic rank with the command that starts a replacement."""
    agent = [sys.executable, "-I", "-S", os.path.dirname(os.path.abspath(__file__))]
    another = {
        "agent": agent,
        "command": list(command),
        "number": max(place.rank + 1, place.size),
        "process": os.getpid(),
    }
    return {"HVDKIT_ELASTIC_COMMAND": json.dumps(another)}


def read_environment_of(process: int) -> dict[str, str]:
    """Read the environment that a process on this host was started with; {} if it cannot be read."""
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            data = file.read()
    except OSError:
        return {}
    pairs = (os.fsdecode(line).partition("=") for line in data.split(b"\0"))
    return {name: value for name, equals, value in pairs if equals}


def adopt_environment(environ: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Build the environment of a replacement: that of another rank, except the launcher's variables.

    environ: from the launcher's daemon, which on other hosts than hvdrun's has no variables of the job. other: the
    environment of a running rank.
    """
    job = {name: value for name, value in other.items() if not _is_launchers(name)}
    mine = {name: value for name, value in environ.items() if _is_launchers(name) or name.startswith("OMPI_MCA_")}
    return {**environ, **job, **mine}


def _is_launchers(name: str) -> bool:
    return name.startswith(("PMIX_", "PRTE_", "OMPI_")) and not name.startswith("OMPI_MCA_")


def adapt_environment(environ: Mapping[str, str], orders: Mapping[str, str], threads: int) -> dict[str, str]:
    """Build the command's environment, including variables that depend on this host.

    orders: hvdrun's variables; values of the user take precedence. threads: number to compute with.
    """
    variables = {k: v for k, v in environ.items() if not k.startswith("HVDKIT_CONTROL")}
    variables["HVDKIT_AGENT"] = "1"
    path = environ.get("PYTHONPATH")
    places = path.split(os.pathsep) if path else []  # "" is the working directory
    if _SITE not in places:  # see hvdkit.startup
        variables["PYTHONPATH"] = os.pathsep.join([_SITE, *places])
    for name, value in orders.items():
        variables.setdefault(name, value)
    if "OMPI_COMM_WORLD_RANK" in variables and "JAX_COORDINATOR_ADDRESS" in variables:
        # JAX up to 0.10 detects Open MPI by this variable, which Open MPI 5 no longer sets.
        variables.setdefault("OMPI_MCA_orte_hnp_uri", f"0.0;tcp://{variables['JAX_COORDINATOR_ADDRESS']}")
    variables.setdefault("OMP_NUM_THREADS", str(threads))
    if threads == 1:  # ranks that poll without yielding would take cores from ranks that compute
        variables.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    return variables
