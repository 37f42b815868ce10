"""Collectives of Horovod's TensorFlow 2 API: its names, arguments and meanings.

The collectives work in eager mode, inside a tf.function (they run each time that it runs, in the order of tracing), and
in a graph for tf.compat.v1.Session (they run in any order; barrier() runs at once, when it is called).

Tensors have a dtype that allreduce() takes, or float8 where nothing is reduced. Variables are accepted as tensors.
name: of the operation, the same on all ranks; without a name, eager calls of one kind are matched in the order of the
calls, those of a function or graph by their number in it, see naming.py.
process_set: the ranks that take part; each of them makes the same call.
device_dense, device_sparse, ignore_name_scope: accepted as in Horovod, and ignored.

Errors that are raised at once: NotInitializedError before init(), ValueError on a rank outside of the set and for
invalid arguments, TypeError for a dtype that cannot be sent, XlaError inside a function with jit_compile=True. If the
ranks disagree, or a rank has left, every rank raises HorovodInternalError. As in Horovod these are also errors of
TensorFlow, and a failing graph raises the same errors with the same text: tf.errors.FailedPreconditionError if the
ranks disagree and before
init(), InvalidArgumentError for a ValueError, UnknownError if a rank has left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.engine import runtime as engine
from hvdkit.engine.basics import join_ranks
from hvdkit.engine.compression import Factors, reduce_compressed
from hvdkit.engine.groups import ProcessSet, global_process_set, group_of
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

    tensor: any shape; shape and dtype the same on all ranks. dtype: uint8 int8 uint16 int16 uint32 int32 uint64 int64
    float16 bfloat16 float32 float64; complex64 and complex128 except for Min and Max; bool for Min and Product (and),
    Max and Sum (or). float16 and bfloat16 are summed in float32. Sums of integers wrap on overflow; averages of
    integers are exact and drop the fraction. For tf.IndexedSlices the rows of all ranks are gathered; op must be Sum or
    Average, and no factor may be given (else NotImplementedError).
    average: Horovod's older argument; True for op=Average, False for op=Sum.
    compression: the dtype that is sent instead of float32 and float64.
    op: Average (the default), Sum, Min, Max, Product or, for floating-point dtypes, Adasum.
    prescale_factor: the tensor is multiplied by it before the reduction.
    postscale_factor: the result is multiplied by it after the reduction.
    The other arguments, and the errors of all collectives: see the docstring of hvdkit.tensorflow.ops.
    Differentiable for Average and Sum: the gradient is reduced in the same way.

    Raises ValueError for both `average` and `op`, TypeError for a dtype that cannot be reduced with this op,
    HorovodInternalError on every rank if shapes, dtypes, ops or factors differ between ranks.
    """
    chosen, factors = choose_op(average, op), (prescale_factor, postscale_factor)
    if isinstance(tensor, tf.IndexedSlices):
        return _gather_slices([tensor], chosen, factors, process_set, "allreduce()")[0]
    return _reduce(autograd.allreduce, [tensor], compression, name, chosen, factors, process_set, "allreduce()")[0]


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
    """Reduce several tensors as one operation, which starts when all ranks have called it.

    tensors: of any shapes and dtypes, also IndexedSlices; the same list on all ranks.
    The other arguments, and what it raises: as for allreduce(). Returns the list of results.
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
        reduced = _reduce(
            autograd.allreduce, [tensors[at] for at in dense], compression, name, chosen, factors, process_set, call
        )
        results = _put(results, dense, reduced)
    return results


def _put(results: list[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    found = dict(zip(places, values, strict=True))
    return [found.get(at, one) for at, one in enumerate(results)]


def _reduce(
    collective: Callable[..., list[Any]],
    tensors: Sequence[Any],
    compression: Narrow,
    name: str | None,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
    call: str,
) -> list[Any]:
    given = [tf.convert_to_tensor(tensor) for tensor in tensors]
    size = group_of(process_set, call).transport.size

    def reduce(tensors: Sequence[Any], op: ReduceOp, factors: Factors) -> Sequence[Any]:
        return collective(tensors, name, op, factors, process_set, call)

    return list(reduce_compressed(compression, given, op, factors, size, reduce))


def _gather_slices(
    slices: Sequence[Any], op: ReduceOp, factors: tuple[float, float], process_set: ProcessSet, call: str
) -> list[Any]:
    if op not in (Average, Sum):
        raise NotImplementedError(
            f"{call} with op={op} does not take tf.IndexedSlices. Use op=hvd.Sum or hvd.Average, or "
            f"tf.convert_to_tensor()."
        )
    if factors != (1.0, 1.0):
        raise NotImplementedError(
            f"{call} does not take prescale_factor or postscale_factor with tf.IndexedSlices. Remove them, or use "
            f"tf.convert_to_tensor()."
        )
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

    tensor: shape (n, ...). n may differ between ranks and may be 0; the other dimensions and the dtype must be the same
    on all ranks. A scalar counts as shape (1,). dtype: any that allreduce() takes, or a float8.
    Returns a tensor of shape (sum of all n, ...) and the same dtype.
    Differentiable: each rank gets the average over ranks of the gradients of its rows, as in Horovod.

    Raises HorovodInternalError on every rank if dtypes or dimensions after the first differ between ranks, or a rank
    has joined; for the other errors see the docstring of hvdkit.tensorflow.ops.
    """
    return autograd.allgather([tf.convert_to_tensor(tensor)], name, process_set, "allgather()")[0]


