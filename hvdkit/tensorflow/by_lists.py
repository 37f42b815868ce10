"""Gradients that a graph hands over list by list, while the rest of backward runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvdkit.tensorflow.tracing import call_in_graph
from hvdkit.transport.buffer import Array

#: Gets the arrays of a list by index, None for those that there are none of, and whether it is the step's first list.
Start = Callable[[Mapping[int, Array | None], bool], None]


def call_by_lists(
    lists: Sequence[Sequence[int]],
    gradients: Sequence[Any],
    dtypes: Sequence[Any],
    start: Start,
    finish: Callable[[], list[Array]],
    *,
    ahead: int | None = None,
) -> list[Any]:
    """Operations that call `start` with one list after the other, and one that then calls `finish` for the results.

    The memory of a gradient that nothing else uses is free when `start` lets go of its array.
    lists: of indices of `gradients`, in the order of all ranks. dtypes: of the results.
    ahead: so many lists of gradients are computed while `start` runs; None for as many as TensorFlow likes to.
    """
    before: list[Any] = []
    calls: list[Any] = []
    order = _Order()
    for number, indices in enumerate(lists):
        present = [index for index in indices if gradients[index] is not None]
        given = [gradients[index] for index in present]
        if ahead is not None and number > ahead:
            order.put_after(calls[number - ahead - 1], given)
        with tf.control_dependencies(before):  # buckets start in plan order on all ranks
            call = _starter(start, indices, present, first=not before)
            before = [call_in_graph(call, given, [], "hvdkit_start")]
        calls += before
    with tf.control_dependencies(before):
        results = call_in_graph(finish, [], list(dtypes), "hvdkit_finish")
    return list(results) if dtypes else []


def _starter(start: Start, indices: Sequence[int], present: Sequence[int], *, first: bool) -> Callable[..., Any]:
    def call(*arrays: Array) -> list[Any]:
        given = dict(zip(present, arrays, strict=True))
        start({index: given.get(index) for index in indices}, first)
        return []

    return call


class _Order:
    """Has operations of a graph that is being traced wait for others, where those do not need them themselves.

    TensorFlow runs what is ready in any order: all of backward's long chain, say, before the gradients beside it.
    """

    def __init__(self) -> None:
        self._needed: set[Any] = set()  # names of what must run before the operations that others were put after

    def put_after(self, operation: Any, tensors: Sequence[Any]) -> None:
        """Compute these after the operation. To be called for operations in the order in which they run."""
        self._add_needed(operation)
        for tensor in tensors:
            made_by = tensor.op
            if made_by.graph is operation.graph and made_by.inputs and made_by.name not in self._needed:
                made_by._add_control_input(operation)

    def _add_needed(self, operation: Any) -> None:
        left = [operation]
        while left:
            one = left.pop()
            if one.name not in self._needed:
                self._needed.add(one.name)
                left += [*(tensor.op for tensor in one.inputs), *one.control_inputs]
