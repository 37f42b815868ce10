"""The transport of a group of one rank, which moves nothing and needs no MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdkit.transport.api import Transport, check_alltoall, check_counts, check_root
from hvdkit.transport.arithmetic import Arithmetic, NumpyArithmetic, check_reduction
from hvdkit.transport.buckets import Buckets, BucketSpec, InPlaceSegment, Phases, cover
from hvdkit.transport.buffer import Buffer, Op, make_buffer
from hvdkit.transport.division import Groups, check_groups
from hvdkit.transport.mailbox import LocalMailbox
from hvdkit.transport.request import closed_before


class SingleTransport(Transport):
    """Does every collective for one rank, with the same checks of the arguments as the other transports."""

    name = "single"
    backend = "none"
    rank = 0
    size = 1

    def __init__(self, arithmetic: Arithmetic | None = None) -> None:
        self.arithmetic: Arithmetic = arithmetic or NumpyArithmetic()
        self._closed = False

    def allreduce(self, buffer: Buffer, op: Op = "sum", scale: float = 1.0) -> None:
        self._check_open()
        check_reduction(buffer.dtype, op, "allreduce")
        if scale != 1.0:
            self.arithmetic.combine(buffer, [buffer], scale=scale)

    def reducescatter(self, buffer: Buffer, counts: Sequence[int], op: Op = "sum") -> Buffer:
        check_counts("reducescatter", counts, 1, total=buffer.count)
        check_reduction(buffer.dtype, op, "reducescatter")
        return self._copy(buffer)

    def allgather(self, buffer: Buffer, counts: Sequence[int]) -> Buffer:
        check_counts("allgather", counts, 1, total=buffer.count)
        return self._copy(buffer)

    def broadcast(self, buffer: Buffer, root: int) -> None:
        self._check_open()
        check_root(root, 1)

    def alltoall(self, buffer: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Buffer:
        check_alltoall(send_counts, receive_counts, 0, 1, total=buffer.count)
        return self._copy(buffer)

    def barrier(self) -> None:
        self._check_open()

    def split(self, groups: Groups) -> SingleTransport | None:
        self._check_open()
        check_groups(groups, 1)
        return SingleTransport(self.arithmetic) if groups else None

    def create_group(self, ranks: Sequence[int]) -> SingleTransport:
        check_groups([ranks], 1)
        return SingleTransport(self.arithmetic)

    def open_mailbox(self) -> LocalMailbox:
        return LocalMailbox()

    def open_buckets(self, specs: Sequence[BucketSpec], depth: int | None = None) -> SingleBuckets:
        self._check_open()
        return SingleBuckets(self, specs)

    def close(self, *, idle: bool = True) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise closed_before("single")

    def _copy(self, buffer: Buffer) -> Buffer:
        self._check_open()
        out = make_buffer(buffer.count, buffer.dtype)
        self.arithmetic.copy(out, buffer)
        return out


class SingleBuckets(Buckets):
    """Buckets that are only scaled. Nothing crosses between hosts, so the wire dtype has no effect."""

    busy = False
    sent_bytes = 0

    def __init__(self, transport: SingleTransport, specs: Sequence[BucketSpec]) -> None:
        self._transport = transport
        self._specs = list(specs)
        self.depth = len(specs)
        self.memory = [make_buffer(spec.count, spec.dtype) for spec in specs]
        self.owned = self.shard = [(0, spec.count) for spec in specs]

    def begin(self, index: int, in_place: Sequence[InPlaceSegment], phases: Phases) -> None:
        if not phases.reduce_scatter:
            return
        scale = self._specs[index].prescale * self._specs[index].postscale
        for one in cover(self.memory[index], self.owned[index], in_place):
            if scale != 1.0 or one.target is not one.source:
                self._transport.arithmetic.combine(one.target, [one.source], scale=scale)

    def advance(self) -> bool:
        return False

    def finished(self, index: int) -> bool:
        return True

    def wait(self, index: int, watch: Callable[[], None] | None = None) -> None:
        """See Buckets.wait."""

    def close(self) -> None:
        self.memory, self.owned, self.shard = [], [], []
