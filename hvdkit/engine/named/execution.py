"""Executes ready operations, whose parameters all ranks agree on, in one order, over one transport.

Allreduces of one dtype and with the same options that became ready together run as one ("fused"), up to a limit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from hvdkit.engine.adasum import adasum
from hvdkit.engine.named.integers import finish_average, multiply, widen
from hvdkit.engine.named.operation import Operation, OperationRequest, Ready, label_of
from hvdkit.engine.observe.timeline import Timeline
from hvdkit.errors import HorovodInternalError
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import HALF, SCALED, STORAGE, Array, Buffer, make_buffer

#: Tensors that are reduced together, among operations that became ready together: (index of the operation, of its
#: tensor).
Group = tuple[tuple[int, int], ...]

_MOST_KEPT_BYTES = 16 * 2**20  # limit on a buffer for fused operations that is kept and reused


class Work(NamedTuple):
    """Operations that run as one. do: executes them; collective."""

    operations: Sequence[Operation]
    do: Callable[[], None]

    @property
    def label(self) -> str:
        """Name the work for messages."""
        first = self.operations[0]
        more = f" and {len(self.operations) - 1} more" if len(self.operations) > 1 else ""
        return label_of(first.request.kind, first.name) + more


def join_contribution(ready: Ready) -> Operation:
    """Make a joined rank's contribution, which does not change the result; without buffers if tensors are on GPUs."""
    if ready.request.on_device:
        return Operation(ready.name, ready.request, ())
    buffers = []
    for count, (dtype, _) in zip(ready.request.counts, ready.request.tensors, strict=True):
        buffer = make_buffer(count, dtype)
        value = neutral(ready.request.op, dtype)
        buffer.array[:] = _BFLOAT16[value] if dtype == "bfloat16" else value
        buffers.append(buffer)
    return Operation(ready.name, ready.request, buffers)


def neutral(op: str, dtype: str) -> float:
    """Return the neutral element of a reduction, which does not change its result."""
    if op not in ("min", "max") or dtype == "bool":
        return int(op in ("product", "min"))
    if dtype == "bfloat16" or STORAGE[dtype].kind == "f":
        return math.inf if op == "min" else -math.inf
    limits = np.iinfo(STORAGE[dtype])
    return int(limits.max if op == "min" else limits.min)


#: These numbers as stored bfloat16.
_BFLOAT16 = {0: 0, 1: 0x3F80, math.inf: 0x7F80, -math.inf: 0xFF80}


@functools.lru_cache(maxsize=64)
def plan_fusion(request: tuple[OperationRequest, ...], limit_bytes: int) -> tuple[Group, ...]:
    """Group the tensors of operations that are reduced together: equal dtype and options, up to `limit_bytes` a group.

    Tensors stay in order; a tensor above the limit has a group of its own. Groups are ordered by their first tensor.
    """
    groups: list[list[tuple[int, int]]] = []
    filling: dict[tuple[object, ...], tuple[list[tuple[int, int]], int]] = {}
    for index, each in enumerate(request):
        if not each.fusible:
            continue
        for at, (dtype, _) in enumerate(each.tensors):
            group, size = filling.get((dtype, each.options), ([], 0))
            if not group or size + each.sizes[at] > limit_bytes:
                group, size = [], 0
                groups.append(group)
            group.append((index, at))
            filling[dtype, each.options] = (group, size + each.sizes[at])
    return tuple(map(tuple, groups))


class Devices(Protocol):
    """Executes the operations of one engine whose tensors are on GPUs, in the common order of operations.

    The engine contains no code for GPUs or frameworks. An adapter announces such an operation with the option "device",
    so that ranks with these tensors in host memory get an error, and registers its Devices with on_device().
    """

    @property
    def label(self) -> str:
        """The name of the library that runs the operations, in capitals, for the timeline: "NCCL", for example."""

    def open(self, operations: Sequence[Operation]) -> bool:
        """Can the ranks run these operations on the GPUs? If not, they use host memory. Collective at the first call.

        operations: this rank's; without buffers on a rank that has joined.
        """

    def run(self, ready: Sequence[Ready], operations: Sequence[Operation]) -> None:
        """Enqueue allreduces, or a single operation, and return; Operation.outcome then shows when they are done."""

    def to_host(self, ready: Ready, operation: Operation) -> Operation:
        """Return this rank's operation with copies of its GPU buffers in host memory."""


#: Makes the Devices of an engine, given its transport.
OpenDevices = Callable[[Transport], Devices]
_openers: list[OpenDevices] = []


def on_device(open_devices: OpenDevices) -> None:
    """Register a function that makes Devices; one adapter of a process does so, and the Devices know its buffers."""
    if _openers:
        raise RuntimeError(f"Operations on GPUs are done by {_openers[0]} already.")
    _openers.append(open_devices)


