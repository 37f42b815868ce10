"""Collectives on values: anything that Keras can turn into an array. Horovod's names, arguments and meanings.

A tensor of the backend gives a tensor, anything else a numpy array. numpy keeps float64 and int64; JAX converts them to
32 bits. All calls are collective. name: of the operation, the same on all ranks; without a name, calls are matched in
their order. The calls raise NotInitializedError before init(), TypeError for a dtype that cannot be sent, and
HorovodInternalError on every rank if dtypes, shapes or operations differ between ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdkit.engine.compression import Compression, Compressor, Factors, reduce_compressed
from hvdkit.engine.groups import ProcessSet, global_process_set, group_of
from hvdkit.engine.named.operation import Operation
from hvdkit.engine.named.submit import Options, do, reduce_options, root_options, scatter_options
from hvdkit.engine.reduce_op import Average, ReduceOp, choose_op
from hvdkit.keras.backends import settle, uncompiled_later
from hvdkit.transport.buffer import FLOAT8, STORAGE, Array, Buffer


@uncompiled_later
def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: type[Compressor] = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a value over all ranks; every rank gets the result.

    value: any shape; shape and dtype the same on all ranks.
    name: of the operation, the same on all ranks.
    average: Horovod's older argument; True for op=Average, False for op=Sum.
    prescale_factor: the value is multiplied by it before the reduction.
    postscale_factor: the result is multiplied by it after the reduction.
    op: Average (the default), Sum, Min, Max, Product or, for floating-point dtypes, Adasum.
    compression: the dtype that is sent instead of float32 and float64.
    process_set: the ranks that take part.

    Raises ValueError for both `average` and `op`; for the other errors see the docstring of hvdkit.keras.values.
    """
    chosen, factors = choose_op(average, op), (prescale_factor, postscale_factor)

    def reduce(arrays: Sequence[Array], op: ReduceOp, factors: Factors) -> list[Array]:
        array, buffer = _contiguous(arrays[0])
        options = reduce_options([buffer.dtype], op, *factors, "allreduce()")
        _run("allreduce", name, [(buffer.dtype, array.shape)], [buffer], options, process_set)
        return [array]

    size = group_of(process_set, "allreduce()").transport.size
    return _like(value, reduce_compressed(compression, [_numpy_of(value)], chosen, factors, size, reduce)[0])


@uncompiled_later
def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate all ranks' values along the first dimension, in rank order.

    value: shape (n, ...). n may differ between ranks; the other dimensions and the dtype must be the same on all ranks.
    A scalar counts as shape (1,). Returns shape (sum of all n, ...).
    """
    array, buffer = _contiguous(value)
    shape = array.shape or (1,)
    operation = _run("allgather", name, [(buffer.dtype, shape)], [buffer], (), process_set)
    rows = sum(each[0] for each in operation.rows)
    return _like(value, operation.results[0].array.view(array.dtype).reshape(rows, *shape[1:]))


@uncompiled_later
def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Return the value of rank root_rank on every rank; the same shape and dtype on all ranks.

    Raises ValueError for a root that does not exist.
    """
    group_of(process_set, "broadcast()")
    options = root_options(process_set, root_rank, "broadcast()")
    array, buffer = _contiguous(value)
    _run("broadcast", name, [(buffer.dtype, array.shape)], [buffer], options, process_set)
    return _like(value, array)


@uncompiled_later
def reducescatter(
    value: Any, name: str | None = None, op: ReduceOp = Average, process_set: ProcessSet = global_process_set
) -> Any:
    """Reduce a value over all ranks; each rank gets its rows of the result.

    value: shape (n, ...); shape and dtype the same on all ranks. Rank i gets n // size rows, and one more if
    i < n % size.
    name: of the operation, the same on all ranks.
    op: Average or Sum.
    process_set: the ranks that take part.

    Raises ValueError for a scalar, NotImplementedError for another op.
    """
    array, buffer = _contiguous(value)
    if not array.ndim:
        raise ValueError("reducescatter(): a scalar has no rows to scatter; give a value of at least one dimension.")
    options = scatter_options([buffer.dtype], op, 1.0, 1.0, "reducescatter()")
    operation = _run("reducescatter", name, [(buffer.dtype, array.shape)], [buffer], options, process_set)
    return _like(value, operation.results[0].array.view(array.dtype).reshape(-1, *array.shape[1:]))


@uncompiled_later
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has called barrier()."""
    _run("barrier", None, (), (), (), process_set)


def _run(
    kind: str,
    name: str | None,
    tensors: Sequence[tuple[str, tuple[int, ...]]],
    buffers: Sequence[Buffer],
    options: Options,
    process_set: ProcessSet,
) -> Operation:
    group = group_of(process_set, f"{kind}()")
    settle()
    return do(group, kind, name, tensors, buffers, options)


def _contiguous(value: Any) -> tuple[Array, Buffer]:
    """Copy the value to new memory; returns the array, and its Buffer."""
    array = np.array(_numpy_of(value), order="C", copy=True)
    name = array.dtype.name
    if name not in STORAGE:
        raise TypeError(f"{array.dtype} cannot be sent between ranks. Cast the value to one of {', '.join(STORAGE)}.")
    return array, Buffer(array.reshape(-1).view(STORAGE[name]), name)


def _float8_of_torch(tensor: Any) -> str:
    """Return the dtype's name for a float8 tensor of PyTorch: Keras cannot convert those to numpy and back."""
    name = str(tensor.dtype).removeprefix("torch.")
    return name if keras.backend.backend() == "torch" and name in FLOAT8 else ""


def _numpy_of(value: Any) -> Array:
    """Return the value as an array, which may share its memory."""
    if not keras.ops.is_tensor(value):
        return np.asarray(value)
    float8 = _float8_of_torch(value)
    if not float8:
        return keras.ops.convert_to_numpy(value)  # type: ignore[no-any-return]
    bits: Array = value.detach().cpu().view(importlib.import_module("torch").uint8).numpy()
    return bits.view(np.dtype(float8))  # Keras has loaded ml_dtypes, which registers the name


def _like(value: Any, array: Array) -> Any:
    if keras.ops.is_tensor(value) and (float8 := _float8_of_torch(value)):
        torch = importlib.import_module("torch")
        return torch.from_numpy(array.view(np.uint8)).view(getattr(torch, float8)).to(value.device)
    return keras.ops.convert_to_tensor(array) if keras.ops.is_tensor(value) else array
