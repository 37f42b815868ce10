"""NCCL over the stand-in as a Transport: see MixedTransport.

The stand-in's device memory is the host's; its default stream is the calling thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mixed_transport import MixedTransport
from nccl_checks import connect_group

from hvdkit.transport.api import Transport
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import Buffer, Op, make_buffer
from hvdkit.transport.nccl import collectives
from hvdkit.transport.nccl.buckets import NcclBuckets
from hvdkit.transport.nccl.collectives import Reduction
from hvdkit.transport.nccl.communicator import Communicator

_STREAM = 0


def _pause() -> None:
    time.sleep(0.0002)


class NcclTransport(MixedTransport):
    """See Transport. base: of the same ranks."""

    name = "nccl"

    def __init__(self, base: Transport) -> None:
        super().__init__(base)
        self._group = connect_group(base)

    def _run(self, body: Callable[[Communicator, int], None]) -> None:
        """Give it to NCCL's stream, and wait."""
        ready, done = self._group.device.make_event(), self._group.device.make_event()
        self._group.run(body, _STREAM, ready, done)
        self._group.wait(done, _pause)

    def own_allreduce(self, buffer: Buffer, op: Op, scale: float) -> None:
        self._run(
            lambda communicator, stream: collectives.all_reduce(
                communicator, stream, [buffer], [Reduction(communicator, buffer.dtype, op, scale)]
            )
        )

    def own_reducescatter(self, buffer: Buffer, counts: Sequence[int], op: Op) -> Buffer:
        result = make_buffer(counts[self.rank], buffer.dtype)
        self._run(
            lambda communicator, stream: collectives.reduce_scatter(
                communicator, stream, buffer, result, counts, Reduction(communicator, buffer.dtype, op, 1.0)
            )
        )
        return result

    def own_allgather(self, buffer: Buffer, counts: Sequence[int]) -> Buffer:
        result = make_buffer(sum(counts), buffer.dtype)
        self._run(lambda communicator, stream: collectives.all_gather(communicator, stream, buffer, result, counts))
        return result

    def own_broadcast(self, buffer: Buffer, root: int) -> None:
        self._run(lambda communicator, stream: collectives.broadcast(communicator, stream, buffer, root))

    def own_alltoall(self, buffer: Buffer, sent: Sequence[int], received: Sequence[int]) -> Buffer:
        result = make_buffer(sum(received), buffer.dtype)
        self._run(
            lambda communicator, stream: collectives.all_to_all(communicator, stream, buffer, result, sent, received)
        )
        return result

    def own_buckets(self, specs: Sequence[BucketSpec]) -> NcclBuckets:
        def scale(buffer: Buffer, factor: float) -> None:
            self.arithmetic.combine(buffer, [buffer], scale=factor)

        return NcclBuckets(self._group, specs, make_buffer, scale, lambda: _STREAM)

    def own_close(self) -> None:
        self._group.close()
