"""The base class of transports that reach ranks on any host: MPI's and Gloo's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

from hvdkit.transport.api import Transport, check_alltoall, check_counts, check_root
from hvdkit.transport.arithmetic import Arithmetic, check_reduction, check_scale
from hvdkit.transport.between import large_counts
from hvdkit.transport.between.buckets import WireBuckets, WireCrossing
from hvdkit.transport.between.collectives import reduce_steps, until_done
from hvdkit.transport.between.measure import measure
from hvdkit.transport.between.select import BetweenHosts
from hvdkit.transport.between.wire import Wire
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import Buffer, Op, make_buffer
from hvdkit.transport.division import Groups
from hvdkit.transport.request import NOTHING, Request, StepQueue


class BaseTransport(Transport):
    """A transport that others are put on: it knows who is on which host, and begins all collectives on a wire.

    What a wire cannot do in one collective goes in steps, which the transport's StepQueue keeps in order. The blocking
    forms wait for the non-blocking ones.
    """

    between: BetweenHosts

    def __init__(self, rank: int, size: int, arithmetic: Arithmetic, between: BetweenHosts) -> None:
        self.rank, self.size, self.arithmetic, self.between = rank, size, arithmetic, between
        self._queue = StepQueue()

    @property
    @abstractmethod
    def wire(self) -> Wire:
        """That of this transport's own collectives; collective when asked the first time.

        Raises TransportError after close().
        """

    @abstractmethod
    def open_wire(self) -> Wire:
        """Another wire between the same ranks, which the caller closes; collective."""

    @abstractmethod
    def find_nodes(self) -> list[int]:
        """A number of each rank's host, the same for ranks of one host; collective."""

    @abstractmethod
    def split(self, groups: Groups) -> BaseTransport | None:
        """See Transport.split."""

    def report_loss(self, process: str) -> None:
        """Tell the library that a process is gone, by the launcher's name for it, if it does not see that itself."""

    def allreduce(self, buffer: Buffer, op: Op = "sum", scale: float = 1.0) -> None:
        check_scale(buffer.dtype, scale)
        if scale == 1.0 or not self.wire.can_reduce(buffer.dtype):
            self.iallreduce(buffer, op, scale).wait()
        else:
            self.iallreduce(buffer, op).wait()
            self.arithmetic.combine(buffer, [buffer], scale=scale)

    def reducescatter(self, buffer: Buffer, counts: Sequence[int], op: Op = "sum") -> Buffer:
        return self.ireducescatter(buffer, counts, op).wait()

    def allgather(self, buffer: Buffer, counts: Sequence[int]) -> Buffer:
        return self.iallgather(buffer, counts).wait()

    def broadcast(self, buffer: Buffer, root: int) -> None:
        self.ibroadcast(buffer, root).wait()

    def alltoall(self, buffer: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Buffer:
        return self.ialltoall(buffer, send_counts, receive_counts).wait()

    def barrier(self) -> None:
        self.ibarrier().wait()

    def iallreduce(self, buffer: Buffer, op: Op = "sum", scale: float = 1.0) -> Request:
        check_reduction(buffer.dtype, op, "allreduce")
        check_scale(buffer.dtype, scale)
        wire = self.wire
        if scale == 1.0 and self._is_one_call(wire, buffer.count) and wire.can_reduce(buffer.dtype):
            return self._watched(wire.allreduce(buffer, buffer, op))
        spec = BucketSpec(buffer.dtype, buffer.count, op, postscale=scale)
        return self._begin(reduce_steps(wire, buffer, buffer, spec, arithmetic=self.arithmetic), buffer)

    def ireducescatter(self, buffer: Buffer, counts: Sequence[int], op: Op = "sum") -> Request:
        check_counts("reducescatter", counts, self.size, total=buffer.count)
        check_reduction(buffer.dtype, op, "reducescatter")
        wire, out = self.wire, make_buffer(counts[self.rank], buffer.dtype)
        if self._is_one_call(wire, buffer.count) and wire.can_scatter(buffer.dtype):
            return self._watched(wire.reducescatter(buffer, out, counts, op))
        return self._begin(large_counts.reducescatter(wire, buffer, out, counts, op, self.arithmetic), out)

    def iallgather(self, buffer: Buffer, counts: Sequence[int]) -> Request:
        check_counts("allgather", counts, self.size, total=None)
        check_counts("allgather", [counts[self.rank]], 1, total=buffer.count)
        wire, out = self.wire, make_buffer(sum(counts), buffer.dtype)
        if self._is_one_call(wire, out.count):
            return self._watched(wire.allgather(out, counts, buffer))
        return self._begin(large_counts.allgather(wire, buffer, out, counts), out)

    def ibroadcast(self, buffer: Buffer, root: int) -> Request:
        check_root(root, self.size)
        wire = self.wire
        if self._is_one_call(wire, buffer.count):
            return self._watched(wire.broadcast(buffer, root))
        return self._begin(large_counts.broadcast(wire, buffer, root), buffer)

    def ialltoall(self, buffer: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Request:
        check_alltoall(send_counts, receive_counts, self.rank, self.size, total=buffer.count)
        out = make_buffer(sum(receive_counts), buffer.dtype)
        return self._begin(large_counts.alltoall(self.wire, buffer, send_counts, out, receive_counts), out)

    def ibarrier(self) -> Request:
        if not self._queue.busy:
            return self._watched(self.wire.barrier())
        return self._begin(_barrier(self.wire), NOTHING)

    def _is_one_call(self, wire: Wire, count: int) -> bool:
        """May the wire do a collective of so many elements now, and in one call?"""
        return not self._queue.busy and count <= wire.largest_count

    def _begin(self, steps: Iterator[bool], out: Buffer) -> Request:
        return self._queue.begin(steps, out, self.check)

    def measure(self) -> None:
        if self.size > 1:
            self.between.measured = measure(self.wire, self.check)

    def open_crossing(self) -> WireCrossing:
        """What reduces over these ranks in steps, where they stand on different hosts; collective."""
        if self.between.measured is None:
            self.measure()
        return WireCrossing(self.open_wire(), self.arithmetic, self.between)

    def open_buckets(self, specs: Sequence[BucketSpec], depth: int | None = None) -> WireBuckets:
        return WireBuckets(self.open_crossing(), specs, depth, self.check)


def _barrier(wire: Wire) -> Iterator[bool]:
    yield from until_done(wire.barrier(), free=True)
