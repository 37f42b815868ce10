"""Short messages between any two ranks, sent and received without waiting: what negotiation is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from hvdkit.transport.mpi.library import call_mpi, check_not_ended, collective, finish, free_comm, load_mpi

if TYPE_CHECKING:
    from mpi4py import MPI


class Mailbox(Protocol):
    """Messages among the ranks of a transport. Those from one rank to another arrive in the order of sending."""

    def send(self, rank: int, message: bytes) -> None:
        """Send, and return at once; to this rank itself as well."""

    def receive(self) -> list[tuple[int, bytes]]:
        """All messages that have come, each with its sender."""

    def close(self, *, idle: bool = True) -> None:
        """Give it back; collective. What has not been received is lost. idle: see Transport.close."""


class LocalMailbox:
    """The mailbox of a group of one rank."""

    def __init__(self) -> None:
        self._messages: list[tuple[int, bytes]] = []

    def send(self, rank: int, message: bytes) -> None:
        """See Mailbox.send."""
        self._messages.append((rank, message))

    def receive(self) -> list[tuple[int, bytes]]:
        """See Mailbox.receive."""
        messages, self._messages = self._messages, []
        return messages

    def close(self, *, idle: bool = True) -> None:
        """See Mailbox.close."""
        self._messages.clear()


class MpiMailbox:
    """A mailbox over MPI. comm: its own; freed by close()."""

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
        self._sending = [one for one in self._sending if not call_mpi("MPI_Test", one[0].Test)]
        self._sending.append((request, message))

    def receive(self) -> list[tuple[int, bytes]]:
        """See Mailbox.receive."""
        mpi, messages = self._mpi, self._local.receive()
        check_not_ended(mpi)
        status = mpi.Status()
        while (waiting := call_mpi("MPI_Improbe", self._comm.Improbe, mpi.ANY_SOURCE, mpi.ANY_TAG, status)) is not None:
            data = np.empty(status.Get_count(mpi.BYTE), np.uint8)
            call_mpi("MPI_Mrecv", waiting.Recv, [data, data.size, mpi.BYTE])
            self._received[status.Get_source()] += 1
            messages.append((status.Get_source(), data.tobytes()))
        return messages

    def close(self, *, idle: bool = True) -> None:
        """See Mailbox.close."""
        if not idle or self._mpi.Is_finalized():
            return
        # A message left behind could turn up in a later communicator.
        coming = np.zeros_like(self._sent)
        collective("MPI_Alltoall", self._comm, self._sent, coming)
        while (self._received < coming).any():
            self.receive()
        for request, _ in self._sending:
            finish("MPI_Wait", request)
        free_comm(self._comm)
