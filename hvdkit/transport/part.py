"""A part of the job's processes as a world of its own: what init() and ProcessSet() take as a communicator, checked.

The other processes of the job never call hvdkit, so nothing here is collective.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvdkit.errors import ConfigError
from hvdkit.transport.mpi.library import call_mpi, load_mpi
from hvdkit.world import WITHOUT_MPI, World

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Part:
    """Processes of the job that make a world.

    ranks: in MPI_COMM_WORLD, in the order of the part. comm: the user's communicator of them; None for a list of ranks.
    """

    ranks: tuple[int, ...]
    comm: MPI.Intracomm | None = None


def runs_mpi() -> bool:
    """Has the program started MPI by itself, with more ranks than one?"""
    loaded = sys.modules.get("mpi4py.MPI")
    return loaded is not None and loaded.Is_initialized() and loaded.COMM_WORLD.Get_size() > 1


def is_communicator(value: object) -> bool:
    """Is it a communicator of mpi4py's?"""
    loaded = sys.modules.get("mpi4py.MPI")
    return loaded is not None and isinstance(value, loaded.Comm)


def read_part(comm: Any, world: World) -> Part | None:
    """The processes that init()'s `comm` names; None for all of the job, in order. Not collective.

    comm: a communicator of mpi4py's, ranks in MPI_COMM_WORLD, or None. world: as the launcher told it.
    Raises ConfigError for what can be neither.
    """
    if comm is None:
        return None
    without_mpi = world.launcher in WITHOUT_MPI
    if is_communicator(comm):
        if not without_mpi and comm == sys.modules["mpi4py.MPI"].COMM_WORLD:
            return None  # also where MPI has not been started yet
        ranks = ranks_in_job(comm, "comm")
    else:
        ranks = _check_ranks(comm)
    if ranks == tuple(range(world.size if without_mpi else _job_size(world))):
        return None
    if without_mpi:
        raise ConfigError(
            f"comm={show_comm(comm)}: a part of the ranks can be a world of its own where MPI has started them, and "
            f"{world.launcher} has started these {world.size} without MPI. Start the script with hvdrun or mpirun; or "
            f"leave comm out, and use a process set for some of the ranks."
        )
    return Part(ranks, comm if is_communicator(comm) else None)


def ranks_in_job(comm: Any, what: str) -> tuple[int, ...]:
    """The ranks in MPI_COMM_WORLD of a communicator's processes, in its order; not collective.

    what: the name of the user's argument, for the ConfigError about a communicator that has no such ranks.
    """
    mpi = load_mpi()
    if comm == mpi.COMM_NULL:
        raise ConfigError(
            f"{what} is MPI.COMM_NULL: a communicator that has been freed, or one that does not hold this process "
            f"(rank {mpi.COMM_WORLD.rank} of the job). Only the processes of a communicator pass it; for a process set "
            f"of some ranks the others pass another one (MPI_Comm_split gives each process one), or all pass its ranks."
        )
    if comm.Is_inter():
        raise ConfigError(
            f"{what} is an intercommunicator, of {comm.Get_size()} processes and {comm.Get_remote_size()} others. Pass "
            f"an intracommunicator: that of one side, or of both, as comm.Merge() makes it."
        )
    group, job = call_mpi("MPI_Comm_group", comm.Get_group), call_mpi("MPI_Comm_group", mpi.COMM_WORLD.Get_group)
    try:
        ranks = mpi.Group.Translate_ranks(group, range(group.size), job)
    finally:
        group.Free()
        job.Free()
    if mpi.UNDEFINED in ranks:
        raise ConfigError(
            f"{what} holds processes that are not in this job's MPI_COMM_WORLD (MPI_Comm_spawn or MPI_Comm_accept has "
            f"brought them), and hvdkit names ranks by that. Pass one of processes that were started together."
        )
    return tuple(ranks)


def _check_ranks(comm: Any) -> tuple[int, ...]:
    """The ranks of a list that can be a part."""
    try:
        ranks = tuple(operator.index(rank) for rank in comm) if isinstance(comm, Iterable) else ()
    except TypeError:
        ranks = ()
    if not ranks or min(ranks) < 0:
        raise ConfigError(
            f"comm={show_comm(comm)} is neither a communicator of mpi4py's nor a list of ranks from 0 up. Pass one of "
            f"these, or None for all ranks."
        )
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise ConfigError(f"comm={show_comm(comm)}: ranks {twice} are there more than once. List each rank once.")
    return ranks


def _job_size(world: World) -> int:
    """How many processes the job has, as MPI says if it runs already; 0 if nobody has said."""
    loaded = sys.modules.get("mpi4py.MPI")
    if loaded is not None and loaded.Is_initialized() and not loaded.Is_finalized():
        return int(loaded.COMM_WORLD.Get_size())
    return world.size


def show_comm(comm: Any) -> str:
    """Name what was given as a communicator or a list of ranks, for a message."""
    if is_communicator(comm):
        return f"a communicator of {comm.Get_size()}"
    return repr(list(comm)) if isinstance(comm, Iterable) and not isinstance(comm, (str, bytes)) else repr(comm)
