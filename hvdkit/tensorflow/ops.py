"""Collectives of Horovod's TensorFlow 2 API: its names, arguments and meanings.

All of them work in eager mode, inside a tf.function, where they run each time it does, in the order in which they were
traced, and in a graph for tf.compat.v1.Session, where they run in any order (barrier() at once, when it is called).
Tensors are of a dtype that allreduce() takes, or float8 where nothing is reduced; variables are taken as well. name:
the operation's, the same on all ranks; without one eager calls of a kind are matched in their order, those of a
function or graph by their number in it, see naming.py. process_set: the ranks that take part; each of them makes the
call. device_dense, device_sparse, ignore_name_scope: as in Horovod, accepted and not needed.

Raised at once: NotInitializedError before init(), ValueError on a rank outside of the set and for arguments that cannot
be used, TypeError for a dtype that cannot be sent, XlaError where XLA would compile the call. Where the ranks disagree,
or one has left, every rank raises HorovodInternalError. As in Horovod these are errors of TensorFlow's too, and a graph
that fails raises the same ones, with the same text: tf.errors.FailedPreconditionError where the ranks disagree and
before init(), InvalidArgumentError for a ValueError, UnknownError where a rank has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.engine import runtime as engine
from hvdkit.engine.basics import join_ranks
from hvdkit.engine.compression import Factors, reduce_compressed
from hvdkit.engine.groups import ProcessSet, global_process_set
from hvdkit.engine.reduce_op import Average, ReduceOp, Sum, choose_op
from hvdkit.tensorflow import collectives
from hvdkit.tensorflow import differentiable as autograd
from hvdkit.tensorflow.compression import Compression, Compressor
from hvdkit.tensorflow.naming import operation_name
from hvdkit.tensorflow.run import run
from hvdkit.tensorflow.tracing import in_python, in_session
from hvdkit.transport.buffer import Array

Narrow = type[Compressor]


@in_python
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Narrow = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor over all ranks; every rank gets the result, of the same shape and dtype.

    tensor: any shape, of dtype uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64,
    complex64 or complex128 (not for Min and Max), or bool (for Min, Max, Sum and Product, which are its "and" and
    "or"); shape and dtype the same on all ranks. Averages of integers are exact and drop the fraction, their sums wrap;
    float16 and bfloat16 are summed in float32. Of tf.IndexedSlices the rows of all ranks are gathered, for Sum and
    Average and without factors (NotImplementedError otherwise).
    op: Average (the default), Sum, Min, Max, Product or, for floating point, Adasum. average: the older way to say
    Average or Sum. compression: what is sent instead of float32 and float64. prescale_factor, postscale_factor:
    multiplied with before and after. All else, and what all of these functions raise: see the top of this module.
    Differentiable for Average and Sum: the gradient is reduced in the same way.

    Raises ValueError for both `average` and `op`, TypeError for a dtype that cannot be reduced so, HorovodInternalError
    on every rank where shapes, dtypes, ops or factors disagree.
    """
    chosen, factors = choose_op(average, op), (prescale_factor, postscale_factor)
    if isinstance(tensor, tf.IndexedSlices):
        return _gather_slices([tensor], chosen, factors, process_set, "allreduce()")[0]
    return _reduce([tensor], compression, name, chosen, factors, process_set, "allreduce()")[0]


@in_python
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Narrow = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> Any:
    """Reduce several tensors as one operation: none before all of them are there on all ranks.

    tensors: of any shapes and dtypes, IndexedSlices among them, the same list on all ranks. Returns the list of
    results. All else, and what it raises: as allreduce().
    """
    chosen, factors = choose_op(average, op), (prescale_factor, postscale_factor)
    if not tensors:
        return tensors
    sparse = [at for at, one in enumerate(tensors) if isinstance(one, tf.IndexedSlices)]
    dense = [at for at in range(len(tensors)) if at not in sparse]
    call, results = "grouped_allreduce()", [None] * len(tensors)
    if sparse:
        gathered = _gather_slices([tensors[at] for at in sparse], chosen, factors, process_set, call)
        results = _put(results, sparse, gathered)
    if dense:
        reduced = _reduce([tensors[at] for at in dense], compression, name, chosen, factors, process_set, call)
        results = _put(results, dense, reduced)
    return results


