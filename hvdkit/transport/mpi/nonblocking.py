"""MPI's collectives that do not block, and messages, on a communicator of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvdkit.transport.between.wire import Messages
from hvdkit.transport.buffer import HALF, Buffer, Op
from hvdkit.transport.mpi import library as mpi_library
from hvdkit.transport.mpi.library import call_mpi, free_comm, load_mpi, moved_pieces, operation, plain
from hvdkit.transport.mpi.messages import MpiMessages
from hvdkit.transport.polling import calls

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class MpiRequest:
    """See Request. what: the call that began it, for messages. memory: what MPI reads and writes until then."""

    what: str
    request: MPI.Request
    memory: Any

    def test(self) -> bool:
        """See Request.test."""
        return bool(call_mpi(self.what, self.request.Test))


class MpiWire:
    """See Wire. comm: this wire's alone; freed by close()."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.messages: Messages | None = MpiMessages(comm)
        self._comm = comm

    @property
    def largest_count(self) -> int:
        """See Wire.largest_count."""
        return mpi_library.LARGEST_COUNT

    def can_reduce(self, dtype: str) -> bool:
        """See Wire.can_reduce."""
        return dtype not in HALF

    def allreduce(self, source: Buffer, out: Buffer, op: Op) -> MpiRequest:
        """See Wire.allreduce."""
        in_place = source is out or source.array.ctypes.data == out.array.ctypes.data
        sent = load_mpi().IN_PLACE if in_place else plain(source)
        return self._begin("MPI_Iallreduce", sent, plain(out), operation(op, out.dtype))

    def alltoall(
        self, sent: Buffer, send_counts: Sequence[int], received: Buffer, receive_counts: Sequence[int]
    ) -> MpiRequest:
        """See Wire.alltoall."""
        pieces = moved_pieces(sent, list(send_counts)), moved_pieces(received, list(receive_counts))
        return self._begin("MPI_Ialltoallv", *pieces)

    def allgather(self, gathered: Buffer, counts: Sequence[int]) -> MpiRequest:
        """See Wire.allgather."""
        return self._begin("MPI_Iallgatherv", load_mpi().IN_PLACE, moved_pieces(gathered, list(counts)))

    def _begin(self, what: str, *arguments: Any) -> MpiRequest:
        calls().begun += 1
        return MpiRequest(what, call_mpi(what, getattr(self._comm, what[4:]), *arguments), arguments)

    def close(self, *, idle: bool = True) -> None:
        """See Wire.close. Where it is not idle MPI keeps what the others may still send to."""
        if idle and self._comm != load_mpi().COMM_NULL:
            free_comm(self._comm)
