"""Making communicators of MPI, so that no thread keeps others out while it waits for other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from hvdkit.transport.mpi.library import MpiRequest, call_mpi, calls_take_turns, collective, is_ours_to_end
from hvdkit.transport.polling import calls

if TYPE_CHECKING:
    from mpi4py import MPI


def duplicate_comm(comm: MPI.Intracomm) -> MPI.Intracomm:
    """A communicator of the same ranks, for own_comm(); collective. Raises as collective() does."""
    if not calls_take_turns():
        return make_comm("MPI_Comm_dup", comm)
    calls().begun += 1
    new, request = call_mpi("MPI_Comm_idup", comm.Idup)
    MpiRequest("MPI_Comm_idup", request).wait()
    return new


def make_comm(what: str, comm: MPI.Intracomm, *arguments: Any) -> MPI.Intracomm:
    """Make a communicator from `comm` by a call that waits for its ranks in MPI; collective.

    All ranks meet before, so that none is in that call for long. Where calls take turns it keeps its turn, so all ranks
    make such calls in one order: within init() or in an operation of the world's engine. In a world that may change
    they do not meet, as a rank's death could end the barrier for some of them only.
    what: MPI's name for it. Raises as collective() does.
    """
    calls().begun += 1
    if not is_ours_to_end():
        collective("MPI_Barrier", comm)
    return cast("MPI.Intracomm", call_mpi(what, getattr(comm, what.removeprefix("MPI_Comm_").capitalize()), *arguments))


def create_comm(comm: MPI.Intracomm, ranks: Sequence[int]) -> MPI.Intracomm:
    """A communicator of some ranks of `comm`, for own_comm(); collective over these. Raises as call_mpi() does."""
    everyone = call_mpi("MPI_Comm_group", comm.Get_group)
    group = everyone.Incl(list(ranks))
    try:
        return call_mpi("MPI_Comm_create_group", comm.Create_group, group)
    finally:
        group.Free()
        everyone.Free()
