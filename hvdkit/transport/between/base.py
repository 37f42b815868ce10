"""The base class of transports that reach ranks on any host: MPI and Gloo."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from hvdkit.transport.api import Transport, check_alltoall, check_counts, check_root
from hvdkit.transport.arithmetic import Arithmetic, check_reduction, check_scale
from hvdkit.transport.between import large_counts
from hvdkit.transport.between.buckets import WireBuckets, WireCrossing
from hvdkit.transport.between.collectives import finish_steps, reduce_steps
from hvdkit.transport.between.measure import measure
from hvdkit.transport.between.select import BetweenHosts
from hvdkit.transport.between.wire import Wire
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import Buffer, Op, make_buffer
from hvdkit.transport.division import Groups
from hvdkit.transport.request import Request


class BaseTransport(Transport):
    """A transport on which others are built: it finds the ranks of each host, and does all collectives on a wire."""

    between: BetweenHosts

    def __init__(self, rank: int, size: int, arithmetic: Arithmetic, between: BetweenHosts) -> None:
        self.rank, self.size, self.arithmetic, self.between = rank, size, arithmetic, between

    @property
    @abstractmethod
    def wire(self) -> Wire:
        """Return the wire of this transport's own collectives; collective at the first access.

        Raises TransportError after close().
        """

    @abstractmethod
    def open_wire(self) -> Wire:
        """Open another wire between the same ranks, which the caller closes; collective."""

    @abstractmethod
    def find_nodes(self) -> list[int]:
        """Return a host number for each rank, the same for ranks of one host; collective."""

    @abstractmethod
    def split(self, groups: Groups) -> BaseTransport | None:
        """See Transport.split."""

    def report_loss(self, process: str) -> None:
        """Report a dead process to the library, if it cannot detect that itself. process: the launcher's name."""

    def allreduce(self, buffer: Buffer, op: Op = "sum", scale: float = 1.0) -> None:
        check_reduction(buffer.dtype, op, "allreduce")
        check_scale(buffer.dtype, scale)
        wire = self.wire
        if scale == 1.0 and buffer.count <= wire.largest_count and wire.can_reduce(buffer.dtype):
            self._wait_for(wire.allreduce(buffer, buffer, op))
            return
        spec = BucketSpec(buffer.dtype, buffer.count, op, postscale=scale)
        finish_steps(reduce_steps(wire, buffer, buffer, spec, arithmetic=self.arithmetic), self.check)

    def reducescatter(self, buffer: Buffer, counts: Sequence[int], op: Op = "sum") -> Buffer:
        check_counts("reducescatter", counts, self.size, total=buffer.count)
        check_reduction(buffer.dtype, op, "reducescatter")
        out = make_buffer(counts[self.rank], buffer.dtype)
        large_counts.reducescatter(self.wire, buffer, out, counts, op, self.arithmetic, self._wait_for)
        return out

    def allgather(self, buffer: Buffer, counts: Sequence[int]) -> Buffer:
        check_counts("allgather", counts, self.size, total=None)
        check_counts("allgather", [counts[self.rank]], 1, total=buffer.count)
        out = make_buffer(sum(counts), buffer.dtype)
        large_counts.allgather(self.wire, buffer, out, counts, self._wait_for)
        return out

    def broadcast(self, buffer: Buffer, root: int) -> None:
        check_root(root, self.size)
        large_counts.broadcast(self.wire, buffer, root, self._wait_for)

    def alltoall(self, buffer: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Buffer:
        check_alltoall(send_counts, receive_counts, self.rank, self.size, total=buffer.count)
        out = make_buffer(sum(receive_counts), buffer.dtype)
        large_counts.alltoall(self.wire, buffer, send_counts, out, receive_counts, self._wait_for)
        return out

    def barrier(self) -> None:
        self._wait_for(self.wire.barrier())

    def _wait_for(self, request: Request) -> None:
        self._watched(request).wait()

    def measure(self) -> None:
        if self.size > 1:
            self.between.measured = measure(self.wire, self.check)

    def open_crossing(self) -> WireCrossing:
        """Open an object that reduces in steps over these ranks, which are on different hosts; collective."""
        if self.between.measured is None:
            self.measure()
        return WireCrossing(self.open_wire(), self.arithmetic, self.between)

    def open_buckets(self, specs: Sequence[BucketSpec], depth: int | None = None) -> WireBuckets:
        return WireBuckets(self.open_crossing(), specs, depth, self.check)
