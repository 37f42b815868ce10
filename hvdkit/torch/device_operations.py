"""Named operations on GPU tensors: NCCL runs them in device memory, and the host does not wait.

Order on the streams: the call records an event on the caller's current stream. The engine enqueues NCCL's work after
that event, when all ranks have called. Work that the caller enqueues on its current stream after synchronize(), or
after a blocking call, runs after NCCL's work.

Memory stays allocated until then: the operation holds the caller's tensors, and results come from the memory pool of
NCCL's stream and record the streams that use them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hvdkit.engine import runtime
from hvdkit.engine.named.execution import factors, neutral, on_device, split_rows
from hvdkit.engine.named.operation import Operation, OperationRequest, Ready
from hvdkit.torch import gpu
from hvdkit.torch.tensors import DTYPES, TensorBuffer, as_buffer, as_tensor, contiguous
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import Buffer
from hvdkit.transport.device import Event
from hvdkit.transport.nccl import collectives
from hvdkit.transport.nccl.collectives import Reduction, can_reduce
from hvdkit.transport.nccl.communicator import Communicator
from hvdkit.transport.nccl.group import DeviceGroup
from hvdkit.transport.nccl.groups import close_groups, open_group, opened_gpu, wait_for_groups

#: This process's GPU for named operations, under the key "index"; empty until it is known.
_own: dict[str, int] = {}


@dataclass(slots=True, eq=False)
class GpuBuffer(TensorBuffer):
    """A TensorBuffer in the memory of the process's GPU. ready: event after which its numbers are valid."""

    ready: Event | None = None


@dataclass(slots=True)
class Outcome:
    """Operation.outcome of an operation that NCCL runs. done: an event after the operation."""

    group: DeviceGroup
    done: Event


def place(
    announcement: OperationRequest, tensors: Sequence[torch.Tensor], *, copied: bool
) -> tuple[OperationRequest, list[torch.Tensor], list[Buffer]] | None:
    """Return the announcement, and the engine's memory; None for an operation that goes through host memory.

    All ranks agree on None: for operations that can_reduce() refuses, Adasum, every operation under
    device_transport=host, and tensors that are not all on GPUs. copied: the operation overwrites its memory, but must
    not change the tensors. Tensors on another GPU than the process's first one are copied to the first one.
    """
    indices = [gpu.common_gpu([tensor]) for tensor in tensors]
    if indices[0] is None or None in indices:
        return None
    announced = _on_gpu(announcement)
    if announced is None or runtime.runtime("A collective").config.device_transport == "host":
        return None
    index = _own.setdefault("index", indices[0])
    device = gpu.device(index)
    memory = [contiguous(tensor.to(device), copied=copied) for tensor in tensors]
    ready = gpu.record_event(index)
    buffers: list[Buffer] = [
        GpuBuffer(given.view(-1), dtype, ready) for given, (dtype, _) in zip(memory, announcement.tensors, strict=True)
    ]
    return announced, memory, buffers


@functools.lru_cache(maxsize=4096)
def _on_gpu(announcement: OperationRequest) -> OperationRequest | None:
    """Return the announcement of the operation on a GPU; None if the GPU cannot run it."""
    op, scaled = announcement.op, announcement.prescale != 1 or announcement.postscale != 1
    if op and not all(can_reduce(dtype, op, scaled=scaled) for dtype, _ in announcement.tensors):
        return None
    return announcement.at("cuda")