def open_devices(transport: Transport) -> Devices:
    """Make the Devices of an engine. Raises HorovodInternalError if no adapter for GPU tensors is loaded."""
    if not _openers:
        raise HorovodInternalError(
            "Other ranks have called an operation with tensors of a GPU, and this process has loaded no adapter that "
            "can take part. Import the same framework's adapter on every rank, for example hvdkit.torch."
        )
    return _openers[0](transport)


class Executor:
    """Executes ready operations over a transport that has no other user.

    limit_bytes: maximum size of allreduces that are fused. timeline: shows each Work.
    """

    def __init__(self, transport: Transport, limit_bytes: int, timeline: Timeline) -> None:
        self._transport, self._limit_bytes, self._timeline = transport, limit_bytes, timeline
        self._kept: dict[str, Array] = {}  # memory for fused tensors, by dtype
        self._devices: Devices | None = None

    def plan(self, ready: Sequence[Ready], operations: Sequence[Operation]) -> list[Work]:
        """Plan the work of operations that became ready together; the same `ready` gives the same plan on all ranks.

        operations: this rank's operation for each of `ready`.
        """
        if len(ready) == 1 and len(operations[0].buffers) == 1 and ready[0].request.fusible:
            return [Work(operations, functools.partial(self._reduce, operations[0].buffers[0], operations))]
        planned = []
        for group in plan_fusion(tuple([each.request for each in ready]), self._limit_bytes):
            members = [operations[index] for index in dict.fromkeys(index for index, _ in group)]
            buffers = [operations[index].buffers[at] for index, at in group]
            planned.append(Work(members, functools.partial(self._reduce_group, members, buffers)))
        on_device = []
        for each, operation in zip(ready, operations, strict=True):
            if each.request.on_device and each.request.kind == "allreduce":
                on_device.append((each, operation))
            elif each.request.on_device:
                planned.append(Work([operation], functools.partial(self._do_on_device, [each], [operation])))
            elif operation.action is not None or not each.request.fusible:
                planned.append(Work([operation], functools.partial(self._do_one, each, operation)))
        if on_device:
            answers, parts = zip(*on_device, strict=True)
            planned.append(Work(parts, functools.partial(self._do_on_device, answers, parts)))
        return planned

    def _do_on_device(self, ready: Sequence[Ready], operations: Sequence[Operation]) -> None:
        """Execute allreduces, or a single operation, on GPU tensors; in host memory if the GPUs cannot."""
        if self._devices is None:
            self._devices = open_devices(self._transport)
        if self._devices.open(operations):
            for each, operation in zip(ready, operations, strict=True):
                operation.rows = each.rows
            with self._timeline.span(f"{self._devices.label}_{ready[0].request.kind.upper()}", operations):
                self._devices.run(ready, operations)
            return
        ready = [each._replace(request=each.request.at("cpu")) for each in ready]
        parts = [
            self._devices.to_host(each, operation) if operation.buffers else join_contribution(each)
            for each, operation in zip(ready, operations, strict=True)
        ]
        for work in self.plan(ready, parts):
            work.do()
        for operation, part in zip(operations, parts, strict=True):
            operation.results, operation.rows, operation.outcome = part.results, part.rows, part

    def _reduce(self, buffer: Buffer, operations: Sequence[Operation]) -> None:
        if self._timeline.on:
            with self._timeline.span("ALLREDUCE", operations):
                reduce_scaled(self._transport, buffer, operations[0].request)
        else:
            reduce_scaled(self._transport, buffer, operations[0].request)

    def _reduce_group(self, operations: Sequence[Operation], buffers: Sequence[Buffer]) -> None:
        if len(buffers) == 1:
            self._reduce(buffers[0], operations)
            return
        fused = self._fused(buffers)
        with self._timeline.span("MEMCPY_IN_FUSION_BUFFER", operations):
            np.concatenate([buffer.array for buffer in buffers], out=fused.array)
        self._reduce(fused, operations)
        with self._timeline.span("MEMCPY_OUT_FUSION_BUFFER", operations):
            at, source = 0, fused.array
            for buffer in buffers:
                target = buffer.array
                end = at + target.size
                target[:] = source[at:end]
                at = end

    def _fused(self, buffers: Sequence[Buffer]) -> Buffer:
        """Return contiguous memory for all these buffers; it is reused by the next call."""
        dtype, count = buffers[0].dtype, sum([buffer.array.size for buffer in buffers])
        kept = self._kept.get(dtype)
        if kept is None or kept.size < count:
            kept = make_buffer(count, dtype).array
            if kept.nbytes <= _MOST_KEPT_BYTES:
                self._kept[dtype] = kept
        return Buffer(kept[:count], dtype)

    def _do_one(self, ready: Ready, operation: Operation) -> None:
        kind = ready.request.kind
        operation.rows = ready.rows
        with self._timeline.span("ADASUM" if kind == "allreduce" else kind.upper(), [operation]):
            if operation.action is not None:
                operation.outcome = operation.action(self._transport, ready.joined)
            elif kind == "allreduce":
                adasum(self._transport, operation.buffers)
            elif kind in _COLLECTIVES:  # a barrier, for example, is done when all ranks have announced it
                _COLLECTIVES[kind](self._transport, operation)


