"""All ranks through MPI, with mpi4py and numpy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from hvdkit.errors import TransportError
from hvdkit.transport import mpi_library
from hvdkit.transport.arithmetic import NumpyArithmetic
from hvdkit.transport.base import HALF, Arithmetic, BucketSpec, Buffer, Op, make_buffer, plan_depth, see_as
from hvdkit.transport.buckets import SteppedBuckets
from hvdkit.transport.checks import check_alltoall, check_counts, check_ranks, check_root
from hvdkit.transport.mailbox import MpiMailbox
from hvdkit.transport.mpi_library import call_mpi, collective, load_mpi, moved, moved_pieces, operation, plain
from hvdkit.transport.mpi_steps import combine_pieces, reduce_steps

if TYPE_CHECKING:
    from mpi4py import MPI


def open_mpi(arithmetic: Arithmetic | None = None) -> MpiTransport:
    """A transport of all ranks that MPI knows; collective. See load_mpi for what it raises.

    arithmetic: numpy's if None.
    """
    return MpiTransport(_own(load_mpi().COMM_WORLD.Dup()), arithmetic or NumpyArithmetic())


def _own(comm: MPI.Comm) -> MPI.Intracomm:
    # Errors come back as exceptions, whatever the program has set for its own communicators.
    comm.Set_errhandler(load_mpi().ERRORS_RETURN)
    return cast("MPI.Intracomm", comm)


class MpiTransport:
    """Moves bytes with MPI's collectives; float16 and bfloat16, which MPI lacks, are added here, in float32.

    comm: this transport's alone; freed by close().
    """

    name = "mpi"
    local_ranks = 1

    def __init__(self, comm: MPI.Intracomm, arithmetic: Arithmetic) -> None:
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.arithmetic = arithmetic
        self._comm: MPI.Intracomm | None = comm

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
            for _ in reduce_steps(self.comm, buffer, buffer, spec, arithmetic=self.arithmetic):
                os.sched_yield()
            return
        in_place, how = load_mpi().IN_PLACE, operation(op, buffer.dtype)
        for part in _countable(buffer):
            collective("MPI_Allreduce", self.comm, in_place, plain(part), how)
        if scale != 1.0:
            self.arithmetic.combine(buffer, [buffer], scale=scale)

    def reducescatter(self, buffer: Buffer, counts: Sequence[int], op: Op = "sum") -> Buffer:
        """See Transport.reducescatter. Raises ValueError for counts that do not fit the buffer."""
        check_counts("reducescatter", counts, self.size, total=buffer.count)
        out = make_buffer(counts[self.rank], buffer.dtype)
        pieces = moved_pieces(buffer, list(counts))
        if buffer.dtype in HALF:
            received = make_buffer(out.count * self.size, buffer.dtype)
            each = moved_pieces(received, [out.count] * self.size)
            collective("MPI_Alltoallv", self.comm, pieces, each)
            combine_pieces(out, received, BucketSpec(buffer.dtype, out.count, op), self.arithmetic)
        else:
            how = operation(op, buffer.dtype)
            collective("MPI_Reduce_scatter", self.comm, plain(buffer), plain(out), list(counts), how)
        return out

    def allgather(self, buffer: Buffer, counts: Sequence[int]) -> Buffer:
        """See Transport.allgather. Raises ValueError for counts that do not fit the buffer."""
        check_counts("allgather", counts, self.size, total=None)
        check_counts("allgather", [counts[self.rank]], 1, total=buffer.count)
        out = make_buffer(sum(counts), buffer.dtype)
        collective("MPI_Allgatherv", self.comm, moved(buffer), moved_pieces(out, list(counts)))
        return out

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """See Transport.broadcast. Raises ValueError for a root that is no rank."""
        check_root(root, self.size)
        for part in _countable(buffer):
            collective("MPI_Bcast", self.comm, moved(part), root)

    def alltoall(self, buffer: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Buffer:
        """See Transport.alltoall. Raises ValueError for counts that do not fit the buffer."""
        check_alltoall(send_counts, receive_counts, self.rank, self.size, total=buffer.count)
        out = make_buffer(sum(receive_counts), buffer.dtype)
        sent, received = moved_pieces(buffer, list(send_counts)), moved_pieces(out, list(receive_counts))
        collective("MPI_Alltoallv", self.comm, sent, received)
        return out

    def barrier(self) -> None:
        """See Transport.barrier."""
        collective("MPI_Barrier", self.comm)

    def subgroup(self, ranks: Sequence[int]) -> MpiTransport | None:
        """See Transport.subgroup. Raises ValueError for ranks that are not there or come twice."""
        check_ranks(ranks, self.size)
        everyone = self.comm.Get_group()
        group = everyone.Incl(list(ranks))
        try:
            comm = call_mpi("MPI_Comm_create", self.comm.Create, group)
        finally:
            group.Free()
            everyone.Free()
        if self.rank not in ranks:
            return None
        return MpiTransport(_own(comm), self.arithmetic)

    def split_by_node(self, node: int | None = None) -> tuple[MpiTransport, MpiTransport]:
        """The ranks of this host, and the ranks with the same place on every host, both in rank order; collective.

        The second may be shorter on some ranks, where hosts have different numbers of ranks.
        node: the number of this rank's host, given by all ranks or none; what shares memory, as MPI finds it, if None.
        """
        mpi = load_mpi()
        if node is None:
            local = call_mpi("MPI_Comm_split_type", self.comm.Split_type, mpi.COMM_TYPE_SHARED, self.rank)
        else:
            local = call_mpi("MPI_Comm_split", self.comm.Split, node, self.rank)
        cross = call_mpi("MPI_Comm_split", self.comm.Split, local.rank, self.rank)
        return MpiTransport(_own(local), self.arithmetic), MpiTransport(_own(cross), self.arithmetic)

    def open_mailbox(self) -> MpiMailbox:
        """See Transport.open_mailbox."""
        return MpiMailbox(_own(call_mpi("MPI_Comm_dup", self.comm.Dup)))

    def open_lane(self) -> None:
        """See Transport.open_lane. Ranks of one host would have SharedMemoryTransport."""

    def open_buckets(self, specs: Sequence[BucketSpec], depth: int | None = None) -> MpiBuckets:
        """See Transport.open_buckets."""
        return MpiBuckets(self, specs, depth)

    def open_crossing(self) -> MpiCrossing:
        """What reduces between hosts, beside this transport's own collectives; collective."""
        return MpiCrossing(self)

    def check(self) -> None:
        """See Transport.check."""

    def leave(self) -> None:
        """See Transport.leave. There is no way to tell without the others' help."""

    def close(self) -> None:
        """See Transport.close."""
        if self._comm is not None:
            comm, self._comm = self._comm, None
            _free(comm)


