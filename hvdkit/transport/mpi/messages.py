"""Messages through MPI, which are all asked after at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdkit.errors import TransportError
from hvdkit.transport.between.wire import Pending
from hvdkit.transport.buffer import Buffer
from hvdkit.transport.mpi.library import call_mpi, load_mpi, moved
from hvdkit.transport.polling import calls

if TYPE_CHECKING:
    from mpi4py import MPI


class MpiMessages:
    """See Messages. comm: closed by whoever made it."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._test_some = load_mpi().Request.Testsome
        # mpi4py's requests hold the memory.
        self._requests: list[MPI.Request] = []
        self._pending: list[Pending] = []

    def send(self, buffer: Buffer, peer: int, tag: int, pending: Pending) -> None:
        self._add(call_mpi("MPI_Isend", self._comm.Isend, moved(buffer), peer, tag), pending)

    def receive(self, buffer: Buffer, peer: int, tag: int, pending: Pending) -> None:
        self._add(call_mpi("MPI_Irecv", self._comm.Irecv, moved(buffer), peer, tag), pending)

    def _add(self, request: MPI.Request, pending: Pending) -> None:
        calls().uncertain = True
        self._requests.append(request)
        self._pending.append(pending)
        pending.count += 1

    def turn(self) -> None:
        if not self._requests:
            return
        try:
            done = call_mpi("MPI_Testsome", self._test_some, self._requests)
        except TransportError:
            for request in self._requests:  # says what MPI_Testsome does not: which error it was
                call_mpi("MPI_Test", request.Test)
            raise
        if not done:
            return
        woken = []
        for at in sorted(done, reverse=True):
            pending = self._pending.pop(at)
            del self._requests[at]
            pending.count -= 1
            if not pending.count:
                woken.append(pending)
        for pending in reversed(woken):
            pending.wake()