def _put(results: list[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    found = dict(zip(places, values, strict=True))
    return [found.get(at, one) for at, one in enumerate(results)]


def _reduce(
    tensors: Sequence[Any],
    compression: Narrow,
    name: str | None,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
    call: str,
) -> list[Any]:
    given = [tf.convert_to_tensor(tensor) for tensor in tensors]
    size = process_set.group(call).transport.size

    def reduce(tensors: Sequence[Any], op: ReduceOp, factors: Factors) -> Sequence[Any]:
        return autograd.allreduce(tensors, name, op, factors, process_set, call)

    return list(reduce_compressed(compression, given, op, factors, size, reduce))


def _gather_slices(
    slices: Sequence[Any], op: ReduceOp, factors: tuple[float, float], process_set: ProcessSet, call: str
) -> list[Any]:
    if op not in (Average, Sum):
        raise NotImplementedError(f"{call} with op={op} is not for tf.IndexedSlices; use Sum or Average, or a tensor.")
    if factors != (1.0, 1.0):
        raise NotImplementedError(f"{call} takes no prescale_factor or postscale_factor with tf.IndexedSlices.")
    values = autograd.allgather([one.values for one in slices], None, process_set, call)
    name = operation_name("allgather", None, process_set)
    indices, _ = collectives.allgather([one.indices for one in slices], name, process_set, call)
    if op is Average:
        values = [one / tf.cast(process_set.size(), one.dtype) for one in values]
    return [
        tf.IndexedSlices(rows, where, one.dense_shape) for rows, where, one in zip(values, indices, slices, strict=True)
    ]


@in_python
def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate all ranks' tensors along the first dimension, in rank order.

    tensor: (n, ...), n may differ between ranks and be 0, the other dimensions and the dtype may not; a scalar counts
    as (1,). The result: (sum of all n, ...), of that dtype: any that allreduce() takes, or a float8.
    Differentiable: each rank gets the average over ranks of the gradients of its rows, as in Horovod.

    Raises what the top of this module says; HorovodInternalError on every rank where dtypes or dimensions beyond the
    first disagree, or a rank has joined.
    """
    return autograd.allgather([tf.convert_to_tensor(tensor)], name, process_set, "allgather()")[0]


@in_python
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Concatenate several tensors each, as one operation; returns the list of results.

    tensors: the same list on all ranks. Shapes, dtypes and what it raises: as allgather().
    """
    if not tensors:
        return []
    given = [tf.convert_to_tensor(tensor) for tensor in tensors]
    return autograd.allgather(given, name, process_set, "grouped_allgather()")


@in_python
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Give every rank a copy of root's tensor.

    tensor: any shape and any dtype that allreduce() takes, both the same on all ranks. root_rank: its number in the
    world, also for a process set. Differentiable: the root gets the average of the gradients, as in Horovod.

    Raises ValueError for a root that is not in the set, HorovodInternalError on every rank where shapes, dtypes or
    roots disagree, or a rank has joined.
    """
    return autograd.broadcast(tf.convert_to_tensor(tensor), root_rank, name, process_set, "broadcast()")


@in_python
def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Overwrite variables with root's, as one operation, and return their new values.

    variables: of TensorFlow or Keras, the same list on all ranks. Shapes, dtypes and what it raises: as broadcast().
    """
    given = [tf.convert_to_tensor(variable) for variable in variables]
    if not given:
        return []
    name = operation_name("broadcast", name, process_set)
    values = collectives.broadcast(given, root_rank, name, process_set, "broadcast_()")
    assigned = [variable.assign(value) for variable, value in zip(variables, values, strict=True)]
    # A graph for sessions runs nothing but what leads to its results.
    return [tf.convert_to_tensor(one) for one in assigned] if in_session() else values


@in_python
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send each rank its rows of the tensor, and return the rows that came, in rank order.

    tensor: (n, ...), the other dimensions and the dtype alike on all ranks, any dtype that allreduce() takes. splits:
    rows for each rank, as a list or a tensor of integers; equal parts if None, and then n divides by the number of
    ranks. Returns the received rows; with `splits` given a tuple of them and of how many came from each rank, int32
    (size,). Differentiable: gradients go back to where the rows came from.

    Raises ValueError for splits that are no whole numbers or sum up to more than n, HorovodInternalError on every rank
    where dtypes or dimensions beyond the first disagree, or a rank has joined.
    """
    received, counts = autograd.alltoall(tf.convert_to_tensor(tensor), splits, name, process_set, "alltoall()")
    return received if splits is None else (received, counts)


@in_python
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Narrow = Compression.none,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over all ranks, and give each rank its rows of the result.

    tensor: (n, ...), shape and dtype the same on all ranks, any dtype that allreduce() takes; rank i gets n // size
    rows, and one more if i < n % size. op: Average or Sum. The other arguments: as allreduce()'s.
    Differentiable: the gradients of all rows are gathered.

    Raises ValueError for a scalar, NotImplementedError for another op, TypeError for a dtype that cannot be reduced so,
    HorovodInternalError on every rank where shapes, dtypes, ops or factors disagree, or a rank has joined.
    """
    factors = (prescale_factor, postscale_factor)
    return _scatter([tensor], compression, name, op, factors, process_set, "reducescatter()")[0]


@in_python
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Narrow = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce and scatter several tensors as one operation; returns the list of results.

    tensors: the same list on all ranks. Shapes, dtypes, arguments and what it raises: as reducescatter().
    """
    if not tensors:
        return tensors
    factors = (prescale_factor, postscale_factor)
    return _scatter(tensors, compression, None, op, factors, process_set, "grouped_reducescatter()")


def _scatter(
    tensors: Sequence[Any],
    compression: Narrow,
    name: str | None,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
    call: str,
) -> list[Any]:
    given = [tf.convert_to_tensor(tensor) for tensor in tensors]
    size = process_set.group(call).transport.size

    def reduce(tensors: Sequence[Any], op: ReduceOp, factors: Factors) -> Sequence[Any]:
        return autograd.reducescatter(tensors, name, op, factors, process_set, call)

    return list(reduce_compressed(compression, given, op, factors, size, reduce))


@in_python
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return, or inside a tf.function go on, when every rank of the set has called it.

    Raises NotInitializedError before init(), ValueError on a rank outside of the set, HorovodInternalError if a rank
    has left.
    """
    collectives.barrier(process_set)


@in_python
def join() -> Any:
    """Have no more work: take part in the other ranks' operations with zeros until all ranks have joined.

    For ranks with different numbers of batches: each calls it after its last step of an epoch, of which it has done one
    at least since hvd.init(). It takes part in allreduces, barriers and the steps of tapes and optimizers, those of its
    process sets too. Averages count all ranks, joined ones as zeros. It changes nothing on this rank, so the ranks'
    variables are no longer equal: `hvd.broadcast_variables(model.variables, root_rank=int(hvd.join()))` before training
    goes on.
    Returns the number of the rank that joined last, an int32 scalar. Raises NotInitializedError before init(), and
    HorovodInternalError if a rank leaves without joining; anything else that the others do meanwhile (allgather,
    broadcast, the first step of a model) fails on all of them.
    """
    engine.runtime("join()")

    def doing() -> list[Array]:
        return [np.array(join_ranks(), np.int32)]

    return run(doing, [], [(tf.int32, [])], "join()")[0]
