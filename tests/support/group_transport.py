"""A process group of torch, Gloo's on the CPU, as a Transport: see MixedTransport."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from mixed_transport import MixedTransport

from hvdkit.torch.device import collectives
from hvdkit.torch.device.accelerator import scale as multiply
from hvdkit.torch.device.buckets import TorchBuckets
from hvdkit.torch.device.group import TorchGroup, Work
from hvdkit.torch.device.groups import DeviceSettings, open_group
from hvdkit.torch.device.operations import backend_op
from hvdkit.torch.tensors import TensorBuffer, as_buffer, as_tensor
from hvdkit.transport.api import Transport
from hvdkit.transport.buckets import BucketSpec
from hvdkit.transport.buffer import Buffer, Op

_names = itertools.count()


class _ArrayBuckets(TorchBuckets):
    """TorchBuckets whose memory is numpy's view of it, for checks that know no torch."""

    def __init__(self, group: TorchGroup, specs: Sequence[BucketSpec], sums: str) -> None:
        super().__init__(group, specs, sums)
        self.memory = [as_buffer(as_tensor(each)) for each in self.memory]


def _tensor(buffer: Buffer) -> torch.Tensor:
    """A view of the buffer, or a copy if it may not be written to, which torch warns of."""
    return as_tensor(buffer) if buffer.array.flags.writeable else torch.from_numpy(buffer.array.copy())


class GroupTransport(MixedTransport):
    """See Transport. base: of the same ranks. sums: of buckets, see Config.device_sums."""

    name = "process group"

    def __init__(self, base: Transport, sums: str = "library") -> None:
        super().__init__(base)
        self._sums = sums
        group = open_group(base, torch.device("cpu"), DeviceSettings("torch"), f"check {next(_names)}")
        assert group is not None
        self.group = group

    def _wait(self, works: list[Work]) -> None:
        for work in works:
            self.group.join(work)

    def own_allreduce(self, buffer: Buffer, op: Op, scale: float) -> None:
        if scale != 1.0:
            multiply(TensorBuffer(as_tensor(buffer), buffer.dtype), scale)
        if buffer.count:
            self._wait(collectives.all_reduce(self.group, [as_tensor(buffer)], backend_op(buffer.dtype, op)))

    def own_reducescatter(self, buffer: Buffer, counts: Sequence[int], op: Op) -> Buffer:
        memory = _tensor(buffer).clone()
        result, works = collectives.reduce_scatter(self.group, memory, counts, backend_op(buffer.dtype, op))
        self._wait(works)
        return as_buffer(result)

    def own_allgather(self, buffer: Buffer, counts: Sequence[int]) -> Buffer:
        result, works = collectives.all_gather(self.group, _tensor(buffer), counts)
        self._wait(works)
        return as_buffer(result)

    def own_broadcast(self, buffer: Buffer, root: int) -> None:
        self._wait(collectives.broadcast(self.group, as_tensor(buffer), root))

    def own_alltoall(self, buffer: Buffer, sent: Sequence[int], received: Sequence[int]) -> Buffer:
        result, works = collectives.all_to_all(self.group, _tensor(buffer), sent, received)
        self._wait(works)
        return as_buffer(result)

    def own_buckets(self, specs: Sequence[BucketSpec]) -> TorchBuckets:
        return _ArrayBuckets(self.group, specs, self._sums)

    def own_close(self) -> None:
        self.group.close()
