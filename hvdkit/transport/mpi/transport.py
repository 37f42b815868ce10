"""All ranks through MPI, with mpi4py and numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hvdkit.errors import TransportError
from hvdkit.transport.arguments import check_alltoall, check_counts, check_root
from hvdkit.transport.arithmetic import Arithmetic, NumpyArithmetic
from hvdkit.transport.between.buckets import WireBuckets, WireCrossing
from hvdkit.transport.between.collectives import combine_pieces, reduce_steps
from hvdkit.transport.between.cost import ALGORITHMS
from hvdkit.transport.between.measure import measure
from hvdkit.transport.between.select import BetweenHosts
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import HALF, Buffer, Op, check_reduction, make_buffer
from hvdkit.transport.division import Groups, check_groups, find_group
from hvdkit.transport.mpi import large_counts as mpi_large
from hvdkit.transport.mpi.communicators import duplicate_comm, make_comm
from hvdkit.transport.mpi.library import collective, free_comm, load_mpi, operation, own_comm, plain
from hvdkit.transport.mpi.mailbox import MpiMailbox
from hvdkit.transport.mpi.nonblocking import MpiWire
from hvdkit.transport.mpi.ulfm import world_comm
from hvdkit.transport.polling import Backoff
from hvdkit.transport.small_collectives import gather_ints

if TYPE_CHECKING:
    from mpi4py import MPI


def open_mpi(arithmetic: Arithmetic | None = None, comm: MPI.Intracomm | None = None) -> MpiTransport:
    """A transport of all ranks that MPI knows; collective. See load_mpi for what it raises.

    arithmetic: numpy's if None. comm: a communicator of some of them, which becomes this transport's own.
    """
    own = duplicate_comm(world_comm()) if comm is None else comm
    return MpiTransport(own_comm(own), arithmetic or NumpyArithmetic())


class MpiTransport:
    """Moves bytes with MPI's collectives; float16 and bfloat16, which MPI lacks, are added here, in float32.

    comm: this transport's alone; freed by close(). algorithm: see BetweenHosts. spare: a communicator of the same
    ranks, made when all ranks of the world made such in one order. Open MPI numbers communicators in the order of those
    that they are made from, so ranks that make some at any time, in several threads, can wait for each other for ever.
    """

    name = "mpi"
    backend = "mpi"
    local_ranks = 1

    def __init__(
        self,
        comm: MPI.Intracomm,
        arithmetic: Arithmetic,
        algorithm: str = "auto",
        spare: MPI.Intracomm | None = None,
    ) -> None:
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.arithmetic = arithmetic
        self.between = BetweenHosts(algorithm, ("library", *ALGORITHMS), comm.size)
        self._comm: MPI.Intracomm | None = comm
        self._spare = spare

    @property
    def comm(self) -> MPI.Intracomm:
        """The communicator. Raises TransportError after close()."""
        if self._comm is None:
            raise TransportError("This MPI transport has been closed. Call hvd.init() again, or move the call before.")
        return self._comm

    def allreduce(self, buffer: Buffer, op: Op = "sum", scale: float = 1.0) -> None:
        """See Transport.allreduce."""
        if buffer.dtype in HALF:
            spec = BucketSpec(buffer.dtype, buffer.count, op, postscale=scale)
            waiting = Backoff()
            for _ in reduce_steps(MpiWire(self.comm), buffer, buffer, spec, arithmetic=self.arithmetic):
                waiting.pause()
            return
        check_reduction(buffer.dtype, op, "allreduce")
        in_place, how = load_mpi().IN_PLACE, operation(op, buffer.dtype)
        for part in mpi_large.countable(buffer):
            collective("MPI_Allreduce", self.comm, in_place, plain(part), how)
        if scale != 1.0:
            self.arithmetic.combine(buffer, [buffer], scale=scale)

    def reducescatter(self, buffer: Buffer, counts: Sequence[int], op: Op = "sum") -> Buffer:
        """See Transport.reducescatter. Raises ValueError for counts that do not fit the buffer."""
        check_counts("reducescatter", counts, self.size, total=buffer.count)
        out = make_buffer(counts[self.rank], buffer.dtype)
        check_reduction(buffer.dtype, op, "reducescatter")
        if buffer.dtype in HALF:
            received = make_buffer(out.count * self.size, buffer.dtype)
            mpi_large.alltoall(self.comm, buffer, counts, received, [out.count] * self.size)
            combine_pieces(out, received, BucketSpec(buffer.dtype, out.count, op), self.arithmetic)
        else:
            mpi_large.reducescatter(self.comm, buffer, out, counts, op)
        return out

    def allgather(self, buffer: Buffer, counts: Sequence[int]) -> Buffer:
        """See Transport.allgather. Raises ValueError for counts that do not fit the buffer."""
        check_counts("allgather", counts, self.size, total=None)
        check_counts("allgather", [counts[self.rank]], 1, total=buffer.count)
        out = make_buffer(sum(counts), buffer.dtype)
        mpi_large.allgather(self.comm, buffer, out, counts)
        return out

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """See Transport.broadcast. Raises ValueError for a root that is no rank."""
        check_root(root, self.size)
        mpi_large.broadcast(self.comm, buffer, root)

    def alltoall(self, buffer: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Buffer:
        """See Transport.alltoall. Raises ValueError for counts that do not fit the buffer."""
        check_alltoall(send_counts, receive_counts, self.rank, self.size, total=buffer.count)
        out = make_buffer(sum(receive_counts), buffer.dtype)
        mpi_large.alltoall(self.comm, buffer, send_counts, out, receive_counts)
        return out

    def barrier(self) -> None:
        """See Transport.barrier."""
        collective("MPI_Barrier", self.comm)

    def split(self, groups: Groups) -> MpiTransport | None:
        """See Transport.split."""
        check_groups(groups, self.size)
        number = find_group(groups, self.rank)
        if number is None:
            make_comm("MPI_Comm_split", self.comm, load_mpi().UNDEFINED, 0)
            return None
        comm = own_comm(make_comm("MPI_Comm_split", self.comm, number, groups[number].index(self.rank)))
        return MpiTransport(comm, self.arithmetic, self.between.algorithm, own_comm(duplicate_comm(comm)))

    def subgroup(self, ranks: Sequence[int]) -> MpiTransport | None:
        """See Transport.subgroup."""
        return self.split([ranks])

    def find_nodes(self) -> list[int]:
        """See BaseTransport.find_nodes. A host is what shares memory, as MPI finds it: its first rank is its number."""
        local = own_comm(make_comm("MPI_Comm_split_type", self.comm, load_mpi().COMM_TYPE_SHARED, self.rank))
        first = np.array([self.rank], np.int64)
        collective("MPI_Bcast", local, first, 0)
        free_comm(local)
        return gather_ints(self, int(first[0]))

    def _more(self) -> MPI.Intracomm:
        """Another communicator of the same ranks."""
        spare, self._spare = self._spare, None
        return own_comm(duplicate_comm(self.comm)) if spare is None else spare

    def open_mailbox(self) -> MpiMailbox:
        """See Transport.open_mailbox."""
        return MpiMailbox(self._more())

    def open_buckets(self, specs: Sequence[BucketSpec], depth: int | None = None) -> WireBuckets:
        """See Transport.open_buckets."""
        # MPI itself tells of a lost rank, when it is asked for progress.
        return WireBuckets(self.open_crossing(), specs, depth, check=lambda: None)

    def measure(self) -> None:
        """See BaseTransport.measure."""
        if self.size > 1:
            wire = self._open_wire()
            self.between.measured = measure(wire, self.check)
            wire.close()

    def open_crossing(self) -> WireCrossing:
        """See BaseTransport.open_crossing."""
        if self.between.measured is None:
            self.measure()
        return WireCrossing(self._open_wire(), self.arithmetic, self.between)

    def _open_wire(self) -> MpiWire:
        return MpiWire(self._more())

    def check(self) -> None:
        """See Transport.check."""

    def leave(self) -> None:
        """See Transport.leave. There is no way to tell without the others' help."""

    def close(self, *, idle: bool = True) -> None:
        """See Transport.close. Where it is not idle MPI keeps the communicator, for collectives left in the middle."""
        if self._comm is not None:
            comm, self._comm = self._comm, None
            if idle:
                if self._spare is not None:
                    free_comm(self._spare)
                free_comm(comm)
