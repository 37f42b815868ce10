"""Named operations on tensors in device memory: a process group of torch runs them, and the host does not wait.

Order on the streams: the call records an event on the caller's current stream. The engine begins the operation on a
stream of its own, behind that event, when all ranks have called. Work that the caller enqueues on its current stream
after synchronize(), or after a blocking call, runs after the operation.

Memory stays allocated until then: the operation holds the caller's tensors, and results come from the memory pool of
the engine's stream and record the streams that use them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from hvdkit.config import Config
from hvdkit.engine import runtime
from hvdkit.engine.named.execution import factors, neutral, on_device, split_rows
from hvdkit.engine.named.operation import Operation, OperationRequest, Ready
from hvdkit.torch.device import collectives
from hvdkit.torch.device.accelerator import Accelerator, built_for, current_device, scale
from hvdkit.torch.device.group import TorchGroup
from hvdkit.torch.device.groups import close_groups, device_settings, open_group, opened_device, wait_for_groups
from hvdkit.torch.device.reductions import OF_BOOLS, can_reduce
from hvdkit.torch.tensors import DTYPES, TensorBuffer, as_buffer, as_tensor, contiguous
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import Buffer
from hvdkit.transport.device import Event, Stream

#: Announced in place of "cpu", which stands for operations in host memory.
CPU_GROUP = "cpu (torch)"


@dataclass(slots=True, eq=False)
class DeviceBuffer(TensorBuffer):
    """A TensorBuffer in device memory. ready: event after which its numbers are valid."""

    ready: Event | None = None


@dataclass(slots=True)
class Outcome:
    """Operation.outcome of an operation on the device. done: an event after the operation."""

    group: TorchGroup
    done: Event


#: This process's device for named operations, under the key "own"; empty until it is known.
_own: dict[str, Accelerator] = {}


#: Whether a tensor's operations run in host memory: it is there, and device_transport is not "torch". Called for every
#: operation: a Python function would take ten times as long.
stays_on_host: Callable[[torch.Tensor], bool] = attrgetter("is_cpu")


def _enter() -> None:
    global stays_on_host
    stays_on_host = (lambda _: False) if _config().device_transport == "torch" else attrgetter("is_cpu")


def _config() -> Config:
    return runtime.runtime("A collective").config


def place(
    announcement: OperationRequest, tensors: Sequence[torch.Tensor], *, copied: bool
) -> tuple[OperationRequest, list[torch.Tensor], list[Buffer]] | None:
    """Return the announcement, and the engine's memory; None for an operation that goes through host memory.

    All ranks agree on None: for operations that can_reduce() refuses, Adasum, every operation under
    device_transport=host, and tensors that are not all on devices of the job's type. Tensors on another device than the
    process's first one are copied to the first one.
    copied: the operation overwrites its memory, but must not change the tensors.
    """
    device, kind = tensors[0].device, "cpu" if tensors[0].is_cpu else built_for()
    if not all(tensor.device.type == kind for tensor in tensors):
        return None
    announced = _on_device(announcement, CPU_GROUP if kind == "cpu" else kind)
    if announced is None or _config().device_transport == "host":
        return None
    if "own" not in _own:
        _own["own"] = Accelerator(device)
    own = _own["own"]
    memory = [contiguous(tensor.to(own.device), copied=copied) for tensor in tensors]
    ready = own.record_event()
    buffers: list[Buffer] = [
        DeviceBuffer(given.view(-1), dtype, ready)
        for given, (dtype, _) in zip(memory, announcement.tensors, strict=True)
    ]
    return announced, memory, buffers


@functools.lru_cache(maxsize=4096)
def _on_device(announcement: OperationRequest, device: str) -> OperationRequest | None:
    """Return the announcement of the operation on a device; None if a process group cannot run it."""
    op, scaled = announcement.op, announcement.prescale != 1 or announcement.postscale != 1
    if op and not all(can_reduce(dtype, op, scaled=scaled) for dtype, _ in announcement.tensors):
        return None
    return announcement.at(device)


def receive(operation: Operation, memory: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Let the caller's current stream wait for an operation of place(); returns the memory with the results.

    It is host memory if the operation went through the host, else `memory`.
    Raises RankLostError or TransportError if the process group has failed.
    """
    outcome = operation.outcome
    if isinstance(outcome, Operation):
        return [as_tensor(buffer).view(given.shape) for buffer, given in zip(outcome.buffers, memory, strict=True)]
    assert isinstance(outcome, Outcome)
    own = _own["own"]
    outcome.group.check()
    own.streams.wait(own.current_stream(), outcome.done)
    own.record_use([*memory, *(as_tensor(result) for result in operation.results)])
    return memory


