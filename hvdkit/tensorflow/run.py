"""A collective as an operation of TensorFlow: run at once in eager mode, in each execution of a tf.function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdkit.engine.groups import Group
from hvdkit.engine.named.operation import Operation
from hvdkit.engine.named.submit import Options
from hvdkit.engine.named.submit import do as do_operation
from hvdkit.tensorflow.tensors import NAMES, array_of, as_buffer, as_tensor
from hvdkit.tensorflow.tracing import call_in_graph, check_not_compiled, tensorflow_errors
from hvdkit.transport.buffer import Array

#: Gets this rank's arrays, which it must not write to; returns the results.
Doing = Callable[..., Sequence[Array]]
Shape = Sequence[int | None]


def run(doing: Doing, tensors: Sequence[Any], results: Sequence[tuple[Any, Shape]], call: str) -> list[Any]:
    """Run a collective.

    doing: the collective on arrays.
    tensors: its inputs.
    results: TensorFlow's dtype and shape of each result, as far as they are known.
    call: the user's.

    Raises the error from as_tensorflow_error(); in a graph an error of TensorFlow's with the same text.
    XlaError if XLA would compile it.
    """
    check_not_compiled(call)
    if tf.executing_eagerly():
        with tensorflow_errors():
            made = doing(*[array_of(tensor) for tensor in tensors])
        return [as_tensor(one, NAMES[dtype]) for one, (dtype, _) in zip(made, results, strict=True)]
    name = f"hvdkit_{call.removesuffix('()')}"
    found = call_in_graph(
        lambda *arrays: list(doing(*arrays)),
        list(tensors),
        [one for one, _ in results],
        name,
        coded_errors=bool(results),
    )
    if not results:
        return []
    for one, (_, shape) in zip(found, results, strict=True):
        one.set_shape(shape)
    return list(found)


def do(
    group: Group,
    kind: str,
    name: str | None,
    arrays: Sequence[Array],
    dtypes: Sequence[str],
    options: Options = (),
    splits: tuple[int, ...] = (),
) -> Operation:
    """Run a named operation, and wait for it.

    group: the ranks.
    kind: of the operation.
    name: of the operation; None to count the calls instead.
    arrays: of these dtypes; overwritten by some kinds (see Operation).
    dtypes: of the arrays.
    options: of the operation.
    splits: of an alltoall.
    """
    described = [(dtype, tuple(array.shape)) for array, dtype in zip(arrays, dtypes, strict=True)]
    buffers = [as_buffer(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
    operation = do_operation(group, kind, name, described, buffers, options, splits, wait=False)
    group.engine.wait(operation)
    return operation
