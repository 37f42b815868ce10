"""What Horovod's core is asked for, for each of a list of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hvdkit.engine.horovod.binding import Call
from hvdkit.engine.horovod.buckets import check_wire
from hvdkit.engine.horovod.operations import average_of_half
from hvdkit.engine.horovod.transport import HorovodTransport
from hvdkit.engine.planned.agreement import check_agreement
from hvdkit.engine.planned.plan import TensorSpec, describe_plan
from hvdkit.engine.request import ReduceOptions, check_gradient
from hvdkit.transport.api import Transport


class GradientCall(NamedTuple):
    """The reduction of a gradient. factor: to make it float16 with before, 0 where it is sent as it is."""

    call: Call
    factor: float = 0.0


def plan_gradients(
    transport: Transport, name: str, tensors: Sequence[TensorSpec], options: ReduceOptions
) -> tuple[list[GradientCall], Call]:
    """How each gradient is reduced, and a float32 for each that says whether a rank has it; collective.

    name: of the list, the same on all ranks. Raises TypeError for a dtype, or one on the wire, that Horovod does not
    add, PlanMismatchError where the ranks' gradients differ.
    """
    assert isinstance(transport, HorovodTransport)
    before, size = options.predivide or 1.0, transport.size
    call = Call("allreduce", "", transport.process_set, "average" if options.average else "sum", 1.0 / before, before)
    gradients = []
    for index, tensor in enumerate(tensors):
        check_gradient(tensor.name, tensor.dtype, horovod=True)
        wire = options.wire_for(tensor.name, tensor.dtype)
        wire = check_wire(f"the gradient of {tensor.name}", tensor.dtype, wire)
        named = replace(call, name=f"{name}.{index}.{tensor.name}")
        if "float16" in (tensor.dtype, wire):
            named = average_of_half(named, size)
        factor = named.prescale if wire == "float16" else 0.0
        gradients.append(GradientCall(replace(named, prescale=1.0) if factor else named, factor))
    sent = [replace(tensor, place=0, group=None, shape=()) for tensor in tensors]
    check_agreement(transport, describe_plan(sent, 0, str(options)))
    return gradients, replace(call, name=f"{name}.used_mask")
