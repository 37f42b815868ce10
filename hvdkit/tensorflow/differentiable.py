"""Collectives with gradients: the forward operation and the backward operation of each, as for torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdkit.engine.groups import ProcessSet
from hvdkit.engine.reduce_op import Average, ReduceOp, Sum
from hvdkit.tensorflow import collectives
from hvdkit.tensorflow.naming import gradient_name, operation_name

Factors = tuple[float, float]
_PLAIN: Factors = (1.0, 1.0)


def _alike(grads: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    """Cast gradients to the dtypes of their tensors; TensorFlow makes some zeros of its own in float32."""
    return [tf.cast(grad, tensor.dtype) for grad, tensor in zip(grads, tensors, strict=True)]


def allreduce(
    tensors: Sequence[Any], name: str | None, op: ReduceOp, factors: Factors, process_set: ProcessSet, call: str
) -> list[Any]:
    """Forward: y = op(x of all ranks). Backward, for Sum and Average: dx = op(dy of all ranks)."""
    return _allreduce(tensors, operation_name("allreduce", name, process_set), op, factors, process_set, call)


def _allreduce(
    tensors: Sequence[Any], name: str | None, op: ReduceOp, factors: Factors, process_set: ProcessSet, call: str
) -> list[Any]:
    """As allreduce(), under a name from naming.py."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduce(*given: Any) -> Any:
        def backward(*grads: Any) -> Any:
            if op not in (Average, Sum):
                raise NotImplementedError(
                    f"{call} with op={op} has no gradient. Use op=hvd.Sum or hvd.Average, or tf.stop_gradient() on "
                    f"the tensor."
                )
            further = gradient_name("allreduce", "allreduce", name, process_set)
            return _allreduce(_alike(grads, given), further, op, factors, process_set, call)

        return collectives.allreduce(given, name, op, factors, process_set, call), backward

    return list(reduce(*tensors))


def allgather(tensors: Sequence[Any], name: str | None, process_set: ProcessSet, call: str) -> list[Any]:
    """Forward: y = concatenation of x of all ranks. Backward: this rank's rows of the average of dy over all ranks."""
    return _allgather(tensors, operation_name("allgather", name, process_set), process_set, call)


def _allgather(tensors: Sequence[Any], name: str | None, process_set: ProcessSet, call: str) -> list[Any]:
    """As allgather(), under a name from naming.py."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def gather(*given: Any) -> Any:
        gathered, counts = collectives.allgather(given, name, process_set, call)

        def backward(*grads: Any) -> Any:
            further = gradient_name("allreduce", "allgather", name, process_set)
            means = _allreduce(_alike(grads, given), further, Average, _PLAIN, process_set, call)
            rank = process_set.rank()
            made = []
            for mean, rows, tensor in zip(means, counts, given, strict=True):
                start = tf.reduce_sum(rows[:rank])
                made.append(tf.reshape(mean[start : start + rows[rank]], tf.shape(tensor)))
            return made

        return gathered, backward

    return list(gather(*tensors))


def broadcast(tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet, call: str) -> Any:
    """Forward: y = x of the root. Backward: on the root the average of dy over all ranks, on other ranks zero."""
    name = operation_name("broadcast", name, process_set)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def copy(given: Any) -> Any:
        def backward(grad: Any) -> Any:
            further = gradient_name("allreduce", "broadcast", name, process_set)
            (mean,) = _allreduce(_alike([grad], [given]), further, Average, _PLAIN, process_set, call)
            mine = (process_set.ranks or [])[process_set.rank()] == root_rank
            if mine:
                return mean
            with tf.control_dependencies([mean]):  # the zeros alone would leave this rank out of the operation
                return tf.zeros_like(mean)

        return collectives.broadcast([given], root_rank, name, process_set, call)[0], backward

    return copy(tensor)


def alltoall(tensor: Any, splits: Any, name: str | None, process_set: ProcessSet, call: str) -> tuple[Any, Any]:
    """Forward: rank i's j-th slice goes to rank j. Backward: the gradient of each slice returns to its rank."""
    return _alltoall(tensor, splits, operation_name("alltoall", name, process_set), process_set, call)


def _alltoall(tensor: Any, splits: Any, name: str | None, process_set: ProcessSet, call: str) -> tuple[Any, Any]:
    """As alltoall(), under a name from naming.py."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def exchange(given: Any) -> Any:
        made, received = collectives.alltoall(given, splits, name, process_set, call)

        def backward(grad: Any, _: Any) -> Any:
            further = gradient_name("alltoall", "alltoall", name, process_set)
            returned, _ = _alltoall(_alike([grad], [given])[0], received, further, process_set, call)
            missing = tf.size(given, tf.int32) - tf.size(returned, tf.int32)  # of rows that were sent to no rank
            flat = tf.pad(tf.reshape(returned, [-1]), [[0, missing]])
            return tf.reshape(flat, tf.shape(given))

        return (made, received), backward

    made, received = exchange(tensor)
    return made, received


def reducescatter(
    tensors: Sequence[Any], name: str | None, op: ReduceOp, factors: Factors, process_set: ProcessSet, call: str
) -> list[Any]:
    """Forward: this rank's rows of op(x of all ranks). Backward: dx = all ranks' dy, times size for a sum."""
    name = operation_name("reducescatter", name, process_set)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def scatter(*given: Any) -> Any:
        def backward(*grads: Any) -> Any:
            factor = factors[0] * factors[1] * (1 if op is Average else process_set.size())
            further = gradient_name("allgather", "reducescatter", name, process_set)
            gathered = _allgather(_alike(grads, given), further, process_set, call)
            return [one * tf.cast(factor, one.dtype) for one in gathered]

        return collectives.reducescatter(given, name, op, factors, process_set, call), backward

    return list(scatter(*tensors))
