"""A mailbox over MPI's point-to-point messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hvdkit.transport.mailbox import LocalMailbox
from hvdkit.transport.mpi.library import call_mpi, check_not_ended, collective, finish, free_comm, load_mpi

if TYPE_CHECKING:
    from mpi4py import MPI


class MpiMailbox:
    """See Mailbox. comm: its own; freed by close()."""

    star = False

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm, self._mpi = comm, load_mpi()
        self._local = LocalMailbox()
        self._sending: list[tuple[MPI.Request, bytes]] = []
        self._sent = np.zeros(comm.size, np.int64)
        self._received = np.zeros(comm.size, np.int64)

    def send(self, rank: int, message: bytes) -> None:
        """See Mailbox.send."""
        if rank == self._comm.rank:
            self._local.send(rank, message)
            return
        check_not_ended(self._mpi)
        self._sent[rank] += 1
        data = np.frombuffer(message, np.uint8)
        request = call_mpi("MPI_Isend", self._comm.Isend, [data, data.size, self._mpi.BYTE], rank)
        self._sending = [pending for pending in self._sending if not call_mpi("MPI_Test", pending[0].Test)]
        self._sending.append((request, message))

    def receive(self) -> list[tuple[int, bytes]]:
        """See Mailbox.receive."""
        mpi, messages = self._mpi, self._local.receive()
        check_not_ended(mpi)
        status = mpi.Status()
        while (matched := call_mpi("MPI_Improbe", self._comm.Improbe, mpi.ANY_SOURCE, mpi.ANY_TAG, status)) is not None:
            data = np.empty(status.Get_count(mpi.BYTE), np.uint8)
            call_mpi("MPI_Mrecv", matched.Recv, [data, data.size, mpi.BYTE])
            self._received[status.Get_source()] += 1
            messages.append((status.Get_source(), data.tobytes()))
        return messages

    def close(self, *, idle: bool = True) -> None:
        """See Mailbox.close."""
        if not idle or self._mpi.Is_finalized():
            return
        # A message left behind could turn up in a later communicator.
        expected = np.zeros_like(self._sent)
        collective("MPI_Alltoall", self._comm, self._sent, expected)
        while (self._received < expected).any():
            self.receive()
        for request, _ in self._sending:
            finish("MPI_Wait", request)
        free_comm(self._comm)
