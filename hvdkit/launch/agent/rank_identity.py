"""Which rank this is, and what depends on the host it runs on."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvdkit.ranges import read_counts

# (rank, size, ranks of this host) of what hvdrun starts agents through. The first whose rank is set counts: under an
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
    """A rank's place in the job; 0 for a size that the launcher does not tell.

    joins: it was started by ranks that are there already; its number is above theirs.
    """

    rank: int
    size: int
    local_size: int
    host: str
    joins: bool = False


def identify_rank(environ: Mapping[str, str], first: int | None = None) -> RankIdentity:
    """Tell the rank from the launcher's variables; alone if there are none.

    first: of ranks that others have started, the number of the first; else None.
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
    """Tell (rank, size, ranks of this host) of a task of a Slurm step; (-1, 0, 0) of anything else."""
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
    """The number in the first of these variables that is set; -1 if none is, or it is no number."""
    text = next((environ[name] for name in names if name in environ), "")
    return int(text) if re.fullmatch("[0-9]{1,10}", text) else -1


def name_process(environ: Mapping[str, str]) -> str:
    """What Open MPI's launcher calls this process, as "namespace:number"; "" where there is none with PMIx."""
    namespace, number = environ.get("PMIX_NAMESPACE", ""), environ.get("PMIX_RANK", "")
    return f"{namespace}:{number}" if namespace and number else ""


def survivors_continue(environ: Mapping[str, str]) -> bool:
    """Do the other ranks go on within the job when this one dies?"""
    return environ.get("HVDKIT_ELASTIC") == "1" and environ.get("HVDKIT_ELASTIC_RESTARTS") != "1"


def plan_elastic_variables(place: RankIdentity, command: Sequence[str]) -> dict[str, str]:
    """What a rank is told whose world may change: what starts another one."""
    agent = [sys.executable, "-I", "-S", os.path.dirname(os.path.abspath(__file__))]
    another = {
        "agent": agent,
        "command": list(command),
        "number": max(place.rank + 1, place.size),
        "process": os.getpid(),
    }
    return {"HVDKIT_ELASTIC_COMMAND": json.dumps(another)}


def read_environment_of(process: int) -> dict[str, str]:
    """The variables that a process on this host was started with; {} if that cannot be seen."""
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            data = file.read()
    except OSError:
        return {}
    pairs = (os.fsdecode(line).partition("=") for line in data.split(b"\0"))
    return {name: value for name, equals, value in pairs if equals}


def adopt_environment(environ: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Build the environment of a rank that others have started: what they have, but for what says which rank this is.

    environ: as the launcher's daemon made it, which on another host than hvdrun's knows nothing of the job. other: of a
    rank that was there.
    """
    job = {name: value for name, value in other.items() if not _is_launchers(name)}
    mine = {name: value for name, value in environ.items() if _is_launchers(name) or name.startswith("OMPI_MCA_")}
    return {**environ, **job, **mine}


def _is_launchers(name: str) -> bool:
    return name.startswith(("PMIX_", "PRTE_", "OMPI_")) and not name.startswith("OMPI_MCA_")


def adapt_environment(environ: Mapping[str, str], orders: Mapping[str, str], threads: int) -> dict[str, str]:
    """Build the command's environment: what depends on the host is settled here, where the host can be seen.

    orders: what hvdrun says on top; for a variable that the user has set, that stays. threads: to compute with.
    """
    variables = {k: v for k, v in environ.items() if not k.startswith("HVDKIT_CONTROL")}
    variables["HVDKIT_AGENT"] = "1"
    path = environ.get("PYTHONPATH")
    places = path.split(os.pathsep) if path else []  # "" among them is the working directory
    if _SITE not in places:  # see hvdkit.startup
        variables["PYTHONPATH"] = os.pathsep.join([_SITE, *places])
    for name, value in orders.items():
        variables.setdefault(name, value)
    if "OMPI_COMM_WORLD_RANK" in variables and "JAX_COORDINATOR_ADDRESS" in variables:
        # By this one, which Open MPI 5 has no more, JAX up to 0.10 tells that the variables of Open MPI are there.
        variables.setdefault("OMPI_MCA_orte_hnp_uri", f"0.0;tcp://{variables['JAX_COORDINATOR_ADDRESS']}")
    variables.setdefault("OMP_NUM_THREADS", str(threads))
    if threads == 1:  # ranks that poll without yielding would take the cores from those that compute
        variables.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    return variables