def receive(operation: Operation, memory: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Let the caller's current stream wait for an operation of place(); returns the memory with the results.

    It is host memory if the operation went through the host, else `memory`.
    Raises RankLostError or TransportError if NCCL has failed.
    """
    outcome = operation.outcome
    if isinstance(outcome, Operation):
        return [as_tensor(buffer).view(given.shape) for buffer, given in zip(outcome.buffers, memory, strict=True)]
    assert isinstance(outcome, Outcome)
    index = _own["index"]
    outcome.group.join(gpu.current_stream(index), outcome.done)
    gpu.record_use([*memory, *(as_tensor(result) for result in operation.results)], index)
    return memory


class TorchDevices:
    """See Devices: for torch's tensors."""

    def __init__(self, transport: Transport) -> None:
        current = runtime.runtime("A collective on tensors of a GPU")
        self._transport, self._host = transport, current.world.host
        self._settings = gpu.device_settings(current.config)
        self._opened = False
        self._group: DeviceGroup | None = None

    def open(self, operations: Sequence[Operation]) -> bool:
        """See Devices.open. Raises what open_group() raises."""
        if not self._opened:
            if (
                "index" not in _own
            ):  # a rank that has joined; the current GPU of this thread may not be that of training
                opened = opened_gpu()
                _own["index"] = gpu.current_gpu() if opened is None else opened
            index = _own["index"]
            self._group = open_group(self._transport, index, self._host, self._settings)
            self._opened = True
        return self._group is not None

    def run(self, ready: Sequence[Ready], operations: Sequence[Operation]) -> None:
        """See Devices.run. Raises RankLostError or TransportError; the group then has failed."""
        group = self._group
        assert group is not None
        done = group.device.make_event()
        events = {buffer.ready for each in operations for buffer in each.buffers if isinstance(buffer, GpuBuffer)}
        body = self._reduce if ready[0].request.kind == "allreduce" else self._exchange
        group.enqueue(
            lambda communicator, stream: body(communicator, stream, operations),
            [event for event in events if event is not None],
            done,
        )
        for operation in operations:
            operation.outcome = Outcome(group, done)

    def _reduce(self, communicator: Communicator, stream: int, operations: Sequence[Operation]) -> None:
        buffers: list[Buffer] = []
        reductions = []
        for operation in operations:
            asked = operation.request
            buffers += operation.buffers or _contribution(asked, stream)
            reductions += [self._reduction(communicator, dtype, asked) for dtype, _ in asked.tensors]
        collectives.all_reduce(communicator, stream, buffers, reductions)

    def _exchange(self, communicator: Communicator, stream: int, operations: Sequence[Operation]) -> None:
        operation = operations[0]
        asked, rank, size = operation.request, self._transport.rank, self._transport.size
        results: list[Buffer] = []
        for at, (buffer, (dtype, shape)) in enumerate(zip(operation.buffers, asked.tensors, strict=True)):
            width = math.prod(shape[1:])
            if asked.kind == "broadcast":
                collectives.broadcast(communicator, stream, buffer, int(asked.option("root rank")))
            elif asked.kind == "allgather":
                counts = [rows[at] * width for rows in operation.rows]
                results.append(_make(sum(counts), dtype, stream))
                collectives.all_gather(communicator, stream, buffer, results[-1], counts)
            elif asked.kind == "alltoall":
                sent = [count * width for count in operation.rows[rank]]
                received = [splits[rank] * width for splits in operation.rows]
                results.append(_make(sum(received), dtype, stream))
                collectives.all_to_all(communicator, stream, buffer, results[-1], sent, received)
            else:
                counts = [rows * width for rows in split_rows(shape[0], size)]
                results.append(_make(counts[rank], dtype, stream))
                how = self._reduction(communicator, dtype, asked)
                collectives.reduce_scatter(communicator, stream, buffer, results[-1], counts, how)
        operation.results = results

    def _reduction(self, communicator: Communicator, dtype: str, asked: OperationRequest) -> Reduction:
        return Reduction(communicator, dtype, asked.op, math.prod(factors(asked, self._transport.size)))

    def to_host(self, ready: Ready, operation: Operation) -> Operation:
        """See Devices.to_host. The host waits for the GPU."""
        buffers = []
        for buffer in operation.buffers:
            assert isinstance(buffer, GpuBuffer)
            if buffer.ready is not None:
                buffer.ready.synchronize()
            buffers.append(as_buffer(buffer.array.to("cpu", copy=True)))
        return Operation(operation.name, ready.request, buffers)


def _make(count: int, dtype: str, stream: int) -> Buffer:
    return TensorBuffer(gpu.make_on_stream(count, DTYPES[dtype], None, _own["index"], stream), dtype)


def _contribution(asked: OperationRequest, stream: int) -> list[Buffer]:
    """Return the contribution of a joined rank to a reduction: neutral values in GPU memory."""
    return [
        TensorBuffer(
            gpu.make_on_stream(count, DTYPES[dtype], neutral(asked.op, dtype), _own["index"], stream),
            dtype,
        )
        for count, (dtype, _) in zip(asked.counts, asked.tensors, strict=True)
    ]


def _leave() -> None:
    close_groups()
    _own.clear()


on_device(TorchDevices)
runtime.on_wait_for_devices(wait_for_groups)
runtime.on_shutdown(_leave)
