"""The transport over MPI, with mpi4py and numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hvdkit.transport.arithmetic import Arithmetic, NumpyArithmetic
from hvdkit.transport.between.base import BaseTransport
from hvdkit.transport.between.select import ALGORITHMS, BetweenHosts
from hvdkit.transport.buffer import Buffer
from hvdkit.transport.division import Groups, check_groups, find_group
from hvdkit.transport.mpi import library as mpi_library
from hvdkit.transport.mpi.communicators import create_comm, duplicate_comm, make_comm
from hvdkit.transport.mpi.library import collective, free_comm, load_mpi, own_comm
from hvdkit.transport.mpi.mailbox import MpiMailbox, leave_mailboxes
from hvdkit.transport.mpi.nonblocking import MpiWire
from hvdkit.transport.mpi.pmix import report_loss_to_mpi
from hvdkit.transport.mpi.released import free_before_close, free_released
from hvdkit.transport.mpi.ulfm import world_comm
from hvdkit.transport.request import AllRequests, MessageRequest, Request, closed_before
from hvdkit.transport.small_collectives import gather_ints

if TYPE_CHECKING:
    from mpi4py import MPI


def open_mpi(comm: MPI.Intracomm | None = None) -> MpiTransport:
    """Open a transport of all ranks of the world; collective. Raises as load_mpi() does.

    comm: a communicator of some of them, which the transport then owns; None for all ranks.
    """
    own = duplicate_comm(world_comm()) if comm is None else comm
    return MpiTransport(own_comm(own), NumpyArithmetic())


class MpiTransport(BaseTransport):
    """Moves bytes with MPI's collectives; adds float16 and bfloat16, which MPI lacks, itself in float32.

    comm: used by this transport only; close() frees it.
    arithmetic: adds and casts the numbers.
    algorithm: see BetweenHosts.
    spare: a communicator of the same ranks, made in advance, when all ranks made communicators in the same order; None
    for none. Open MPI allocates numbers for communicators in the order of their parents, so ranks that make
    communicators at any time, in several threads, can wait for each other forever.
    """

    name = "mpi"
    backend = "mpi"

    def __init__(
        self,
        comm: MPI.Intracomm,
        arithmetic: Arithmetic,
        algorithm: str = "auto",
        spare: MPI.Intracomm | None = None,
    ) -> None:
        between = BetweenHosts(algorithm, ("library", *ALGORITHMS), comm.size)
        super().__init__(comm.rank, comm.size, arithmetic, between)
        self._wire: MpiWire | None = MpiWire(comm)
        self._spare = spare

    @property
    def wire(self) -> MpiWire:
        if self._wire is None:
            raise closed_before("MPI")
        return self._wire

    def begin_message(self, buffer: Buffer, peer: int, tag: int, *, sends: bool) -> Request:
        wire, largest = self.wire, mpi_library.LARGEST_COUNT
        parts = [buffer.slice(start, start + largest) for start in range(0, max(1, buffer.count), largest)]
        requests = [wire.begin_message(part, peer, tag, sends=sends) for part in parts]
        return MessageRequest(requests[0] if len(requests) == 1 else AllRequests(requests, buffer))

    def split(self, groups: Groups) -> MpiTransport | None:
        check_groups(groups, self.size)
        number = find_group(groups, self.rank)
        if number is None:
            make_comm("MPI_Comm_split", self.wire.comm, load_mpi().UNDEFINED, 0)
            return None
        comm = own_comm(make_comm("MPI_Comm_split", self.wire.comm, number, groups[number].index(self.rank)))
        return MpiTransport(comm, self.arithmetic, self.between.algorithm, own_comm(duplicate_comm(comm)))

    def create_group(self, ranks: Sequence[int]) -> MpiTransport:
        """See Transport.create_group. Makes the spare communicator now too: see MpiTransport."""
        check_groups([ranks], self.size)
        comm = own_comm(create_comm(self.wire.comm, ranks))
        return MpiTransport(comm, self.arithmetic, self.between.algorithm, own_comm(duplicate_comm(comm)))

    def find_nodes(self) -> list[int]:
        """See BaseTransport.find_nodes. Ranks share a host if MPI finds that they share memory.

        The host number is the lowest of these ranks.
        """
        local = own_comm(make_comm("MPI_Comm_split_type", self.wire.comm, load_mpi().COMM_TYPE_SHARED, self.rank))
        first = np.array([self.rank], np.int64)
        collective("MPI_Bcast", local, first, 0)
        free_comm(local)
        return gather_ints(self, int(first[0]))

    def _more(self) -> MPI.Intracomm:
        """Return another communicator of the same ranks."""
        comm = self.wire.comm
        free_released()
        spare, self._spare = self._spare, None
        return own_comm(duplicate_comm(comm)) if spare is None else spare

    def open_mailbox(self) -> MpiMailbox:
        return MpiMailbox(self._more())

    def open_wire(self) -> MpiWire:
        return MpiWire(self._more())

    def report_loss(self, process: str) -> None:
        report_loss_to_mpi(process)

    def leave(self) -> None:
        """See Transport.leave. The other ranks would wait for this rank when they close mailboxes of its groups."""
        leave_mailboxes()

    def close(self, *, idle: bool = True) -> None:
        """See Transport.close. If `idle` is False, MPI keeps the communicator, for unfinished collectives."""
        if self._wire is not None:
            wire, self._wire = self._wire, None
            if idle:
                free_before_close()
            if idle and self._spare is not None:
                free_comm(self._spare)
            wire.close(idle=idle)
