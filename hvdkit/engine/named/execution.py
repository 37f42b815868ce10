"""Doing what is ready: operations whose parameters all ranks agree on, in one order, over one transport."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdkit.engine.named.announcement import Announcement, Ready
from hvdkit.engine.named.fusion import Part, plan_fusion
from hvdkit.engine.named.integers import finish_average, multiply, widen
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import SCALED, STORAGE, Buffer, Op, make_buffer

_ADASUM = ("op", "adasum")

#: What an operation of a kind of its own does, given the transport and the ranks that have joined.
Action = Callable[[Transport, Sequence[int]], Any]


@dataclass(slots=True)
class Operation:
    """One rank's part of a named operation.

    buffers: contiguous, one a tensor; read, and by allreduce and broadcast overwritten. results: of the other kinds, in
    new memory. rows: what the ranks brought along, see Ready. action: what is done, of a kind that is no collective;
    the engine goes on if it raises alike on all ranks. outcome: what it returned. last_joined: of a join. withdrawn:
    its announcement has been taken back. error: instead of a result.
    """

    name: str
    asked: Announcement
    buffers: Sequence[Buffer]
    results: Sequence[Buffer] = ()
    rows: tuple[tuple[int, ...], ...] = ()
    action: Action | None = None
    outcome: Any = None
    last_joined: int = -1
    withdrawn: bool = False
    done: bool = False
    error: Exception | None = None


def join_contribution(ready: Ready) -> Operation:
    """The part of a rank that has joined: what changes nothing in the others' result."""
    options = dict(ready.asked.options)
    buffers = []
    for dtype, shape in ready.asked.tensors:
        buffer = make_buffer(math.prod(shape), dtype)
        buffer.array[:] = _neutral(options.get("op", "sum"), dtype)
        buffers.append(buffer)
    return Operation(ready.name, ready.asked, buffers)


def _neutral(op: str, dtype: str) -> Any:
    if op == "product":
        return 0x3F80 if dtype == "bfloat16" else 1
    if op not in ("min", "max") or dtype == "bool":
        return op == "min"
    if dtype == "bfloat16":
        return 0x7F80 if op == "min" else 0xFF80
    storage = STORAGE[dtype]
    if storage.kind == "f":
        return np.inf if op == "min" else -np.inf
    return np.iinfo(storage).max if op == "min" else np.iinfo(storage).min


@dataclass(frozen=True)
class Step:
    """A part of what is to be done: some operations at once. do: does it; collective."""

    operations: Sequence[Operation]
    do: Callable[[], None]

    @property
    def label(self) -> str:
        """Name the step for messages."""
        name, kind = self.operations[0].name, self.operations[0].asked.kind
        more = f" and {len(self.operations) - 1} more" if len(self.operations) > 1 else ""
        return (name if name.startswith(kind) else f"{kind} ({name})") + more


def plan_steps(
    transport: Transport,
    work: Sequence[tuple[Ready, Operation]],
    *,
    limit_bytes: int,
    span: Callable[[str, Sequence[Operation]], Any],
) -> Iterator[Step]:
    """The steps in which operations are done that became ready together: with the same `work` the same on all ranks.

    limit_bytes: of small allreduces that are done as one. span: a context around each piece of work, for the timeline.
    """
    reductions = [
        (operation, at)
        for ready, operation in work
        if ready.asked.kind == "allreduce" and _ADASUM not in ready.asked.options
        for at in range(len(operation.buffers))
    ]
    parts = [
        Part((operation.asked.tensors[at][0], operation.asked.options), operation.buffers[at].nbytes)
        for operation, at in reductions
    ]
    for group in plan_fusion(parts, limit_bytes):
        some = [reductions[index] for index in group]
        operations = list({id(operation): operation for operation, _ in some}.values())
        yield Step(operations, functools.partial(_reduce_group, transport, some, span))
    for ready, operation in work:
        if operation.action is not None or ready.asked.kind != "allreduce" or _ADASUM in ready.asked.options:
            yield Step([operation], functools.partial(_do_one, transport, ready, operation, span))


def _do_one(
    transport: Transport, ready: Ready, operation: Operation, span: Callable[[str, Sequence[Operation]], Any]
) -> None:
    kind = ready.asked.kind
    operation.rows = ready.rows
    if operation.action is not None:
        with span(kind.upper(), [operation]):
            operation.outcome = operation.action(transport, ready.joined)
    elif kind != "allreduce":
        with span(kind.upper(), [operation]):
            _DOING.get(kind, _announced)(transport, operation)
    else:
        from hvdkit.engine.adasum import adasum

        with span("ADASUM", [operation]):
            adasum(transport, operation.buffers)


def _option(operation: Operation, word: str) -> str:
    return dict(operation.asked.options).get(word, "")


