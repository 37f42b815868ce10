"""Converts announced operations, and lists of gradients, to calls of Horovod's core, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from hvdkit.engine.api import (
    JOIN,
    SCALED,
    Operation,
    ReduceOptions,
    TensorSpec,
    Transport,
    check_gradient,
    check_tensors,
)
from hvdkit_horovod.binding import REDUCTIONS, Call, Request
from hvdkit_horovod.transport import HorovodTransport
from hvdkit_horovod.wire import check_wire


@dataclass(slots=True, eq=False)
class Running(Operation):
    """An operation under way in Horovod. requests: its calls. factor: factor for results that are integers."""

    requests: list[Request] = field(default_factory=list)
    factor: float = 1.0


def start_operation(transport: HorovodTransport, operation: Running) -> None:
    """Submit an operation among the ranks of a transport to Horovod.

    Raises TypeError for a dtype that it cannot reduce.
    """
    request, binding = operation.request, transport.binding
    pairs = zip(operation.buffers, request.tensors, strict=True)
    arrays = [binding.numbers_of(buffer, shape, request.kind) for buffer, (_, shape) in pairs]
    call = Call(request.kind, operation.name, transport.process_set)
    if request.kind in REDUCTIONS:
        call = _plan_reduction(transport, call, operation)
    elif request.kind == "barrier":
        call, arrays = replace(call, kind="allreduce"), [np.zeros(1, np.int32)]
    elif request.kind == "broadcast":
        call = replace(call, root=transport.ranks[int(request.option("root rank"))])
    elif request.kind == "alltoall":
        call, arrays = replace(call, splits=request.splits), [arrays[0][: sum(request.splits)]]  # no rank gets the rest
    else:
        assert request.kind == "allgather"
        arrays.append(np.array([[shape[0] for _, shape in request.tensors]], np.int64))
    groups: dict[str | int, list[Any]] = {}  # each is submitted to Horovod in one call
    for at, array in enumerate(arrays):
        groups.setdefault(request.tensors[at][0] if request.kind == "allreduce" else at, []).append(array)
    for number, group in enumerate(groups.values()):
        name = f"{call.name}.{number}" if number else call.name
        operation.requests.append(binding.start(replace(call, name=name), group))


def _plan_reduction(transport: HorovodTransport, call: Call, operation: Running) -> Call:
    """Plan a reduction with its factors; integers are scaled here, because Horovod's factors are for floating point."""
    request = operation.request
    dtype = request.tensors[0][0]
    if dtype in SCALED:
        call = replace(call, op=request.op, prescale=request.prescale, postscale=request.postscale)
        return average_of_half(call, transport.size) if dtype == "float16" else call
    operation.factor = request.postscale / transport.size if request.op == "average" else request.postscale
    for buffer in operation.buffers:
        transport.binding.scale(buffer, request.prescale)
    return replace(call, op=request.sums)


def average_of_half(call: Call, size: int) -> Call:
    """Change an average of float16 to divide, exactly, before the sum, which could otherwise be infinite."""
    if call.op != "average":
        return call
    exact = 0.5 ** (size - 1).bit_length()
    return replace(call, op="sum", prescale=call.prescale * exact, postscale=call.postscale / size / exact)


def collect(transport: HorovodTransport, operation: Running) -> None:
    """Collect the results of an operation; waits if it is not done."""
    binding, kind = transport.binding, operation.request.kind
    outputs: list[Any] = [call.result() for call in operation.requests]
    if operation.name == JOIN:
        operation.last_joined = outputs[0][0]
    elif kind == "allgather":
        (rows,) = outputs.pop()
        operation.rows = tuple(tuple(map(int, each)) for each in rows)
    elif kind == "alltoall":
        # Each row has only what this rank received, repeated; the other ranks' splits are not used.
        operation.rows = tuple((int(count),) * transport.size for count in outputs[0].pop())
    if kind in ("allgather", "alltoall", "reducescatter"):
        pairs = zip(outputs, operation.buffers, strict=True)
        operation.results = [binding.buffer_of(array, buffer) for (array,), buffer in pairs]
    for buffer in operation.results or operation.buffers:
        binding.scale(buffer, operation.factor)


class GradientCall(NamedTuple):
    """The reduction of a gradient. factor: factor of its conversion to float16; 0 if it is sent unchanged."""

    call: Call
    factor: float = 0.0


def plan_gradients(
    transport: Transport, name: str, tensors: Sequence[TensorSpec], options: ReduceOptions
) -> tuple[list[GradientCall], Call]:
    """Plan the reduction of each gradient, and of a float32 for each that marks the ranks that have it; collective.

    transport: a HorovodTransport.
    name: name of the list, the same on all ranks.
    tensors: the gradients.
    options: options of the reduction.
    Raises TypeError for a dtype, or wire dtype, that Horovod cannot reduce, PlanMismatchError if the ranks' gradients
    differ.
    """
    assert isinstance(transport, HorovodTransport)
    before, size = options.predivide or 1.0, transport.size
    call = Call("allreduce", "", transport.process_set, "average" if options.average else "sum", 1.0 / before, before)
    gradients = []
    for index, tensor in enumerate(tensors):
        check_gradient(tensor.name, tensor.dtype, engine="Horovod's core")
        wire = check_wire(f"the gradient of {tensor.name}", tensor.dtype, options.wire_for(tensor.name, tensor.dtype))
        named = replace(call, name=f"{name}.{index}.{tensor.name}")
        if "float16" in (tensor.dtype, wire):
            named = average_of_half(named, size)
        factor = named.prescale if wire == "float16" else 0.0
        gradients.append(GradientCall(replace(named, prescale=1.0) if factor else named, factor))
    sent = [replace(tensor, place=0, group=None, shape=()) for tensor in tensors]
    check_tensors(transport, sent, str(options))
    return gradients, replace(call, name=f"{name}.used_mask")
