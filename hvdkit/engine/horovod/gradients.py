"""What Horovod's core is asked for, for a gradient."""

from __future__ import annotations

from typing import Any

from hvdkit.engine.horovod.binding import Move
from hvdkit.engine.horovod.transport import refuse_bfloat16, refuse_coding
from hvdkit.engine.planned.agreement import check_agreement
from hvdkit.engine.planned.plan import TensorSpec, describe_plan
from hvdkit.engine.request import ReduceOptions, check_gradient
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import Narrow


def agree_on(transport: Transport, specs: list[TensorSpec], options: ReduceOptions) -> None:
    """Check that the gradients can be reduced, and that all ranks have the same; collective.

    Raises TypeError for a dtype, or one on the wire, that Horovod does not add, PlanMismatchError where ranks differ.
    """
    for spec in specs:
        check_gradient(spec.name, spec.dtype, horovod=True)
        if "bfloat16" in (spec.dtype, narrow_wire(spec.name, spec.dtype, options)):
            refuse_bfloat16(f"the gradient of {spec.name}")
    check_agreement(transport, describe_plan(specs, 0, str(options)))


def narrow_wire(name: str, dtype: str, options: ReduceOptions) -> Narrow:
    """The dtype in which a gradient is sent; TypeError for one that is to be coded."""
    wire = options.wire_for(name, dtype)
    if not isinstance(wire, str):
        refuse_coding(wire)
    return wire


def gradient_move(
    name: str, process_set: Any, dtype: str, options: ReduceOptions, size: int, wire: Narrow
) -> tuple[Move, float]:
    """The reduction of a gradient, and the factor to make it float16 with before, 0 where it is sent as it is.

    Horovod's averages divide at the end, when a sum of float16 may be too large; there all factors come before.
    size: number of ranks. wire: see narrow_wire.
    """
    prescale, postscale = options.factors(size, 1)
    if wire == "float16":
        return Move("allreduce", name, process_set), prescale * postscale
    if dtype == "float16":
        return Move("allreduce", name, process_set, prescale=prescale * postscale), 0.0
    if options.average and not options.predivide:
        return Move("allreduce", name, process_set, "average"), 0.0
    return Move("allreduce", name, process_set, prescale=prescale, postscale=postscale), 0.0
