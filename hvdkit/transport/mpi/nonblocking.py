"""MPI's nonblocking collectives and messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvdkit.errors import TransportError
from hvdkit.transport.between.wire import Messages, Pending
from hvdkit.transport.buffer import HALF, Buffer, Op
from hvdkit.transport.mpi import library as mpi_library
from hvdkit.transport.mpi.library import (
    MpiRequest,
    call_mpi,
    check_not_ended,
    free_comm,
    load_mpi,
    moved,
    moved_pieces,
    operation,
    plain,
)
from hvdkit.transport.mpi.released import release_comm
from hvdkit.transport.polling import calls
from hvdkit.transport.request import NOTHING, Request, check_size, closed_meanwhile

if TYPE_CHECKING:
    from mpi4py import MPI


class _Message(MpiRequest):
    """A message to or from another rank over `wire`, of at most the size of `out`."""

    def __init__(self, what: str, wire: MpiWire, request: MPI.Request, out: Buffer, memory: Sequence[Any]) -> None:
        super().__init__(what, request, out, memory)
        self._wire, self._status, self._done = wire, load_mpi().Status(), False

    def done(self) -> bool:
        if not self._done:
            self._wire.check_open()
            self._done = bool(call_mpi(self._what, self._request.Test, self._status))
            if self._done and self._what == "MPI_Irecv":
                check_size(self._status.Get_source(), self._status.Get_count(load_mpi().BYTE), self.out)
        return self._done


class MpiMessages:
    """See Messages; one call polls all of them. comm: the caller frees it."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._test_some = load_mpi().Request.Testsome
        # mpi4py's requests keep the memory alive.
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
            for request in self._requests:  # MPI_Test reports the error itself, unlike MPI_Testsome
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


class MpiWire:
    """See Wire. comm: used by this wire only; close() frees it."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.messages: Messages | None = MpiMessages(comm)
        self.comm, self._closed = comm, False
        self._mpi = load_mpi()

    @property
    def largest_count(self) -> int:
        return mpi_library.LARGEST_COUNT

    def can_reduce(self, dtype: str) -> bool:
        return dtype not in HALF

    def can_scatter(self, dtype: str) -> bool:
        return dtype not in HALF

    def allreduce(self, source: Buffer, out: Buffer, op: Op) -> MpiRequest:
        in_place = source is out or source.array.ctypes.data == out.array.ctypes.data
        sent = self._mpi.IN_PLACE if in_place else plain(source)
        return self._begin("MPI_Iallreduce", out, sent, plain(out), operation(op, out.dtype))

    def reducescatter(self, source: Buffer, out: Buffer, counts: Sequence[int], op: Op) -> MpiRequest:
        arguments = plain(source), plain(out), list(counts), operation(op, out.dtype)
        return self._begin("MPI_Ireduce_scatter", out, *arguments)

    def alltoall(
        self, sent: Buffer, send_counts: Sequence[int], received: Buffer, receive_counts: Sequence[int]
    ) -> MpiRequest:
        pieces = moved_pieces(sent, list(send_counts)), moved_pieces(received, list(receive_counts))
        return self._begin("MPI_Ialltoallv", received, *pieces)

    def allgather(self, gathered: Buffer, counts: Sequence[int], own: Buffer | None = None) -> MpiRequest:
        sent = self._mpi.IN_PLACE if own is None else moved(own)
        return self._begin("MPI_Iallgatherv", gathered, sent, moved_pieces(gathered, list(counts)))

    def broadcast(self, buffer: Buffer, root: int) -> MpiRequest:
        return self._begin("MPI_Ibcast", buffer, moved(buffer), root)

    def barrier(self) -> MpiRequest:
        return self._begin("MPI_Ibarrier", NOTHING)

    def begin_message(self, buffer: Buffer, peer: int, tag: int, *, sends: bool) -> Request:
        """See Transport.begin_message. The message has at most MPI's largest count of elements."""
        check_not_ended(self._mpi)
        calls().uncertain = True
        what, memory = "MPI_Isend" if sends else "MPI_Irecv", moved(buffer)
        return _Message(what, self, call_mpi(what, getattr(self.comm, what[4:]), memory, peer, tag), buffer, memory)

    def check_open(self) -> None:
        """Raise TransportError after close()."""
        check_not_ended(self._mpi)
        if self._closed:
            raise closed_meanwhile()

    def _begin(self, what: str, out: Buffer, *arguments: Any) -> MpiRequest:
        check_not_ended(self._mpi)
        calls().begun += 1
        return MpiRequest(what, call_mpi(what, getattr(self.comm, what[4:]), *arguments), out, arguments)

    def close(self, *, idle: bool = True) -> None:
        """See Wire.close. If `idle` is False, MPI keeps the communicator, over which other ranks may still send."""
        self._closed = True
        if idle and self.comm != self._mpi.COMM_NULL:
            free_comm(self.comm)

    def release(self, *, idle: bool) -> None:
        """See Wire.release. Unless all ranks are idle, MPI keeps the communicator."""
        self._closed = True
        if idle and self.comm != self._mpi.COMM_NULL:
            release_comm(self.comm)
