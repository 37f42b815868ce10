"""Collectives on TensorFlow's tensors, without gradients, by named operations of the engine.

name: from naming.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.engine.groups import ProcessSet, group_of
from hvdkit.engine.named.execution import split_rows
from hvdkit.engine.named.submit import check_splits, reduce_options, root_options, scatter_options
from hvdkit.engine.reduce_op import ReduceOp
from hvdkit.tensorflow.naming import operation_name
from hvdkit.tensorflow.run import do, run
from hvdkit.tensorflow.tensors import copy_of, dtype_name, shaped
from hvdkit.tensorflow.tracing import in_session, tensorflow_errors
from hvdkit.transport.buffer import Array

Factors = tuple[float, float]
Tensors = Sequence[Any]


def _known(tensors: Tensors) -> list[tuple[Any, Any]]:
    return [(tensor.dtype, tensor.shape) for tensor in tensors]


def _any_rows(tensors: Tensors) -> list[tuple[Any, Any]]:
    return [(one.dtype, _rest(one) if one.shape.rank is None else [None, *_rest(one)]) for one in tensors]


def _rest(tensor: Any) -> Any:
    """Return the shape of a row."""
    return tensor.shape if tensor.shape.rank is None else tensor.shape[1:]


def _rows(arrays: Sequence[Array]) -> list[Array]:
    """Return the arrays with at least one dimension; a scalar gets one."""
    return [array.reshape(1) if array.ndim == 0 else array for array in arrays]


def allreduce(
    tensors: Tensors, name: str | None, op: ReduceOp, factors: Factors, process_set: ProcessSet, call: str
) -> list[Any]:
    """Reduce tensors as one operation.

    tensors: any shapes.
    name: from naming.py.
    op: of the reduction.
    factors: before and after it.
    process_set: the ranks that take part.
    call: the user's call, for messages.
    """
    dtypes = [dtype_name(tensor.dtype) for tensor in tensors]
    options = reduce_options(dtypes, op, *factors, call)
    process_set.group(call)

    def doing(*arrays: Array) -> list[Array]:
        made = [copy_of(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
        do(process_set.group(call), "allreduce", name, made, dtypes, options)
        return made

    return run(doing, tensors, _known(tensors), call)


def broadcast(tensors: Tensors, root_rank: int, name: str | None, process_set: ProcessSet, call: str) -> list[Any]:
    """Copy the root's tensors to all ranks, as one operation.

    tensors: any shapes.
    root_rank: a rank of the whole job.
    name: from naming.py.
    process_set: the ranks that take part.
    call: the user's call, for messages.
    """
    dtypes = [dtype_name(tensor.dtype) for tensor in tensors]
    process_set.group(call)
    options = root_options(process_set, root_rank, call)

    def doing(*arrays: Array) -> list[Array]:
        made = [copy_of(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
        do(process_set.group(call), "broadcast", name, made, dtypes, options)
        return made

    return run(doing, tensors, _known(tensors), call)


def allgather(tensors: Tensors, name: str | None, process_set: ProcessSet, call: str) -> tuple[list[Any], list[Any]]:
    """Concatenate each tensor, as one operation; returns results, and of each the rows per rank, int32 (size,)."""
    dtypes = [dtype_name(tensor.dtype) for tensor in tensors]
    size = process_set.group(call).transport.size

    def doing(*arrays: Array) -> list[Array]:
        arrays_ = _rows(arrays)
        operation = do(process_set.group(call), "allgather", name, arrays_, dtypes)
        rows = [[each[at] for each in operation.rows] for at in range(len(arrays_))]
        made = [
            shaped(result, (sum(counts), *array.shape[1:]))
            for result, counts, array in zip(operation.results, rows, arrays_, strict=True)
        ]
        return [*made, *(np.array(counts, np.int32) for counts in rows)]

    found = run(doing, tensors, _any_rows(tensors) + [(tf.int32, [size])] * len(tensors), call)
    return found[: len(tensors)], found[len(tensors) :]


def alltoall(tensor: Any, splits: Any, name: str | None, process_set: ProcessSet, call: str) -> tuple[Any, Any]:
    """Send each rank its rows; returns the received rows, and their number from each rank, int32 (size,).

    tensor: shape (n, ...).
    splits: number of rows for each rank; None for equal numbers.
    name: from naming.py.
    process_set: the ranks that take part.
    call: the user's call, for messages.
    """
    dtype = dtype_name(tensor.dtype)
    size = process_set.group(call).transport.size
    given = [] if splits is None else [tf.convert_to_tensor(splits)]
    for one in given:
        if not one.dtype.is_integer or one.shape.rank not in (None, 1):
            raise ValueError(
                f"{call}: splits must hold one integer for each of the {size} ranks; got a tensor of {one.dtype.name} "
                f"and shape {one.shape}."
            )

    def doing(array: Array, *counts: Array) -> list[Array]:
        group = process_set.group(call)
        (array,) = _rows([array])
        listed = counts[0].tolist() if counts and counts[0].size else None
        checked = check_splits(array.shape[0], listed, group.transport.size, call)
        operation = do(group, "alltoall", name, [array], [dtype], (), checked)
        received = [each[group.transport.rank] for each in operation.rows]
        made = shaped(operation.results[0], (sum(received), *array.shape[1:]))
        return [made, np.array(received, np.int32)]

    made, received = run(doing, [tensor, *given], [*_any_rows([tensor]), (tf.int32, [size])], call)
    return made, received


def reducescatter(
    tensors: Tensors, name: str | None, op: ReduceOp, factors: Factors, process_set: ProcessSet, call: str
) -> list[Any]:
    """Reduce tensors as one operation; returns this rank's rows of each.

    tensors: shape (n, ...) each.
    name: from naming.py.
    op: of the reduction.
    factors: before and after it.
    process_set: the ranks that take part.
    call: the user's call, for messages.
    """
    dtypes = [dtype_name(tensor.dtype) for tensor in tensors]
    options = scatter_options(dtypes, op, *factors, call)
    process_set.group(call)
    for tensor in tensors:
        if tensor.shape.rank == 0:
            raise ValueError(f"{call}: a scalar has no rows to scatter; give a tensor of at least one dimension.")

    def doing(*arrays: Array) -> list[Array]:
        made = list(arrays)
        if factors[0] != 1.0:  # the operation multiplies in its memory
            made = [copy_of(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
        group = process_set.group(call)
        transport = group.transport
        operation = do(group, "reducescatter", name, made, dtypes, options)
        results = []
        for array, result in zip(made, operation.results, strict=True):
            width = math.prod(array.shape[1:])
            rows = result.count // width if width else split_rows(array.shape[0], transport.size)[transport.rank]
            results.append(shaped(result, (rows, *array.shape[1:])))
        return results

    return run(doing, tensors, _any_rows(tensors), call)


def barrier(process_set: ProcessSet) -> None:
    """Wait for all ranks; at once while a graph for sessions is built, as no session would run the operation."""
    group_of(process_set, "barrier()")
    at_once = tf.executing_eagerly() or in_session()
    name = None if at_once else operation_name("barrier", None, process_set)

    def doing() -> list[Array]:
        do(process_set.group("barrier()"), "barrier", name, [], [])
        return []

    if at_once:
        with tensorflow_errors():
            doing()
    else:
        run(doing, [], [], "barrier()")
