"""Gloo's collectives begun now and asked after later, in a group of their own."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from hvdkit.transport.between.wire import Messages
from hvdkit.transport.buffer import STORAGE, Buffer, Op
from hvdkit.transport.gloo.library import GlooRequest, Group, can_reduce

_TOGETHER_BYTES = 64 * 1024  # gathered in one exchange of equal pieces; more is sent piece by piece, and copied less


class GlooWire:
    """See Wire. group: this wire's alone; closed by close()."""

    largest_count = sys.maxsize
    messages: Messages | None = None  # Gloo's can only be waited for

    def __init__(self, group: Group, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._group = group

    def can_reduce(self, dtype: str) -> bool:
        return can_reduce(dtype)

    def can_scatter(self, dtype: str) -> bool:
        return False

    def allreduce(self, source: Buffer, out: Buffer, op: Op) -> GlooRequest:
        return self._group.allreduce(source, out, op)

    def reducescatter(self, source: Buffer, out: Buffer, counts: Sequence[int], op: Op) -> GlooRequest:
        raise NotImplementedError("Gloo scatters equal pieces only; see can_scatter()")

    def alltoall(
        self, sent: Buffer, send_counts: Sequence[int], received: Buffer, receive_counts: Sequence[int]
    ) -> GlooRequest:
        itemsize = STORAGE[sent.dtype].itemsize
        return self._group.alltoall(
            sent, [count * itemsize for count in send_counts], received, [count * itemsize for count in receive_counts]
        )

    def allgather(self, gathered: Buffer, counts: Sequence[int], own: Buffer | None = None) -> GlooRequest:
        ends = np.cumsum(counts).tolist()
        pieces = [gathered.slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
        if own is not None:
            pieces[self.rank].array[:] = own.array
        if len(set(counts)) == 1 and gathered.nbytes <= _TOGETHER_BYTES:
            return self._group.allgather(pieces[self.rank], gathered)
        return self._group.broadcast(gathered, list(enumerate(pieces)))

    def broadcast(self, buffer: Buffer, root: int) -> GlooRequest:
        return self._group.broadcast(buffer, [(root, buffer)])

    def barrier(self) -> GlooRequest:
        return self._group.barrier()

    def close(self, *, idle: bool = True) -> None:
        """See Wire.close. A group that is not idle knows that by itself."""
        self._group.close()