def reduce_scaled(transport: Transport, buffer: Buffer, request: OperationRequest) -> None:
    """Reduce a buffer as requested, with prescale and postscale."""
    if buffer.dtype in SCALED:
        if request.prescale != 1.0:  # before the sum, which may overflow the dtype otherwise
            transport.arithmetic.combine(buffer, [buffer], scale=request.prescale)
        after = request.postscale / transport.size if request.op == "average" else request.postscale
        transport.allreduce(buffer, request.sums, after)
    elif request.op == "average":
        total = widen(buffer, transport.size, request.prescale)
        transport.allreduce(total)
        finish_average(buffer, total, transport.size, request.postscale)
    else:
        multiply(buffer, request.prescale)
        transport.allreduce(buffer, request.sums)
        multiply(buffer, request.postscale)


def factors(request: OperationRequest, size: int) -> tuple[float, float]:
    """Return the factors before and after the reduction."""
    return request.prescale, request.postscale / size if request.op == "average" else request.postscale


def _broadcast(transport: Transport, operation: Operation) -> None:
    root = int(operation.request.option("root rank"))
    for buffer in operation.buffers:
        transport.broadcast(buffer, root)


def _allgather(transport: Transport, operation: Operation) -> None:
    results = []
    for at, (buffer, (_, shape)) in enumerate(zip(operation.buffers, operation.request.tensors, strict=True)):
        width = math.prod(shape[1:])
        results.append(transport.allgather(buffer, [rows[at] * width for rows in operation.rows]))
    operation.results = results


def _alltoall(transport: Transport, operation: Operation) -> None:
    width = math.prod(operation.request.tensors[0][1][1:])
    sent = [count * width for count in operation.rows[transport.rank]]
    received = [splits[transport.rank] * width for splits in operation.rows]
    buffer = operation.buffers[0].slice(0, sum(sent))  # rows beyond the splits are not sent
    operation.results = [transport.alltoall(buffer, sent, received)]


def split_rows(rows: int, size: int) -> list[int]:
    """Return the rows of a reducescatter's result on each rank; with a remainder, the first ranks get one more."""
    each, more = divmod(rows, size)
    return [each + (rank < more) for rank in range(size)]


def _reducescatter(transport: Transport, operation: Operation) -> None:
    before, after = factors(operation.request, transport.size)
    results = []
    for buffer, (_, shape) in zip(operation.buffers, operation.request.tensors, strict=True):
        width = math.prod(shape[1:])
        counts = [rows * width for rows in split_rows(shape[0], transport.size)]
        if buffer.dtype in SCALED:
            if before != 1.0:
                transport.arithmetic.combine(buffer, [buffer], scale=before)
            if buffer.dtype in HALF and after != 1.0:
                result = _reducescatter_half(transport, buffer, counts, after)
            else:
                result = transport.reducescatter(buffer, counts, "sum")
                if after != 1.0:
                    transport.arithmetic.combine(result, [result], scale=after)
        elif operation.request.op == "average":
            total = widen(buffer, transport.size, before)
            each = total.count // buffer.count if buffer.count else 1
            total = transport.reducescatter(total, [count * each for count in counts], "sum")
            result = make_buffer(counts[transport.rank], buffer.dtype)
            finish_average(result, total, transport.size, operation.request.postscale)
        else:
            multiply(buffer, before)
            result = transport.reducescatter(buffer, counts, "sum")
            multiply(result, after)
        results.append(result)
    operation.results = results


def _reducescatter_half(transport: Transport, buffer: Buffer, counts: Sequence[int], scale: float) -> Buffer:
    """Scale the float32 sum before it is rounded to 16 bits, which may not hold it."""
    count = counts[transport.rank]
    result = make_buffer(count, buffer.dtype)
    received = transport.alltoall(buffer, counts, [count] * transport.size)
    if count:
        transport.arithmetic.combine(result, received.pieces([count] * transport.size), "sum", scale)
    return result


_COLLECTIVES: dict[str, Callable[[Transport, Operation], None]] = {
    "broadcast": _broadcast,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
}