class MpiCrossing:
    """Reductions in steps over the ranks of a transport, on a communicator of their own; opened by all ranks together.

    A communicator of their own, because steps may run in another thread than the transport's collectives, and MPI wants
    the same order on all ranks within one communicator.
    """

    def __init__(self, transport: MpiTransport) -> None:
        self._transport = transport
        self._comm = _own(call_mpi("MPI_Comm_dup", transport.comm.Dup))

    def __call__(self, source: Buffer, out: Buffer, spec: BucketSpec, prescale: float = 1.0) -> Iterator[bool]:
        """Reduce `source` into `out`; see reduce_steps. spec.prescale has been applied, or is passed as `prescale`."""
        arithmetic = self._transport.arithmetic
        return reduce_steps(self._comm, source, out, spec, arithmetic=arithmetic, prescale=prescale)

    def close(self, *, idle: bool = True) -> None:
        """Free the communicator; collective.

        idle: False if a reduction has failed half-way; MPI then keeps what the others may still send to.
        """
        if idle and self._comm != load_mpi().COMM_NULL:
            _free(self._comm)


class MpiBuckets(SteppedBuckets):
    """Buckets in ordinary memory, each reduced over all ranks of a transport; opened by all ranks together."""

    def __init__(self, transport: MpiTransport, specs: Sequence[BucketSpec], depth: int | None) -> None:
        super().__init__(check=lambda: None)  # MPI itself tells of a lost rank, when it is asked for progress
        self._specs = list(specs)
        self._crossing = MpiCrossing(transport)
        self.depth, nbytes = plan_depth(specs, depth)
        pieces = [np.empty(nbytes, np.uint8) for _ in range(self.depth)]
        self.memory = [see_as(pieces[at % self.depth], spec) for at, spec in enumerate(specs)]
        self.own = [(0, 0)] * len(specs)

    def steps(self, index: int, elsewhere: Sequence[tuple[int, Buffer]]) -> Iterator[bool]:
        """See SteppedBuckets."""
        spec, memory = self._specs[index], self.memory[index]
        return self._crossing(memory, memory, spec, spec.prescale)

    def close(self) -> None:
        """See Buckets.close."""
        idle = not self.busy
        super().close()
        self._crossing.close(idle=idle)
        self.memory, self.own = [], []


def _countable(buffer: Buffer) -> Iterator[Buffer]:
    """The buffer in parts that MPI can count."""
    largest = mpi_library.LARGEST_COUNT
    return (buffer.slice(at, min(at + largest, buffer.count)) for at in range(0, buffer.count, largest))


def _free(comm: MPI.Intracomm) -> None:
    if not load_mpi().Is_finalized():
        call_mpi("MPI_Comm_free", comm.Free)
