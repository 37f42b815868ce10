"""NCCL over the stand-in as a Transport, so that it passes the checks of every transport.

What NCCL does not do goes by the transport of host memory, as in hvdkit: other dtypes and factors, and buckets with a
dtype of their own on the wire. The stand-in's device memory is the host's; its default stream is the calling thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from nccl_checks import connect_group

from hvdkit.errors import TransportError
from hvdkit.transport.api import Transport, check_alltoall, check_counts, check_root
from hvdkit.transport.arithmetic import NumpyArithmetic, check_reduction
from hvdkit.transport.buckets import Buckets, BucketSpec, InPlaceSegment, Phases
from hvdkit.transport.buffer import Buffer, Op, make_buffer
from hvdkit.transport.division import Groups
from hvdkit.transport.nccl import collectives
from hvdkit.transport.nccl.buckets import NcclBuckets
from hvdkit.transport.nccl.collectives import Reduction, can_reduce
from hvdkit.transport.nccl.communicator import Communicator

_STREAM = 0


def _pause() -> None:
    time.sleep(0.0002)


class NcclTransport(Transport):
    """See Transport. base: of the same ranks, closed with this one."""

    name = "nccl"

    def __init__(self, base: Transport) -> None:
        self._base, self._group = base, connect_group(base)
        self.backend, self.rank, self.size, self.arithmetic = base.backend, base.rank, base.size, NumpyArithmetic()
        self._closed = False

    def _run(self, body: Callable[[Communicator, int], None]) -> None:
        """Give it to NCCL's stream, and wait."""
        if self._closed:
            raise TransportError("This transport has been closed.")
        ready, done = self._group.device.make_event(), self._group.device.make_event()
        self._group.run(body, _STREAM, ready, done)
        self._group.wait(done, _pause)

    def allreduce(self, buffer: Buffer, op: Op = "sum", scale: float = 1.0) -> None:
        """See Transport.allreduce."""
        check_reduction(buffer.dtype, op, "allreduce")
        if not can_reduce(buffer.dtype, op, scaled=scale != 1.0):
            self._base.allreduce(buffer, op, scale)
            return
        self._run(
            lambda communicator, stream: collectives.all_reduce(
                communicator, stream, [buffer], [Reduction(communicator, buffer.dtype, op, scale)]
            )
        )

    def reducescatter(self, buffer: Buffer, counts: Sequence[int], op: Op = "sum") -> Buffer:
        """See Transport.reducescatter."""
        check_counts("reducescatter", counts, self.size, total=buffer.count)
        check_reduction(buffer.dtype, op, "reducescatter")
        if not can_reduce(buffer.dtype, op, scaled=False):
            return self._base.reducescatter(buffer, counts, op)
        result = make_buffer(counts[self.rank], buffer.dtype)
        self._run(
            lambda communicator, stream: collectives.reduce_scatter(
                communicator, stream, buffer, result, counts, Reduction(communicator, buffer.dtype, op, 1.0)
            )
        )
        return result

    def allgather(self, buffer: Buffer, counts: Sequence[int]) -> Buffer:
        """See Transport.allgather."""
        check_counts("allgather", counts, self.size, total=None)
        if counts[self.rank] != buffer.count:
            raise ValueError(f"allgather: counts is {list(counts)}, but this rank has {buffer.count} elements")
        result = make_buffer(sum(counts), buffer.dtype)
        self._run(lambda communicator, stream: collectives.all_gather(communicator, stream, buffer, result, counts))
        return result

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """See Transport.broadcast."""
        check_root(root, self.size)
        self._run(lambda communicator, stream: collectives.broadcast(communicator, stream, buffer, root))

    def alltoall(self, buffer: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Buffer:
        """See Transport.alltoall."""
        check_alltoall(send_counts, receive_counts, self.rank, self.size, total=buffer.count)
        result = make_buffer(sum(receive_counts), buffer.dtype)
        self._run(
            lambda communicator, stream: collectives.all_to_all(
                communicator, stream, buffer, result, send_counts, receive_counts
            )
        )
        return result

    def barrier(self) -> None:
        """See Transport.barrier."""
        self.allreduce(make_buffer(1, "int32"))

    def split(self, groups: Groups) -> Transport | None:
        """See Transport.split."""
        base = self._base.split(groups)
        return None if base is None else NcclTransport(base)

    def open_buckets(self, specs: Sequence[BucketSpec], depth: int | None = None) -> Buckets:
        """See Transport.open_buckets."""
        return MixedBuckets(self._open_nccl, self._base.open_buckets, specs, depth)

    def _open_nccl(self, specs: Sequence[BucketSpec]) -> NcclBuckets:
        def scale(buffer: Buffer, factor: float) -> None:
            self.arithmetic.combine(buffer, [buffer], scale=factor)

        return NcclBuckets(self._group, specs, make_buffer, scale, lambda: _STREAM)

    def close(self, *, idle: bool = True) -> None:
        """See Transport.close."""
        if not self._closed:
            self._closed = True
            self._group.close()


class MixedBuckets(Buckets):
    """See Buckets: those of NCCL, and those of the base transport, as one plan."""

    def __init__(
        self,
        open_nccl: Callable[[Sequence[BucketSpec]], Buckets],
        open_base: Callable[[Sequence[BucketSpec], int | None], Buckets],
        specs: Sequence[BucketSpec],
        depth: int | None,
    ) -> None:
        fits = [spec.wire == "none" and can_reduce(spec.dtype, spec.op, scaled=False) for spec in specs]
        fits = [fit and spec.dtype != "bool" for fit, spec in zip(fits, specs, strict=True)]
        sides = {fit: [spec for spec, own in zip(specs, fits, strict=True) if own == fit] for fit in (True, False)}
        self.on_nccl = open_nccl(sides[True])
        self.parts = [self.on_nccl, *([open_base(sides[False], depth)] if sides[False] else [])]
        self._at = [(self.parts[0 if fit else 1], fits[:index].count(fit)) for index, fit in enumerate(fits)]
        self.depth = depth or len(specs)
        self.sent_bytes = sum(part.sent_bytes for part in self.parts)
        self.memory: Sequence[Buffer] = [part.memory[at] for part, at in self._at]
        self.owned: Sequence[tuple[int, int]] = [part.owned[at] for part, at in self._at]
        self.shard: Sequence[tuple[int, int]] = [part.shard[at] for part, at in self._at]

    def begin(self, index: int, in_place: Sequence[InPlaceSegment], phases: Phases) -> None:
        """See Buckets.begin."""
        part, at = self._at[index]
        part.begin(at, in_place, phases)

    def advance(self) -> bool:
        """See Buckets.advance."""
        moved = [part.advance() for part in self.parts]
        return any(moved)

    def finished(self, index: int) -> bool:
        """See Buckets.finished."""
        part, at = self._at[index]
        return part.finished(at)

    @property
    def busy(self) -> bool:
        """See Buckets.busy."""
        return any(part.busy for part in self.parts)

    def wait(self, index: int, watch: Callable[[], None] | None = None) -> None:
        """See Buckets.wait. The default stream, which waits for NCCL's here, is the calling thread."""
        part, at = self._at[index]
        part.wait(at, watch)

    def close(self) -> None:
        """See Buckets.close."""
        self.memory = []
        for part in self.parts:
            part.close()
