"""Gradients that a graph passes on list by list, while the rest of backward runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvdkit.tensorflow.tracing import call_in_graph
from hvdkit.transport.buffer import Array

#: Gets the arrays of a list by index, None for missing gradients, and whether it is the step's first list.
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
    """Make operations that call `start` with each list in turn, and one that then calls `finish` for the results.

    The memory of a gradient without other uses is freed when `start` drops its array.

    lists: of indices of `gradients`, in the order of all ranks.
    gradients: of the graph.
    dtypes: of the results.
    start: begins the reduction of a list.
    finish: returns the results.
    ahead: number of lists whose gradients may be computed while `start` runs; None for any number.
    """
    before: list[Any] = []
    calls: list[Any] = []
    order = None if ahead is None else _Order()
    for number, indices in enumerate(lists):
        present = [index for index in indices if gradients[index] is not None]
        given = [gradients[index] for index in present]
        if order is not None and ahead is not None:
            order.put_after(calls[: max(0, number - ahead)][-1:], given)
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
    """Makes operations of the traced graph wait for others that they do not depend on.

    TensorFlow runs ready operations in any order: for example all of backward's long chain before the gradients.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()  # names of operations that others may need, and that must not wait
        # TensorFlow orders stateful operations by their creation.
        self._graph = tf.compat.v1.get_default_graph()
        self._take([one for one in self._graph.get_operations() if one._is_stateful])

    def put_after(self, before: Sequence[Any], tensors: Sequence[Any]) -> None:
        """Make operations for these tensors, and for no earlier call, wait for `before`."""
        fresh = self._take([tensor.op for tensor in tensors if tensor.graph is self._graph])
        names = {one.name for one in fresh}
        for one in fresh:
            if names.isdisjoint(needed.name for needed in _needed_by(one)):
                one._add_control_inputs(before)

    def _take(self, operations: Sequence[Any]) -> list[Any]:
        """Return these operations and their inputs that are not known yet, and record them as known."""
        left, fresh = list(operations), []
        while left:
            one = left.pop()
            if one.name not in self._known and (one.inputs or one.control_inputs):
                self._known.add(one.name)
                fresh.append(one)
                left += _needed_by(one)
        return fresh


def _needed_by(operation: Any) -> list[Any]:
    return [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
