"""Sharded state on the TensorFlow backend: reduced and gathered by operations of the step's graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdkit.engine.one_step import OneStep
from hvdkit.engine.sharding.tensor_ranges import TensorRange
from hvdkit.errors import HorovodInternalError
from hvdkit.keras.settings import check_shape
from hvdkit.keras.sharding.drivers import ShardDriver, TrainedVariables
from hvdkit.tensorflow.by_lists import call_by_lists
from hvdkit.tensorflow.result_memory import ResultMemory
from hvdkit.tensorflow.tensors import array_of, as_tensor, empty_tensor, flat_storage
from hvdkit.tensorflow.tracing import call_in_graph, check_not_compiled, check_nothing_dropped, in_python
from hvdkit.transport.buffer import Array

#: Number of lists whose gradients exist at once, besides the list that is being sent.
_AHEAD = 1


class TensorflowShards(ShardDriver):
    """See ShardDriver."""

    def __init__(self, trained: TrainedVariables) -> None:
        self._tensors, self._variables, tensors = trained.tensors, trained.variables, trained.tensors
        self._add, self._early = trained.add, trained.early
        threads = tf.config.threading.get_intra_op_parallelism_threads()
        self.arrays = trained.open(compute_threads=threads)
        self._one_step = OneStep([tensor.name for tensor in tensors])
        self._dtypes = [tensors[piece.tensor].dtype for piece in self.arrays.pieces]
        self._results = ResultMemory([(piece.count,) for piece in self.arrays.pieces], self._dtypes)
        self._wholes = ResultMemory([tuple(one.shape) for one in tensors], [one.dtype for one in tensors])

    def make_piece(self, piece: TensorRange, name: str) -> Any:
        """See ShardDriver.make_piece."""
        with tf.init_scope():
            dtype = self._tensors[piece.tensor].dtype
            return keras.Variable(np.zeros(piece.count), dtype=dtype, trainable=False, name=name)

    @in_python
    def refresh(self, pieces: Sequence[Any]) -> None:
        """See ShardDriver.refresh."""
        for piece, variable in zip(self.arrays.pieces, pieces, strict=True):
            flat = tf.reshape(self._variables[piece.tensor], [-1])
            variable.assign(flat[piece.elements])

    @in_python
    def scatter(self, gradients: Sequence[Any]) -> list[Any]:
        """See ShardDriver.scatter. In a graph, a gradient that only other ranks have is an error of the step."""
        check_not_compiled("DistributedOptimizer(shard=...)")
        given = [
            None if gradient is None else tf.cast(gradient, tensor.dtype)
            for gradient, tensor in zip(gradients, self._tensors, strict=True)
        ]
        pieces = self.arrays.pieces
        if tf.executing_eagerly():
            for first, index in enumerate(reversed(range(len(given)))):
                array, given[index] = None if given[index] is None else array_of(given[index]), None
                self._start(given, {index: array}, first=not first)
            unused, arrays = self._finish(given, range(len(pieces)))
            return [
                None if piece.tensor in unused else as_tensor(array, dtype)
                for piece, array, dtype in zip(pieces, arrays, self._dtypes, strict=True)
            ]
        present, find = {index for index, gradient in enumerate(given) if gradient is not None}, _finder(self)
        wanted = [index for index, piece in enumerate(pieces) if piece.tensor in present]
        dtypes = [tf.as_dtype(self._dtypes[index]) for index in wanted]

        def finish() -> list[Array]:
            driver = find()
            unused, arrays = driver._finish(find, wanted)
            check_nothing_dropped([tensor.name for tensor in driver._tensors], present, unused)
            return arrays

        results = call_by_lists(
            self.arrays.plan.divide_tensors(present) if self._early else [list(reversed(range(len(given))))],
            given,
            dtypes,
            lambda arrays, first: find()._start(find, arrays, first=first),
            finish,
            ahead=_AHEAD,
        )
        scattered: list[Any] = [None] * len(pieces)
        for index, result in zip(wanted, results, strict=True):
            result.set_shape((pieces[index].count,))
            scattered[index] = result
        return scattered

    def _start(self, program: object, arrays: Mapping[int, Array | None], *, first: bool) -> None:
        with self._one_step.part(program, first=first, last=False):
            if first:
                self.arrays.begin(self._results)
                self._results.begin()
            for index, array in arrays.items():
                tensor = self._tensors[index]
                if array is not None:
                    check_shape(tensor.name, array.shape, tensor.shape)
                self.arrays.arrived(index, None if array is None else flat_storage(array, tensor.dtype))

    def _finish(self, program: object, wanted: Sequence[int]) -> tuple[frozenset[int], list[Array]]:
        """Return the tensors that no rank has a gradient of, and these slices' results; zeros for such tensors."""
        with self._one_step.part(program, first=False, last=True):
            unused = frozenset(self.arrays.finish())
            for index, piece in enumerate(self.arrays.pieces):
                if piece.tensor in unused:
                    self._results.take(index)[...] = 0
            return unused, [self._results.take(index) for index in wanted]

    @in_python
    def gather(self, pieces: Sequence[Any], due: Any) -> None:
        """See ShardDriver.gather."""
        values = [tf.convert_to_tensor(variable) for variable in pieces]
        if tf.executing_eagerly():
            if not due:
                return
            self._wholes.begin()
            memory = [self._wholes.take(index) for index in range(len(self._tensors))]
            arrays = self._gather([array_of(value) for value in values], memory)
            wholes = [as_tensor(array, tensor.dtype) for array, tensor in zip(arrays, self._tensors, strict=True)]
        else:
            find, dtypes = _finder(self), [tf.as_dtype(tensor.dtype) for tensor in self._tensors]

            def run() -> list[Any]:
                # One-dimensional: a function gets a scalar as a number, not as memory.
                memory, count = [empty_tensor((tensor.count,), tensor.dtype) for tensor in self._tensors], len(values)
                results: list[Any] = call_in_graph(
                    lambda *arrays: find()._gather(arrays[:count], arrays[count:]),
                    [*values, *memory],
                    dtypes,
                    "hvdkit_gather",
                )
                return [tf.reshape(one, tensor.shape) for one, tensor in zip(results, self._tensors, strict=True)]

            now = [tf.convert_to_tensor(variable) for variable in self._variables]
            wholes = run() if due is True else tf.cond(due, run, lambda: now)
        for variable, whole in zip(self._variables, wholes, strict=True):
            variable.assign(whole)

    def _gather(self, pieces: Sequence[Array], wholes: Sequence[Array]) -> list[Array]:
        """Fill the arrays of the variables with all ranks' slices."""
        flat = [flat_storage(array, dtype) for array, dtype in zip(pieces, self._dtypes, strict=True)]
        targets = [flat_storage(array, tensor.dtype) for array, tensor in zip(wholes, self._tensors, strict=True)]
        self.arrays.gather(flat, targets)
        return list(wholes)

    @in_python
    def sum(self, numbers: Any) -> Any:
        """See ShardDriver.sum."""
        find = _finder(self)

        def run(array: Array) -> list[Array]:
            total = np.array(array)
            find()._add(total)
            return [total]

        if tf.executing_eagerly():
            return tf.constant(run(numbers.numpy())[0])
        (total,) = call_in_graph(run, [numbers], [tf.float32], "hvdkit_norms")
        total.set_shape(numbers.shape)
        return total


def _finder(driver: TensorflowShards) -> Callable[[], TensorflowShards]:
    """Return a function that finds the driver when a graph runs; TensorFlow keeps it, but not the driver, for ever."""
    held = weakref.ref(driver)

    def find() -> TensorflowShards:
        found = held()
        if found is None:
            raise HorovodInternalError(
                "The DistributedOptimizer that this tf.function was traced with no longer exists. Keep a reference to "
                "the optimizer, or create a new tf.function."
            )
        return found

    return find
