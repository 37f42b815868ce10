"""A library that reduces device memory as a Transport, so that it passes the checks of every transport.

What the library does not do goes by the transport of host memory, as in hvdkit: other dtypes and factors, and buckets
with a dtype of their own on the wire.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from hvdkit.errors import TransportError
from hvdkit.torch.device.reductions import can_reduce
from hvdkit.transport.api import Transport, check_alltoall, check_counts, check_root
from hvdkit.transport.arithmetic import NumpyArithmetic, check_reduction
from hvdkit.transport.buckets import Buckets, BucketSpec, InPlaceSegment, Phases
from hvdkit.transport.buffer import Buffer, Op, make_buffer
from hvdkit.transport.division import Groups


class MixedTransport(Transport):
    """See Transport. base: of the same ranks."""

    def __init__(self, base: Transport) -> None:
        self.base = base
        self.backend, self.rank, self.size, self.arithmetic = base.backend, base.rank, base.size, NumpyArithmetic()
        self._closed = False

    @abstractmethod
    def own_allreduce(self, buffer: Buffer, op: Op, scale: float) -> None:
        """The library's allreduce in place."""

    @abstractmethod
    def own_reducescatter(self, buffer: Buffer, counts: Sequence[int], op: Op) -> Buffer:
        """The library's reduce-scatter."""

    @abstractmethod
    def own_allgather(self, buffer: Buffer, counts: Sequence[int]) -> Buffer:
        """The library's allgather."""

    @abstractmethod
    def own_broadcast(self, buffer: Buffer, root: int) -> None:
        """The library's broadcast in place."""

    @abstractmethod
    def own_alltoall(self, buffer: Buffer, sent: Sequence[int], received: Sequence[int]) -> Buffer:
        """The library's alltoall."""

    @abstractmethod
    def own_buckets(self, specs: Sequence[BucketSpec]) -> Buckets:
        """The library's buckets."""

    @abstractmethod
    def own_close(self) -> None:
        """Free the library's connections."""

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError("This transport has been closed.")

    def allreduce(self, buffer: Buffer, op: Op = "sum", scale: float = 1.0) -> None:
        """See Transport.allreduce."""
        self._check_open()
        check_reduction(buffer.dtype, op, "allreduce")
        if can_reduce(buffer.dtype, op, scaled=scale != 1.0):
            self.own_allreduce(buffer, op, scale)
        else:
            self.base.allreduce(buffer, op, scale)

    def reducescatter(self, buffer: Buffer, counts: Sequence[int], op: Op = "sum") -> Buffer:
        """See Transport.reducescatter."""
        self._check_open()
        check_counts("reducescatter", counts, self.size, total=buffer.count)
        check_reduction(buffer.dtype, op, "reducescatter")
        if can_reduce(buffer.dtype, op, scaled=False):
            return self.own_reducescatter(buffer, counts, op)
        return self.base.reducescatter(buffer, counts, op)

    def allgather(self, buffer: Buffer, counts: Sequence[int]) -> Buffer:
        """See Transport.allgather."""
        self._check_open()
        check_counts("allgather", counts, self.size, total=None)
        if counts[self.rank] != buffer.count:
            raise ValueError(f"allgather: counts is {list(counts)}, but this rank has {buffer.count} elements")
        return self.own_allgather(buffer, counts)

    def broadcast(self, buffer: Buffer, root: int) -> None:
        """See Transport.broadcast."""
        self._check_open()
        check_root(root, self.size)
        self.own_broadcast(buffer, root)

    def alltoall(self, buffer: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Buffer:
        """See Transport.alltoall."""
        self._check_open()
        check_alltoall(send_counts, receive_counts, self.rank, self.size, total=buffer.count)
        return self.own_alltoall(buffer, send_counts, receive_counts)

    def barrier(self) -> None:
        """See Transport.barrier."""
        self.allreduce(make_buffer(1, "int32"))

    def split(self, groups: Groups) -> Transport | None:
        """See Transport.split."""
        base = self.base.split(groups)
        return None if base is None else type(self)(base)

    def open_buckets(self, specs: Sequence[BucketSpec], depth: int | None = None) -> Buckets:
        """See Transport.open_buckets."""
        return MixedBuckets(self.own_buckets, self.base.open_buckets, specs, depth)

    def close(self, *, idle: bool = True) -> None:
        """See Transport.close."""
        if not self._closed:
            self._closed = True
            self.own_close()


class MixedBuckets(Buckets):
    """See Buckets: those of the library, and those of the base transport, as one plan."""

    def __init__(
        self,
        open_own: Callable[[Sequence[BucketSpec]], Buckets],
        open_base: Callable[[Sequence[BucketSpec], int | None], Buckets],
        specs: Sequence[BucketSpec],
        depth: int | None,
    ) -> None:
        fits = [spec.wire == "none" and can_reduce(spec.dtype, spec.op, scaled=False) for spec in specs]
        fits = [fit and spec.dtype != "bool" for fit, spec in zip(fits, specs, strict=True)]
        sides = {fit: [spec for spec, own in zip(specs, fits, strict=True) if own == fit] for fit in (True, False)}
        self.own = open_own(sides[True])
        self.parts = [self.own, *([open_base(sides[False], depth)] if sides[False] else [])]
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
        """See Buckets.wait."""
        part, at = self._at[index]
        part.wait(at, watch)

    def close(self) -> None:
        """See Buckets.close."""
        self.memory = []
        for part in self.parts:
            part.close()
