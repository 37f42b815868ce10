"""The ranks that there are now, where MPI can go on without those that died: Open MPI's fault tolerance (ULFM).

The world's own communicator carries no messages. So it is never revoked, and what is left of it can be taken on from
it, whatever became of the communicators made from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from hvdkit.transport.mpi_library import call_mpi, load_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

#: From a rank that joins to rank 0 of those it joins: it is there.
READY_TAG = 1


class _World:
    """comm: of all ranks there are; None before it is asked for. changed: are these others than were launched?"""

    def __init__(self) -> None:
        self.comm: MPI.Intracomm | None = None
        self.changed = False


_world = _World()


def world_comm() -> MPI.Intracomm:
    """Of all ranks that there are now; collective at first, and then on a rank that joins others until they take it."""
    if _world.comm is None:
        mpi = load_mpi()
        others = mpi.Comm.Get_parent()
        if others == mpi.COMM_NULL:
            _take(call_mpi("MPI_Comm_dup", mpi.COMM_WORLD.Dup))
        else:
            others.Set_errhandler(mpi.ERRORS_RETURN)
            call_mpi("MPI_Send", others.Send, [bytearray(1), mpi.BYTE], 0, READY_TAG)
            _world.changed = True
            _take(call_mpi("MPI_Intercomm_merge", others.Merge, True))
    assert _world.comm is not None
    return _world.comm


def has_changed() -> bool:
    """Are the ranks others than the launcher started?"""
    return _world.changed


def shrink() -> int:
    """Go on with the ranks that are left, in their order; collective among them. Returns how many have gone."""
    before = world_comm()
    _take(call_mpi("MPIX_Comm_shrink", before.Shrink))
    _world.changed = True
    return int(before.size - world_comm().size)


def grow(others: MPI.Intercomm) -> None:
    """Take in ranks that have been spawned, behind those that are there; collective.

    Raises RankLostError if one of them has died.
    """
    _take(call_mpi("MPI_Intercomm_merge", others.Merge, False))
    _world.changed = True


def _take(comm: MPI.Comm) -> None:
    comm.Set_errhandler(load_mpi().ERRORS_RETURN)
    _world.comm = cast("MPI.Intracomm", comm)