class TorchDevices:
    """See Devices: for torch's tensors."""

    def __init__(self, transport: Transport) -> None:
        current = runtime.runtime("A collective on tensors of a GPU")
        self._transport, self._settings = transport, device_settings(current.config)
        self._opened = False
        self._group: TorchGroup | None = None
        self._stream: Stream = None

    @property
    def label(self) -> str:
        """See Devices.label."""
        return "" if self._group is None else self._group.kind.upper()

    def open(self, operations: Sequence[Operation]) -> bool:
        """See Devices.open. Raises what open_group() raises."""
        if not self._opened:
            if "own" not in _own:  # a rank that has joined; this thread's current device may not be that of training
                kind = "cpu" if operations[0].request.device == CPU_GROUP else operations[0].request.device
                _own["own"] = Accelerator(opened_device() or current_device(kind))
            own = _own["own"]
            self._group = open_group(self._transport, own.device, self._settings)
            if self._group is not None:
                with own.streams.current():
                    self._stream = own.streams.make_stream(high_priority=True)
            self._opened = True
        return self._group is not None

    def run(self, ready: Sequence[Ready], operations: Sequence[Operation]) -> None:
        """See Devices.run. Raises RankLostError or TransportError; the group then has failed."""
        group = self._group
        assert group is not None
        own = group.accelerator
        events = {buffer.ready for each in operations for buffer in each.buffers if isinstance(buffer, DeviceBuffer)}
        with torch.no_grad(), own.streams.current(), own.on_stream(self._stream):
            for event in events:
                if event is not None:
                    own.streams.wait(self._stream, event)
            if ready[0].request.kind == "allreduce":
                self._reduce(group, operations)
            else:
                self._exchange(group, operations[0])
            done = own.streams.make_event()
            done.record(self._stream)
        for operation in operations:
            operation.outcome = Outcome(group, done)

    def _reduce(self, group: TorchGroup, operations: Sequence[Operation]) -> None:
        alike: dict[tuple[str, str], list[torch.Tensor]] = {}
        for operation in operations:
            asked = operation.request
            for buffer, (dtype, _) in zip(operation.buffers or self._contribution(asked), asked.tensors, strict=True):
                self._scale(buffer, asked)
                if buffer.count:
                    alike.setdefault((dtype, backend_op(dtype, asked.op)), []).append(as_tensor(buffer))
        begun = [work for (_, op), tensors in alike.items() for work in collectives.all_reduce(group, tensors, op)]
        for work in begun:
            group.join(work)

    def _exchange(self, group: TorchGroup, operation: Operation) -> None:
        asked, rank, size = operation.request, self._transport.rank, self._transport.size
        results: list[Buffer] = []
        for at, (buffer, (dtype, shape)) in enumerate(zip(operation.buffers, asked.tensors, strict=True)):
            width, memory = math.prod(shape[1:]), as_tensor(buffer)
            if asked.kind == "broadcast":
                works = collectives.broadcast(group, memory, int(asked.option("root rank")))
            elif asked.kind == "allgather":
                result, works = collectives.all_gather(group, memory, [rows[at] * width for rows in operation.rows])
                results.append(TensorBuffer(result, dtype))
            elif asked.kind == "alltoall":
                sent = [count * width for count in operation.rows[rank]]
                received = [splits[rank] * width for splits in operation.rows]
                result, works = collectives.all_to_all(group, memory[: sum(sent)], sent, received)
                results.append(TensorBuffer(result, dtype))
            else:
                self._scale(buffer, asked)
                counts = [rows * width for rows in split_rows(shape[0], size)]
                result, works = collectives.reduce_scatter(group, memory, counts, backend_op(dtype, asked.op))
                results.append(TensorBuffer(result, dtype))
            for work in works:
                group.join(work)
        operation.results = results

    def _scale(self, buffer: Buffer, asked: OperationRequest) -> None:
        factor = math.prod(factors(asked, self._transport.size))
        if factor != 1.0:
            scale(buffer, factor)

    def _contribution(self, asked: OperationRequest) -> list[Buffer]:
        """Return the contribution of a joined rank to a reduction: neutral values."""
        device = _own["own"].device
        return [
            TensorBuffer(torch.full((count,), neutral(asked.op, dtype), dtype=DTYPES[dtype], device=device), dtype)
            for count, (dtype, _) in zip(asked.counts, asked.tensors, strict=True)
        ]

    def to_host(self, ready: Ready, operation: Operation) -> Operation:
        """See Devices.to_host. The host waits for the device."""
        buffers = []
        for buffer in operation.buffers:
            assert isinstance(buffer, DeviceBuffer)
            if buffer.ready is not None:
                buffer.ready.synchronize()
            buffers.append(as_buffer(buffer.array.to("cpu", copy=True)))
        return Operation(operation.name, ready.request, buffers)


def backend_op(dtype: str, op: str) -> str:
    """Return the backend's operation for a reduction of numbers of a dtype; see reductions.as_real()."""
    op = "sum" if op == "average" else op
    return OF_BOOLS[op] if dtype == "bool" else op


def _leave() -> None:
    close_groups()
    _own.clear()


on_device(TorchDevices)
runtime.on_init(_enter)
if runtime.is_initialized():  # by the adapter of another framework
    _enter()
runtime.on_wait_for_devices(wait_for_groups)
runtime.on_shutdown(_leave)
