"""Makes communicators of MPI such that no thread blocks other threads while it waits for other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from hvdkit.transport.mpi.library import MpiRequest, call_mpi, calls_take_turns, collective, is_ours_to_end
from hvdkit.transport.polling import calls

if TYPE_CHECKING:
    from mpi4py import MPI


def duplicate_comm(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Make a communicator of the same ranks, for own_comm(); collective. Raises as collective() does."""
    if not calls_take_turns():
        return make_comm("MPI_Comm_dup", comm)
    calls().begun += 1
    new, request = call_mpi("MPI_Comm_idup", comm.Idup)
    MpiRequest("MPI_Comm_idup", request).wait()
    return new


def make_comm(what: str, comm: MPI.Intracomm, *arguments: Any) -> MPI.Intracomm:
    """Make a communicator from `comm` by a call that waits for its ranks in MPI; collective.

    A barrier synchronizes all ranks before, so that no rank is in that call for long. If calls take turns (see
    calls_take_turns()), the call keeps its turn, so all ranks make such calls in the same order: within init() or in an
    operation of the world's engine. In a world that may change there is no barrier, because a rank's death could end it
    for only some of the ranks.
    what: the name of MPI's function. comm: its communicator. arguments: its other arguments. Raises as collective()
    does.
    """
    calls().begun += 1
    if not is_ours_to_end():
        collective("MPI_Barrier", comm)
    return cast("MPI.Intracomm", call_mpi(what, getattr(comm, what.removeprefix("MPI_Comm_").capitalize()), *arguments))


def create_comm(comm: MPI.Intracomm, ranks: Sequence[int]) -> MPI.Intracomm:
    """Make a communicator of some ranks of `comm`, for own_comm(); collective over these. Raises as call_mpi() does."""
    everyone = call_mpi("MPI_Comm_group", comm.Get_group)
    group = everyone.Incl(list(ranks))
    try:
        return call_mpi("MPI_Comm_create_group", comm.Create_group, group)
    finally:
        group.Free()
        everyone.Free()
