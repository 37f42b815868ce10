"""A transport in one file: the ranks exchange pickled arrays through mpi4py, and numpy computes.

It is slow, because every rank receives the whole of every array; it shows what a transport has to define. It is for
ranks of one host: there a wire dtype or a coding of gradients has no effect, as in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from hvdkit.engine.api import (
    Array,
    Buckets,
    BucketSpec,
    Buffer,
    Groups,
    InPlaceSegment,
    NumpyArithmetic,
    Op,
    Phases,
    Transport,
    check_alltoall,
    check_counts,
    check_groups,
    check_reduction,
    check_root,
    closed_before,
    find_group,
    make_buffer,
)


class PickledTransport(Transport):
    """See Transport. comm: a communicator that the transport owns; close() frees it."""

    name = "pickled"
    backend = "mpi"

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.arithmetic = NumpyArithmetic()
        self._comm: MPI.Intracomm | None = comm

    def exchange(self, array: Array) -> list[Array]:
        """Return the arrays of all ranks, in rank order; collective. All other collectives are made of this one."""
        if self._comm is None:
            raise closed_before(self.name)
        return list(self._comm.allgather(array))

    def allreduce(self, buffer: Buffer, op: Op = "sum", scale: float = 1.0) -> None:
        check_reduction(buffer.dtype, op, "allreduce")
        sources = [Buffer(array, buffer.dtype) for array in self.exchange(buffer.array)]
        self.arithmetic.combine(buffer, sources, op, scale)

    def reducescatter(self, buffer: Buffer, counts: Sequence[int], op: Op = "sum") -> Buffer:
        check_counts("reducescatter", counts, self.size, total=buffer.count)
        total = Buffer(buffer.array.copy(), buffer.dtype)
        self.allreduce(total, op)
        return total.pieces(counts)[self.rank]

    def allgather(self, buffer: Buffer, counts: Sequence[int]) -> Buffer:
        check_counts("allgather", counts, self.size, total=None)
        if counts[self.rank] != buffer.count:
            raise ValueError(f"allgather: rank {self.rank} has {buffer.count} elements, not {counts[self.rank]}")
        return Buffer(np.concatenate(self.exchange(buffer.array)), buffer.dtype)

    def broadcast(self, buffer: Buffer, root: int) -> None:
        check_root(root, self.size)
        buffer.array[:] = self.exchange(buffer.array)[root]

    def alltoall(self, buffer: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Buffer:
        check_alltoall(send_counts, receive_counts, self.rank, self.size, total=buffer.count)
        starts = self.exchange(np.cumsum([0, *send_counts]))
        arrays = self.exchange(buffer.array)
        mine = [array[start[self.rank] : start[self.rank + 1]] for array, start in zip(arrays, starts, strict=True)]
        return Buffer(np.concatenate(mine), buffer.dtype)

    def barrier(self) -> None:
        self.exchange(np.empty(0))

    def split(self, groups: Groups) -> PickledTransport | None:
        check_groups(groups, self.size)
        if self._comm is None:
            raise closed_before(self.name)
        number = find_group(groups, self.rank)
        if number is None:
            self._comm.Split(MPI.UNDEFINED, 0)
            return None
        comm = self._comm.Split(number, groups[number].index(self.rank))
        assert isinstance(comm, MPI.Intracomm)
        return PickledTransport(comm)

    def open_buckets(self, specs: Sequence[BucketSpec], depth: int | None = None) -> PickledBuckets:
        return PickledBuckets(self, specs)

    def close(self, *, idle: bool = True) -> None:
        if self._comm is not None and idle:
            self._comm.Free()
        self._comm = None


class PickledBuckets(Buckets):
    """See Buckets. An operation is complete when begin() returns, because all ranks begin operations in one order."""

    busy = False
    sent_bytes = 0  # over a network

    def __init__(self, transport: PickledTransport, specs: Sequence[BucketSpec]) -> None:
        self._transport, self._specs, self.depth = transport, specs, len(specs)
        self.memory = [make_buffer(spec.count, spec.dtype) for spec in specs]
        self.owned = [(0, 0)] * len(specs)  # begin() reads all of a rank's memory
        rank, size = transport.rank, transport.size
        self.shard = [(spec.count * rank // size, spec.count * (rank + 1) // size) for spec in specs]

    def begin(self, index: int, in_place: Sequence[InPlaceSegment], phases: Phases) -> None:
        spec, memory = self._specs[index], self.memory[index]
        if phases.reduce_scatter:  # the sum of the whole bucket is the result of both phases
            self._transport.allreduce(memory, spec.op, spec.prescale * spec.postscale)
        else:
            start, stop = self.shard[index]
            memory.array[:] = np.concatenate(self._transport.exchange(memory.array[start:stop]))

    def advance(self) -> bool:
        return False

    def finished(self, index: int) -> bool:
        return True

    def wait(self, index: int, watch: Callable[[], None] | None = None) -> None:
        """See Buckets.wait. Nothing is left to wait for."""

    def close(self) -> None:
        self.memory = []