@in_python
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gather several tensors as one operation, each as allgather() does; returns the list of results.

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
    """Send the tensor of rank root_rank to all ranks; returns a new tensor.

    tensor: any shape and any dtype that allreduce() takes, both the same on all ranks.
    root_rank: a rank of the whole job, also for a process set.
    Differentiable: the root gets the average of the gradients, as in Horovod; the other ranks get zeros.

    Raises ValueError for a root that is not in the set, HorovodInternalError on every rank if shapes, dtypes or roots
    differ between ranks, or a rank has joined.
    """
    return autograd.broadcast(tf.convert_to_tensor(tensor), root_rank, name, process_set, "broadcast()")


@in_python
def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Overwrite variables with those of rank root_rank, as one operation, and return their new values.

    variables: of TensorFlow or Keras, the same list on all ranks. Shapes, dtypes and what it raises: as broadcast().
    """
    given = [tf.convert_to_tensor(variable) for variable in variables]
    if not given:
        return []
    name = operation_name("broadcast", name, process_set)
    values = collectives.broadcast(given, root_rank, name, process_set, "broadcast_()")
    assigned = [variable.assign(value) for variable, value in zip(variables, values, strict=True)]
    # A session runs only operations that its results need.
    return [tf.convert_to_tensor(one) for one in assigned] if in_session() else values


@in_python
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send each rank its rows of the tensor, and return the received rows in rank order.

    tensor: shape (n, ...); the other dimensions and the dtype must be the same on all ranks; any dtype that allreduce()
    takes.
    splits: the number of rows for each rank, shape (size,), a list or tensor of integers. None: equal numbers; n must
    then be a multiple of the number of ranks.
    The other arguments: see the docstring of hvdkit.tensorflow.ops.

    Returns the received rows. If `splits` is given, returns a tuple of them and of the number of rows from each rank,
    an int32 tensor of shape (size,).
    Differentiable: the gradient of each row is sent back to the rank that the row came from.

    Raises ValueError for splits that are not integers or whose sum exceeds n, HorovodInternalError on every rank if
    dtypes or dimensions after the first differ between ranks, or a rank has joined.
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
    """Reduce a tensor over all ranks; each rank gets its rows of the result.

    tensor: shape (n, ...); shape and dtype the same on all ranks; any dtype that allreduce() takes. Rank i gets
    n // size rows, and one more if i < n % size.
    op: Average or Sum.
    The other arguments: as for allreduce().
    Differentiable: the gradients of all rows are gathered.

    Raises ValueError for a scalar, NotImplementedError for another op, TypeError for a dtype that cannot be reduced
    with this op, HorovodInternalError on every rank if shapes, dtypes, ops or factors differ between ranks, or a rank
    has joined.
    """
    factors = (prescale_factor, postscale_factor)
    return _reduce(autograd.reducescatter, [tensor], compression, name, op, factors, process_set, "reducescatter()")[0]


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

    tensors: the same list on all ranks.
    The other arguments, shapes, dtypes and what it raises: as for reducescatter().
    """
    if not tensors:
        return tensors
    factors = (prescale_factor, postscale_factor)
    return _reduce(
        autograd.reducescatter, tensors, compression, None, op, factors, process_set, "grouped_reducescatter()"
    )


@in_python
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank of the process set has called barrier(), also inside a tf.function.

    Raises NotInitializedError before init(), ValueError on a rank outside of the set, HorovodInternalError if a rank
    has left.
    """
    collectives.barrier(process_set)


@in_python
def join() -> Any:
    """Contribute zeros to the operations of the other ranks until all ranks have called join().

    For ranks with different numbers of batches: each rank calls it after its last step of an epoch; it must have done
    at least one step since hvd.init(). A joined rank takes part in allreduces, barriers and steps of tapes and
    optimizers, also in its process sets. Averages still divide by the number of all ranks. A joined rank keeps its
    variables, so they differ between ranks afterwards. Before you continue, call
    `hvd.broadcast_variables(model.variables, root_rank=int(hvd.join()))`.

    Returns the rank that joined last, an int32 scalar. Raises NotInitializedError before init(), HorovodInternalError
    if a rank leaves without joining. Other operations (allgather, broadcast, the first step of a model) fail on all
    ranks while a rank has joined.
    """
    engine.runtime("join()")

    def doing() -> list[Array]:
        return [np.array(join_ranks(), np.int32)]

    return run(doing, [], [(tf.int32, [])], "join()")[0]
