"""Reads and checks the communicators of init() and ProcessSet(); init()'s can make a subset of the job the world.

The other processes of the job never call hvdkit, so no function here is collective.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvdkit.errors import ConfigError
from hvdkit.transport.mpi.library import call_mpi, load_mpi
from hvdkit.world import WITHOUT_MPI, World

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class RankSubset:
    """Processes of the job that form a world.

    ranks: their ranks in MPI_COMM_WORLD, in the order of the subset. comm: the user's communicator; None for a list of
    ranks.
    """

    ranks: tuple[int, ...]
    comm: MPI.Intracomm | None = None


def runs_mpi() -> bool:
    """Return whether the program has started MPI itself, with more than one rank."""
    loaded = sys.modules.get("mpi4py.MPI")
    return loaded is not None and loaded.Is_initialized() and loaded.COMM_WORLD.Get_size() > 1


def is_communicator(value: object) -> bool:
    """Return whether the value is a communicator of mpi4py."""
    loaded = sys.modules.get("mpi4py.MPI")
    return loaded is not None and isinstance(value, loaded.Comm)


def read_rank_subset(comm: Any, world: World) -> RankSubset | None:
    """Return the processes that init()'s `comm` names; None for the whole job, in order. Not collective.

    comm: a communicator of mpi4py, ranks in MPI_COMM_WORLD, or None. world: as read from the launcher's variables.
    Raises ConfigError for any other value.
    """
    if comm is None:
        return None
    without_mpi = world.launcher in WITHOUT_MPI
    if is_communicator(comm):
        if not without_mpi and comm == sys.modules["mpi4py.MPI"].COMM_WORLD:
            return None  # also if MPI has not been started yet
        ranks = ranks_in_job(comm, "comm")
    else:
        ranks = _check_ranks(comm)
    if ranks == tuple(range(world.size if without_mpi else _job_size(world))):
        return None
    if without_mpi:
        raise ConfigError(
            f"comm={show_comm(comm)}: {world.launcher} started these {world.size} ranks without MPI, and only with "
            "MPI can some of the ranks form a world of their own. Start the script with hvdrun or mpirun, or leave "
            "out comm and use a process set."
        )
    return RankSubset(ranks, comm if is_communicator(comm) else None)


def ranks_in_job(comm: Any, what: str) -> tuple[int, ...]:
    """Return the ranks in MPI_COMM_WORLD of a communicator's processes, in its order; not collective.

    what: the name of the user's argument, for the ConfigError about a communicator that has no such ranks.
    """
    mpi = load_mpi()
    if comm == mpi.COMM_NULL:
        raise ConfigError(
            f"{what} is MPI.COMM_NULL: the communicator was freed, or it does not contain this process (rank "
            f"{mpi.COMM_WORLD.rank} of the job). Only the processes of a communicator may pass it. For a process "
            "set, the other processes pass their own communicator (MPI_Comm_split gives each process one), or all "
            "processes pass the list of its ranks."
        )
    if comm.Is_inter():
        raise ConfigError(
            f"{what} is an intercommunicator ({comm.Get_size()} local and {comm.Get_remote_size()} remote "
            "processes). Pass an intracommunicator: that of one of its groups, or comm.Merge() for both."
        )
    group, job = call_mpi("MPI_Comm_group", comm.Get_group), call_mpi("MPI_Comm_group", mpi.COMM_WORLD.Get_group)
    try:
        ranks = mpi.Group.Translate_ranks(group, range(group.size), job)
    finally:
        group.Free()
        job.Free()
    if mpi.UNDEFINED in ranks:
        raise ConfigError(
            f"{what} contains processes that are not in the MPI_COMM_WORLD of this job (from MPI_Comm_spawn or "
            "MPI_Comm_accept), so they have no rank in the job. Pass a communicator of processes that were started "
            "together."
        )
    return tuple(ranks)


def _check_ranks(comm: Any) -> tuple[int, ...]:
    """Return the ranks of a list as a tuple, checked to be a valid subset."""
    try:
        ranks = tuple(operator.index(rank) for rank in comm) if isinstance(comm, Iterable) else ()
    except TypeError:
        ranks = ()
    if not ranks or min(ranks) < 0:
        raise ConfigError(
            f"comm={show_comm(comm)} is neither an mpi4py communicator nor a list of ranks from 0 up. Pass one of "
            "these, or None for all ranks."
        )
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise ConfigError(f"comm={show_comm(comm)} contains the ranks {twice} more than once. List each rank once.")
    return ranks


def _job_size(world: World) -> int:
    """Return the number of processes of the job, from MPI if it runs already; 0 if unknown."""
    loaded = sys.modules.get("mpi4py.MPI")
    if loaded is not None and loaded.Is_initialized() and not loaded.Is_finalized():
        return int(loaded.COMM_WORLD.Get_size())
    return world.size


def show_comm(comm: Any) -> str:
    """Describe a communicator or list of ranks that the user gave, for a message."""
    if is_communicator(comm):
        return f"a communicator of {comm.Get_size()} processes"
    return repr(list(comm)) if isinstance(comm, Iterable) and not isinstance(comm, (str, bytes)) else repr(comm)


def plan_sets_of_comms(members: Sequence[tuple[int, ...]], job_ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the ranks of all process sets that the ranks' communicators define, sorted.

    members: for each rank of the world, the job ranks of its communicator, in the communicator's order.
    job_ranks: the job rank of each rank of the world.
    Raises ValueError if a communicator has processes outside the world or in another order than the world, or if its
    ranks passed different communicators.
    """
    places = {job_rank: rank for rank, job_rank in enumerate(job_ranks)}
    sets = []
    for rank, in_job in enumerate(members):
        ranks = [places.get(job_rank, -1) for job_rank in in_job]
        others = [other for other in ranks if other >= 0 and members[other] != in_job]
        if ranks != sorted(set(ranks)) or ranks[0] < 0 or others:
            other = f"; that of rank {others[0]} holds {list(members[others[0]])}" if others else ""
            raise ValueError(
                f"add_process_set(): the communicator of rank {rank} holds the ranks {list(in_job)} of the job{other}. "
                f"The world holds the ranks {list(job_ranks)}. A communicator must hold ranks of the world, in the "
                "order of the world, and all of its ranks must pass it. MPI_Comm_split with key=hvd.rank() makes such "
                "communicators."
            )
        sets.append(tuple(ranks))
    return sorted(set(sets))
