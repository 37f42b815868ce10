"""Sparse gradients, as of embeddings: the rows of all ranks, concatenated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.engine.api import Engine
from hvdkit.engine.groups import ProcessSet
from hvdkit.engine.named.operation import Action
from hvdkit.engine.named.submit import collective_step
from hvdkit.tensorflow.tensors import aligned_array, array_of, as_buffer, as_tensor, shaped
from hvdkit.tensorflow.tracing import call_in_graph
from hvdkit.tensorflow.variables import VariableSpec
from hvdkit.tensorflow.world_ops import size_op
from hvdkit.transport.api import Transport
from hvdkit.transport.buffer import Array
from hvdkit.transport.small_collectives import gather_ints

_KIND = "sparse_gradients"  # see joining.WITH_ACTION


def reduce_slices(
    process_set: ProcessSet,
    name: str,
    slices: Any,
    like: VariableSpec,
    *,
    average: bool,
    wanted: bool,
    ready: Callable[[], None],
) -> Any:
    """Gather the ranks' IndexedSlices of one variable; collective. A graph queries the ranks each time it runs.

    process_set: the ranks that take part.
    name: of the variable, the same on all ranks, and different for variables that are gathered at the same time.
    slices: None counts as no rows.
    like: the variable.
    average: divide by the number of ranks.
    wanted: whether the caller, inside a graph, can use a result.
    ready: called before the ranks synchronize.

    Returns IndexedSlices of all ranks' rows, divided by the number of ranks for an average; their indices may repeat.
    None if no rank gave rows, or inside a graph that wants no result.
    """
    if slices is None:
        values = tf.zeros((0, *like.shape[1:]), like.dtype)
        indices = tf.zeros(0, tf.int64)
    else:
        indices = tf.cast(slices.indices, tf.int64)
        values = slices.values
        if average:
            values /= tf.cast(size_op(process_set.process_set_id or 0), values.dtype)

    def gather(given_indices: Array, given_values: Array) -> list[Array]:
        ready()
        act = functools.partial(_gather, like, given_indices, given_values)
        engine = process_set.group("The reduction of gradients").engine
        found: list[Array] = collective_step(engine, _KIND, act, name=name)
        return found

    if tf.executing_eagerly():
        found = gather(array_of(indices), array_of(values))
        if slices is None and not found[0].size:
            return None
        rows, all_values = tf.convert_to_tensor(found[0]), as_tensor(found[1], like.dtype)
    else:
        rows, all_values = call_in_graph(gather, [indices, values], [tf.int64, values.dtype], "hvdkit_gather_rows")
        rows.set_shape([None])
        all_values.set_shape([None, *like.shape[1:]])
        if not wanted:
            return None
    return tf.IndexedSlices(all_values, rows, tf.constant(like.shape, tf.int64))


def take_part_when_joined(engine: Engine, name: str, like: VariableSpec) -> None:
    """Let this rank take part in reduce_slices() of the others without rows, while it waits in join()."""
    none = np.empty(0, np.int64), aligned_array((0, *like.shape[1:]), like.dtype)
    act: Action = functools.partial(_gather, like, *none)
    engine.joining.contributions[f"{_KIND}.{name}"] = lambda: act


def _gather(like: VariableSpec, indices: Array, values: Array, transport: Transport, _: Sequence[int]) -> list[Array]:
    width = int(np.prod(like.shape[1:], dtype=np.int64))
    rows = gather_ints(transport, indices.size)
    all_indices = transport.allgather(as_buffer(indices, "int64"), rows).array
    joined = transport.allgather(as_buffer(values, like.dtype), [count * width for count in rows])
    return [all_indices, shaped(joined, (sum(rows), *like.shape[1:]))]
