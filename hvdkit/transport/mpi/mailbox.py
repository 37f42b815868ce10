"""A mailbox over MPI's point-to-point messages."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from hvdkit.errors import RankLostError, TransportError
from hvdkit.transport.mailbox import LocalMailbox
from hvdkit.transport.mpi.library import MpiRequest, call_mpi, check_not_ended, collective, free_comm, load_mpi
from hvdkit.transport.request import detach_buffers

if TYPE_CHECKING:
    from mpi4py import MPI


_MESSAGE, _LEAVING = 0, 1  # tags
_LEAVING_S = 1.0  # limit of the wait of an ending rank for its neighbours in the tree
_open: weakref.WeakSet[MpiMailbox] = weakref.WeakSet()


class MpiMailbox:
    """See Mailbox. comm: used by this mailbox only; close() frees it if all ranks call close().

    A rank that will not call close() notifies its neighbours in a binary tree, and they notify theirs. So no rank gets
    messages from all others.
    """

    star = False

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm, self._mpi = comm, load_mpi()
        self._local = LocalMailbox()
        self._sending: list[tuple[MPI.Request, bytes]] = []
        self._sent = np.zeros(comm.size, np.int64)
        self._received = np.zeros(comm.size, np.int64)
        self._told: dict[int, MPI.Request] = {}  # the ranks that were notified that this rank is leaving
        self._left: set[int] = set()  # the ranks that have notified this rank that they are leaving
        _open.add(self)

    def send(self, rank: int, message: bytes) -> None:
        if rank == self._comm.rank:
            self._local.send(rank, message)
            return
        check_not_ended(self._mpi)
        self._sent[rank] += 1
        data = np.frombuffer(message, np.uint8)
        request = call_mpi("MPI_Isend", self._comm.Isend, [data, data.size, self._mpi.BYTE], rank, _MESSAGE)
        self._sending.append((request, message))  # before MPI_Test, which may fail while MPI still reads the message
        self._sending = [pending for pending in self._sending if not call_mpi("MPI_Test", pending[0].Test)]

    def receive(self) -> list[tuple[int, bytes]]:
        mpi, messages = self._mpi, self._local.receive()
        check_not_ended(mpi)
        status = mpi.Status()
        while (matched := call_mpi("MPI_Improbe", self._comm.Improbe, mpi.ANY_SOURCE, mpi.ANY_TAG, status)) is not None:
            data = np.empty(status.Get_count(mpi.BYTE), np.uint8)
            call_mpi("MPI_Mrecv", matched.Recv, [data, data.size, mpi.BYTE])
            if status.Get_tag() == _LEAVING:
                self._left.add(status.Get_source())
                continue
            self._received[status.Get_source()] += 1
            messages.append((status.Get_source(), data.tobytes()))
        return messages

    def leave(self) -> None:
        """Notify the other ranks that this rank will not call close(); not collective, and from any thread."""
        rank = self._comm.rank
        self._tell({(rank - 1) // 2, 2 * rank + 1, 2 * rank + 2})

    def _tell(self, peers: Iterable[int]) -> None:
        ranks = set(range(self._comm.size)) - {self._comm.rank}
        if not self._mpi.Is_finalized():
            nothing = [np.empty(0, np.uint8), 0, self._mpi.BYTE]
            for peer in ranks.intersection(peers) - self._told.keys():
                with contextlib.suppress(TransportError):  # if a rank is lost, MPI itself notifies the others
                    self._told[peer] = call_mpi("MPI_Isend", self._comm.Isend, nothing, peer, _LEAVING)

    def leave_at_exit(self) -> None:
        """Do as leave(), and notify rank 0 too; on rank 0 notify all others."""
        self.leave()
        self._tell([0] if self._comm.rank else range(self._comm.size))

    def others_have_left(self) -> bool:
        """Return whether all ranks that this rank has notified have left too, or a rank is lost.

        If they have left, no message from them is in flight. Messages that have arrived are dropped.
        """
        try:
            self.receive()
        except TransportError:
            return True
        return self._left.issuperset(self._told)

    def _check(self) -> None:
        self.receive()
        if self._left:
            raise RankLostError("A rank has left the mailbox without closing it.")

    def close(self, *, idle: bool = True) -> None:
        """See Mailbox.close. If a rank has left, or `idle` is False, MPI keeps the communicator."""
        _open.discard(self)
        if not idle or self._mpi.Is_finalized():
            self.leave()  # the other ranks, which may be idle, would wait for this rank
            detach_buffers(self._sending)
            return
        # A message left behind could turn up in a later communicator.
        expected = np.zeros_like(self._sent)
        try:
            collective("MPI_Alltoall", self._comm, self._sent, expected, check=self._check)
        except TransportError as error:
            detach_buffers(self._sending)
            if not self._left or not isinstance(error, RankLostError):
                raise
            self.leave()  # the others must be notified too; MPI keeps the communicator, which is not used again
            return
        while (self._received < expected).any():
            self.receive()
        for request, _ in self._sending:
            MpiRequest("MPI_Wait", request).wait()
        free_comm(self._comm)


def leave_mailboxes() -> None:
    """Notify the other ranks that this process will close none of its mailboxes; not collective."""
    for mailbox in list(_open):
        mailbox.leave()


def wait_for_last_messages() -> None:
    """Wait, at the end of the process and at most a second, until ranks that end now have received all messages.

    Open MPI aborts a rank in MPI_Finalize that is still sending, over a connection that is being made, to a rank that
    has ended.
    """
    waiting, end_s = list(_open), time.monotonic() + _LEAVING_S
    for mailbox in waiting:
        mailbox.leave_at_exit()
    while (waiting := [one for one in waiting if not one.others_have_left()]) and time.monotonic() < end_s:
        time.sleep(0.001)
