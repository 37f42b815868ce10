"""From announced operations to what Horovod's core is asked for, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hvdkit.engine.horovod.binding import Binding, Move, Pending
from hvdkit.engine.named.execution import factors
from hvdkit.engine.named.integers import multiply
from hvdkit.engine.named.operation import Announcement, Operation
from hvdkit.transport.buffer import SCALED, STORAGE, Buffer

_CURE = "Cast the tensor, or take hvdkit's own engine (HVDKIT_ENGINE=native)."


class Running(Operation):
    """An operation and its parts under way in Horovod; what they give is collected when all are done."""

    def __init__(self, name: str, asked: Announcement, buffers: Sequence[Buffer]) -> None:
        super().__init__(name, asked, buffers)
        self.pending: list[Pending] = []
        self.after = 1.0
        self.joins: Any = None

    def ready(self) -> bool:
        """Would collecting not wait?"""
        return all(one.done() for one in self.pending)


#: What Horovod reduces, but has no reducescatter of.
_NOT_SCATTERED = frozenset({"int8", "uint8"})


def check_dtypes(asked: Announcement, binding: Binding) -> None:
    """Raise TypeError for a reduction of a dtype that Horovod's core does not add."""
    if asked.kind not in ("allreduce", "reducescatter"):
        return
    known = binding.reduced if asked.kind == "allreduce" else binding.reduced - _NOT_SCATTERED
    for dtype, _ in asked.tensors:
        if dtype not in known:
            raise TypeError(
                f"{asked.kind} of {dtype}: Horovod's core, which is the engine here, reduces "
                f"{', '.join(sorted(known))} only. {_CURE}"
            )


#: Dtypes that Horovod's core does not move in each framework -> integers which hold their bits, in host memory.
_BITS = {
    "bool": np.uint8,
    "bfloat16": np.int16,
    "uint16": np.int16,
    "uint32": np.int32,
    "uint64": np.int64,
    "complex64": np.int64,
    "complex128": np.int64,
}


def numbers_of(buffer: Buffer, shape: Sequence[int]) -> Any:
    """The buffer's memory in that shape, as a dtype that Horovod knows: bits are moved as integers of that width.

    Of complex128 in host memory as pairs: (*shape, 2).
    """
    array = buffer.array
    if not isinstance(array, np.ndarray) or buffer.dtype not in _BITS:
        return array.reshape(tuple(shape))
    pairs = (2,) if buffer.dtype == "complex128" else ()
    return array.view(_BITS[buffer.dtype]).reshape((*shape, *pairs))


def flat_of(array: Any, dtype: str) -> Any:
    """What Horovod gave for numbers_of(), as (n,) of the storage of this dtype, sharing memory."""
    flat = array.reshape(-1)
    if isinstance(flat, np.ndarray) and dtype in _BITS:
        flat = flat.view(STORAGE[dtype])
    return flat


def start_operation(binding: Binding, process_set: Any, ranks: Sequence[int], operation: Running) -> None:
    """Ask Horovod for an operation. ranks: of the set, in the world."""
    asked = operation.asked
    arrays = [numbers_of(buffer, shape) for buffer, (_, shape) in zip(operation.buffers, asked.tensors, strict=True)]
    groups = [[at] for at in range(len(arrays))]  # arrays that Horovod is given in one call
    move = Move("allreduce", operation.name, process_set)
    if asked.kind in ("allreduce", "reducescatter"):
        move = _plan_reduction(binding, move, len(ranks), operation)
        if asked.kind == "allreduce":
            dtypes = [dtype for dtype, _ in asked.tensors]
            groups = [[at for at, dtype in enumerate(dtypes) if dtype == each] for each in dict.fromkeys(dtypes)]
    elif asked.kind == "barrier":
        arrays, groups = [np.zeros(1, np.int32)], [[0]]
    elif asked.kind == "broadcast":
        move = replace(move, kind="broadcast", root=ranks[int(dict(asked.options)["root rank"])])
    elif asked.kind == "alltoall":
        move = replace(move, kind="alltoall", splits=asked.splits)
        arrays = [arrays[0][: sum(asked.splits)]]  # what no rank is to have stays here
    else:
        assert asked.kind == "allgather"
        move = replace(move, kind="allgather")
        arrays.append(np.array([[shape[0] for _, shape in asked.tensors]], np.int64))
        groups.append([len(arrays) - 1])
    for number, group in enumerate(groups):
        name = f"{move.name}.{number}" if number else move.name
        operation.pending.append(binding.start(replace(move, name=name), [arrays[at] for at in group]))


def _plan_reduction(binding: Binding, move: Move, size: int, operation: Running) -> Move:
    """The reduction with its factors; integers are scaled here, as Horovod's factors are of floating point."""
    asked = operation.asked
    options = dict(asked.options)
    move = replace(move, kind="allreduce" if asked.kind == "allreduce" else "reducescatter", op=options["op"])
    before, after = factors(asked, size)
    if asked.tensors[0][0] == "float16" and move.op == "average":  # a sum may be too large where the average is not
        exact = 0.5 ** (size - 1).bit_length()
        return replace(move, op="sum", prescale=before * exact, postscale=after / exact)
    if asked.tensors[0][0] in SCALED:
        return replace(move, prescale=before, postscale=float(options["postscale factor"]))
    operation.after = after
    for buffer in operation.buffers:
        _scale(binding, buffer, before)
    return replace(move, op="sum" if move.op == "average" else move.op)


def _scale(binding: Binding, buffer: Buffer, factor: float) -> None:
    """Multiply integers; what is not whole loses its fraction."""
    if isinstance(buffer.array, np.ndarray):
        multiply(buffer, factor)
    elif factor != 1.0:
        binding.scale(buffer.array, factor)


def collect(binding: Binding, operation: Running, size: int) -> None:
    """Take the results of an operation that is done; waits if it is not. size: number of ranks."""
    found = [one.wait() for one in operation.pending]
    asked = operation.asked
    if asked.kind == "allgather":
        *gathered, rows = found
        operation.rows = tuple(tuple(int(one) for one in each) for each in rows[0])
        operation.results = _results(operation, [made for (made,) in gathered])
    elif asked.kind == "alltoall":
        received, counts = found[0]
        rows_from = [int(one) for one in counts]
        # What this rank received stands where every rank's splits would; of theirs nothing else is asked for.
        operation.rows = tuple(tuple(rows_from[rank] for _ in range(size)) for rank in range(size))
        operation.results = _results(operation, [received])
    elif asked.kind == "reducescatter":
        operation.results = _results(operation, [made for (made,) in found])
    for buffer in operation.results or operation.buffers:
        _scale(binding, buffer, operation.after)


def _results(operation: Running, arrays: Sequence[Any]) -> list[Buffer]:
    return [
        type(given)(flat_of(array, dtype), dtype)
        for (dtype, _), array, given in zip(operation.asked.tensors, arrays, operation.buffers, strict=True)
    ]