def factors(asked: Announcement, size: int) -> tuple[float, float]:
    """What is multiplied with before and after the reduction."""
    options = dict(asked.options)
    before, after = float(options.get("prescale factor", "1")), float(options.get("postscale factor", "1"))
    return before, after / size if options["op"] == "average" else after


def _postscale(operation: Operation) -> float:
    return float(_option(operation, "postscale factor") or "1")


def _reduce_group(
    transport: Transport, group: Sequence[tuple[Operation, int]], span: Callable[[str, Sequence[Operation]], Any]
) -> None:
    operations = [operation for operation, _ in group]
    buffers = [operation.buffers[at] for operation, at in group]
    fused = buffers[0]
    if len(buffers) > 1:
        with span("MEMCPY_IN_FUSION_BUFFER", operations):
            fused = Buffer(np.concatenate([buffer.array for buffer in buffers]), buffers[0].dtype)
    with span("ALLREDUCE", operations):
        reduce_scaled(transport, fused, operations[0])
    if len(buffers) > 1:
        with span("MEMCPY_OUT_FUSION_BUFFER", operations):
            at = 0
            for buffer in buffers:
                end = at + buffer.array.size
                buffer.array[:] = fused.array[at:end]
                at = end


def reduce_scaled(transport: Transport, buffer: Buffer, operation: Operation) -> None:
    """Reduce a buffer as the operation says, factors and all."""
    before, after = factors(operation.asked, transport.size)
    name = _option(operation, "op")
    op: Op = "sum" if name in ("average", "sum") else name  # type: ignore[assignment]
    if buffer.dtype not in SCALED and name == "average":
        total = widen(buffer, transport.size, before)
        transport.allreduce(total)
        finish_average(buffer, total, transport.size, _postscale(operation))
    elif buffer.dtype not in SCALED:
        multiply(buffer, before)
        transport.allreduce(buffer, op)
        multiply(buffer, after)
    else:
        if before != 1.0:  # not after the sum, which may be too large for the dtype without it
            transport.arithmetic.combine(buffer, [buffer], scale=before)
        transport.allreduce(buffer, op, after)


def _broadcast(transport: Transport, operation: Operation) -> None:
    root = int(_option(operation, "root rank"))
    for buffer in operation.buffers:
        transport.broadcast(buffer, root)


def _allgather(transport: Transport, operation: Operation) -> None:
    results = []
    for at, (buffer, (_, shape)) in enumerate(zip(operation.buffers, operation.asked.tensors, strict=True)):
        width = math.prod(shape[1:])
        results.append(transport.allgather(buffer, [rows[at] * width for rows in operation.rows]))
    operation.results = results


def _alltoall(transport: Transport, operation: Operation) -> None:
    width = math.prod(operation.asked.tensors[0][1][1:])
    sent = [count * width for count in operation.rows[transport.rank]]
    received = [splits[transport.rank] * width for splits in operation.rows]
    buffer = operation.buffers[0].slice(0, sum(sent))  # rows that no rank is to have stay here
    operation.results = [transport.alltoall(buffer, sent, received)]


def split_rows(rows: int, size: int) -> list[int]:
    """Rows of a reducescatter's result on each rank: the first ones get one more where it does not divide."""
    each, more = divmod(rows, size)
    return [each + (rank < more) for rank in range(size)]


def _reducescatter(transport: Transport, operation: Operation) -> None:
    before, after = factors(operation.asked, transport.size)
    results = []
    for buffer, (_, shape) in zip(operation.buffers, operation.asked.tensors, strict=True):
        width = math.prod(shape[1:])
        counts = [rows * width for rows in split_rows(shape[0], transport.size)]
        if buffer.dtype in SCALED:
            if before != 1.0:
                transport.arithmetic.combine(buffer, [buffer], scale=before)
            result = transport.reducescatter(buffer, counts, "sum")
            if after != 1.0:
                transport.arithmetic.combine(result, [result], scale=after)
        elif _option(operation, "op") == "average":
            total = widen(buffer, transport.size, before)
            each = total.count // buffer.count if buffer.count else 1
            total = transport.reducescatter(total, [count * each for count in counts], "sum")
            result = make_buffer(counts[transport.rank], buffer.dtype)
            finish_average(result, total, transport.size, _postscale(operation))
        else:
            multiply(buffer, before)
            result = transport.reducescatter(buffer, counts, "sum")
            multiply(result, after)
        results.append(result)
    operation.results = results


def _announced(transport: Transport, operation: Operation) -> None:
    """A barrier, say. Everyone has announced it: nothing is left to do."""


_DOING: dict[str, Callable[[Transport, Operation], None]] = {
    "broadcast": _broadcast,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
}
