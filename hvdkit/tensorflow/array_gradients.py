"""Reduction of dense gradients by a strategy in host memory: in eager mode, and as operations of a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvdkit.engine.array_sync import ArraySync
from hvdkit.engine.gradient_hook import GradientHook
from hvdkit.engine.groups import Group
from hvdkit.engine.planned.plan import Plan, TensorSpec
from hvdkit.engine.strategy import Strategy
from hvdkit.errors import BackwardInterruptedError
from hvdkit.tensorflow.by_lists import call_by_lists
from hvdkit.tensorflow.result_memory import ResultMemory
from hvdkit.tensorflow.tensors import array_of, as_tensor, empty_tensor, flat_storage
from hvdkit.tensorflow.tracing import call_in_graph, check_nothing_dropped
from hvdkit.tensorflow.variables import VariableSpec
from hvdkit.transport.buffer import Array

_OR_AT_ONCE = (
    "Or gradients of the same variables are being reduced twice at once: by two calls of one tf.function in one run of "
    "a session, or in two threads. Have one wait for the other (tf.control_dependencies), or make two tf.functions of "
    "different names for a session."
)


class ArrayGradients:
    """The dense gradients of one list of variables; all ranks construct it together.

    group: the ranks.
    specs: of the variables.
    strategy: reduces the gradients.
    read_values: reads the variables' values, also while a graph is traced or runs, for a strategy with uses_values.

    Raises PlanMismatchError if the variables differ between ranks.
    """

    def __init__(
        self,
        group: Group,
        specs: Sequence[VariableSpec],
        strategy: Strategy,
        read_values: Callable[[], Sequence[Any]],
    ) -> None:
        self._specs, self._overlaps = list(specs), strategy.overlaps_backward
        self._read_values = read_values if strategy.uses_values else tuple
        tensors = [TensorSpec(spec.name, _count(spec.shape), spec.dtype, shape=spec.shape) for spec in specs]
        threads = tf.config.threading.get_intra_op_parallelism_threads()
        self._sync = ArraySync(group, tensors, strategy, compute_threads=threads, values=self._values())
        shapes, dtypes = [spec.shape for spec in specs], [spec.dtype for spec in specs]
        self._results = ResultMemory(shapes, dtypes)
        self._new_values = ResultMemory(shapes, dtypes)

    def set_gradient_hook(self, hook: GradientHook) -> None:
        """Set the object that takes part in each step, in place of an earlier one."""
        self._sync.gradient_hook = hook

    def _values(self) -> list[Array]:
        return [self._flat(index, array_of(value)) for index, value in enumerate(self._read_values())]

    def reduce_eagerly(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the optimizer's gradients; None if no rank has one, and the others' gradient if only they have one."""
        with self._sync.one_step.part(self, first=True, last=True):
            self._results.begin()
            arrays = [None if one is None else self._flat(index, array_of(one)) for index, one in enumerate(gradients)]
            unused = self._sync.reduce(arrays, self._results, self._values())
            return [
                None if index in unused else as_tensor(self._results.take(index), spec.dtype)
                for index, spec in enumerate(self._specs)
            ]

    def reduce_in_graph(
        self, gradients: Sequence[Any], wanted: Sequence[int], find: Callable[[], ArrayGradients]
    ) -> list[Any]:
        """Return the same for the gradients in `wanted`, None for others; zeros if no rank has a gradient.

        find: when the graph runs, returns the present world's object in place of this one.
        """
        present = {index for index, gradient in enumerate(gradients) if gradient is not None}
        plan = self._sync.plan if self._overlaps else Plan((), ())
        lists = plan.divide_tensors(present) if plan.buckets else [list(range(len(gradients)))]
        dtypes = [tf.as_dtype(self._specs[index].dtype) for index in wanted]
        results = call_by_lists(
            lists,
            gradients,
            dtypes,
            lambda arrays, first: find()._start(find, arrays, first=first),
            lambda: find()._finish(find, wanted),
        )
        reduced: list[Any] = [None] * len(gradients)
        for index, result in zip(wanted, results, strict=True):
            result.set_shape(self._specs[index].shape)
            reduced[index] = result
        return reduced

    def _start(self, program: object, arrays: Mapping[int, Array | None], *, first: bool) -> None:
        sync = self._sync
        with sync.one_step.part(program, first=first, last=False):
            if first:
                try:
                    sync.begin(self._results, self._values())
                except BackwardInterruptedError as error:
                    raise BackwardInterruptedError(f"{error} {_OR_AT_ONCE}") from error
                self._results.begin()
            for index, array in arrays.items():
                sync.arrived(index, None if array is None else self._flat(index, array))

    def _finish(self, program: object, wanted: Sequence[int]) -> list[Array]:
        with self._sync.one_step.part(program, first=False, last=True):
            unused = self._sync.finish(self._values())
            check_nothing_dropped([spec.name for spec in self._specs], wanted, unused)
            for index in {*wanted} & {*unused}:
                self._results.take(index)[...] = 0
            return [self._results.take(index) for index in wanted]

    def after_step_eagerly(self, values: Sequence[Any]) -> list[Any]:
        """Return the variables' new values. values: those that the optimizer has computed."""
        self._new_values.begin()
        results = [self._new_values.take(index) for index in range(len(values))]
        self._after_step([array_of(value) for value in values], results)
        return [as_tensor(result, spec.dtype) for result, spec in zip(results, self._specs, strict=True)]

    def after_step_in_graph(self, values: Sequence[Any], find: Callable[[], ArrayGradients]) -> list[Any]:
        """Return the same when the graph runs."""
        # One-dimensional: a function gets a scalar as a number, not as memory.
        memory, count = [empty_tensor((_count(spec.shape),), spec.dtype) for spec in self._specs], len(values)
        results: list[Any] = call_in_graph(
            lambda *arrays: find()._after_step(arrays[:count], arrays[count:]),
            [*values, *memory],
            [value.dtype for value in values],
            "hvdkit_after_step",
        )
        return [tf.reshape(result, spec.shape) for result, spec in zip(results, self._specs, strict=True)]

    def _after_step(self, values: Sequence[Array], results: Sequence[Array]) -> list[Array]:
        """Fill the arrays of the results."""
        flat = [self._flat(index, value) for index, value in enumerate(values)]
        targets = [flat_storage(array, spec.dtype) for array, spec in zip(results, self._specs, strict=True)]
        self._sync.after_step(flat, targets)
        return list(results)

    def change_values(self, change: Callable[[], None], values: Sequence[Any]) -> list[Any]:
        """Return the values that `change` makes of the variables, outside of a step; see ArraySync.change_values."""
        self._new_values.begin()
        flat = [self._flat(index, array_of(value)) for index, value in enumerate(values)]
        self._sync.change_values(change, flat, self._new_values)
        return [as_tensor(self._new_values.take(index), spec.dtype) for index, spec in enumerate(self._specs)]

    def _flat(self, index: int, array: Array) -> Array:
        spec = self._specs[index]
        if array.shape != spec.shape:
            raise ValueError(f"The gradient of {spec.name} has shape {array.shape}, but the variable has {spec.shape}.")
        return flat_storage(array, spec.dtype)

    def close(self) -> None:
        """Free the memory that the strategy has allocated; collective."""
        self._sync.close()


def _count(shape: Sequence[int]) -> int:
    return tf.TensorShape(shape).num_elements() or 0
