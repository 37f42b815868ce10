"""All ranks through MPI, with mpi4py and numpy."""

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
from hvdkit.transport.mpi.pmix import tell_mpi_of_loss
from hvdkit.transport.mpi.ulfm import world_comm
from hvdkit.transport.request import AllRequests, MessageRequest, Request, closed_before
from hvdkit.transport.small_collectives import gather_ints

if TYPE_CHECKING:
    from mpi4py import MPI


def open_mpi(comm: MPI.Intracomm | None = None) -> MpiTransport:
    """A transport of all ranks that MPI knows; collective. See load_mpi for what it raises.

    comm: a communicator of some of them, which becomes this transport's own.
    """
    own = duplicate_comm(world_comm()) if comm is None else comm
    return MpiTransport(own_comm(own), NumpyArithmetic())


class MpiTransport(BaseTransport):
    """Moves bytes with MPI's collectives; float16 and bfloat16, which MPI lacks, are added here, in float32.

    comm: this transport's alone; freed by close(). algorithm: see BetweenHosts. spare: a communicator of the same
    ranks, made when all ranks of the world made such in one order. Open MPI numbers communicators in the order of those
    that they are made from, so ranks that make some at any time, in several threads, can wait for each other for ever.
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
        """See Transport.create_group. Its spare communicator is made now, too: see MpiTransport."""
        check_groups([ranks], self.size)
        comm = own_comm(create_comm(self.wire.comm, ranks))
        return MpiTransport(comm, self.arithmetic, self.between.algorithm, own_comm(duplicate_comm(comm)))

    def find_nodes(self) -> list[int]:
        """See BaseTransport.find_nodes. A host is what shares memory, as MPI finds it: its first rank is its number."""
        local = own_comm(make_comm("MPI_Comm_split_type", self.wire.comm, load_mpi().COMM_TYPE_SHARED, self.rank))
        first = np.array([self.rank], np.int64)
        collective("MPI_Bcast", local, first, 0)
        free_comm(local)
        return gather_ints(self, int(first[0]))

    def _more(self) -> MPI.Intracomm:
        """Another communicator of the same ranks."""
        comm = self.wire.comm
        spare, self._spare = self._spare, None
        return own_comm(duplicate_comm(comm)) if spare is None else spare

    def open_mailbox(self) -> MpiMailbox:
        return MpiMailbox(self._more())

    def open_wire(self) -> MpiWire:
        return MpiWire(self._more())

    def report_loss(self, process: str) -> None:
        tell_mpi_of_loss(process)

    def leave(self) -> None:
        """See Transport.leave. The others would wait for this rank in closing the mailboxes of all groups."""
        leave_mailboxes()

    def close(self, *, idle: bool = True) -> None:
        """See Transport.close. Where it is not idle MPI keeps the communicator, for collectives left in the middle."""
        if self._wire is not None:
            wire, self._wire = self._wire, None
            if idle and self._spare is not None:
                free_comm(self._spare)
            wire.close(idle=idle)
