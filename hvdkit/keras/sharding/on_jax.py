"""Sharded state on the JAX backend: reduced and gathered by calls from within the compiled step.

The methods of ShardDriver run while a step is traced; the functions named run are what the program calls in each step.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import io_callback

from hvdkit.engine.planned.plan import TensorSpec
from hvdkit.engine.sharding.arrays import ShardedArrays
from hvdkit.engine.sharding.tensor_ranges import TensorRange
from hvdkit.errors import HorovodInternalError
from hvdkit.keras.backends import settle
from hvdkit.keras.jax_in_place import InPlace, address_of, check_in_place, keep_results, trace_in_order, works
from hvdkit.keras.settings import check_shape
from hvdkit.keras.sharding.drivers import ShardDriver, TrainedVariables
from hvdkit.transport.buffer import STORAGE, Array


class JaxShards(ShardDriver):
    """See ShardDriver. Data on a GPU goes through host memory."""

    def __init__(self, trained: TrainedVariables) -> None:
        settle()
        self._tensors, self._variables = trained.tensors, trained.variables
        self._add, self._early = trained.add, trained.early
        self.arrays = trained.open(compute_threads=os.cpu_count() or 1)
        self._scatters: dict[tuple[frozenset[int], bool], _Scatter] = {}  # by the gradients, and whether in lists
        self._gather = InPlace(self._run_gather)

    def make_piece(self, piece: TensorRange, name: str) -> Any:
        """See ShardDriver.make_piece."""
        dtype = self._tensors[piece.tensor].dtype
        return keras.Variable(np.zeros(piece.count), dtype=dtype, trainable=False, name=name)

    def refresh(self, pieces: Sequence[Any]) -> None:
        """See ShardDriver.refresh."""
        for piece, variable in zip(self.arrays.pieces, pieces, strict=True):
            flat = jnp.reshape(self._variables[piece.tensor].value, (-1,))
            variable.assign(flat[piece.elements])

    def scatter(self, gradients: Sequence[Any]) -> list[Any]:
        """See ShardDriver.scatter. The program determines which gradients exist: the same on all ranks."""
        present = frozenset(index for index, gradient in enumerate(gradients) if gradient is not None)
        in_lists = self._early and works() and any(isinstance(gradient, jax.core.Tracer) for gradient in gradients)
        if (present, in_lists) not in self._scatters:
            lists = (
                self.arrays.plan.divide_tensors(present) if in_lists else [list(reversed(range(len(self._tensors))))]
            )
            self._scatters[present, in_lists] = _Scatter(self.arrays, self._tensors, present, lists)
        pieces = self.arrays.pieces
        wanted = [index for index, piece in enumerate(pieces) if piece.tensor in present]
        dtypes = [self._tensors[pieces[index].tensor].dtype for index in wanted]
        kinds = [
            jax.ShapeDtypeStruct((pieces[index].count,), dtype) for index, dtype in zip(wanted, dtypes, strict=True)
        ]
        for index in present:
            check_shape(self._tensors[index].name, gradients[index].shape, self._tensors[index].shape)
        inputs = {index: gradients[index].astype(self._tensors[index].dtype) for index in present}
        scattered: list[Any] = [None] * len(pieces)
        for index, result in zip(wanted, self._scatters[present, in_lists].trace(inputs, kinds), strict=True):
            scattered[index] = result
        return scattered

    def gather(self, pieces: Sequence[Any], due: Any) -> None:
        """See ShardDriver.gather."""
        kinds = [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in self._tensors]
        own = [one.value for one in pieces]
        if due is True:
            wholes = trace_in_order([self._gather], [own], kinds)
        else:
            now = [one.value for one in self._variables]
            wholes = jax.lax.cond(due, lambda: trace_in_order([self._gather], [own], kinds), lambda: now)
        for variable, whole in zip(self._variables, wholes, strict=True):
            variable.assign(whole)

    def _run_gather(self, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        self.arrays.gather([_flat(array) for array in arrays], [_flat(result) for result in results])

    def sum(self, numbers: Any) -> Any:
        """See ShardDriver.sum."""

        def run_sum(array: Any) -> Array:
            total = np.array(array)
            self._add(total)
            return total

        return io_callback(run_sum, jax.ShapeDtypeStruct(numbers.shape, np.float32), numbers, ordered=True)


class _Scatter:
    """Calls that reduce the gradients in `present`, one call per list: afterwards XLA may reuse the list's memory.

    lists: see Plan.divide_tensors(). A tensor is passed to calls of later lists too, as long as it is still read.
    """

    def __init__(
        self,
        arrays: ShardedArrays,
        tensors: Sequence[TensorSpec],
        present: frozenset[int],
        lists: Sequence[Sequence[int]],
    ) -> None:
        self._arrays, self._tensors, self._present, self._lists = arrays, tensors, present, lists
        until = arrays.plan.lists_of_last_use(lists, arrays.depth)
        self._read = [
            [index for before in lists[: number + 1] for index in before if until[index] >= number and index in present]
            for number in range(len(lists))
        ]
        runs = [functools.partial(self._run, number) for number in range(len(lists))]
        self._addresses: dict[int, int] = {}  # of the step's gradients, by index
        self._calls = [InPlace(run if not number else keep_results(run)) for number, run in enumerate(runs)]

    def trace(self, gradients: Mapping[int, Any], kinds: Sequence[jax.ShapeDtypeStruct]) -> list[Any]:
        """Return the gradients of this rank's slices of tensors in `present`, as values of the program being traced."""
        return trace_in_order(self._calls, [[gradients[index] for index in read] for read in self._read], kinds)

    def _run(self, number: int, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        if not number:
            self._addresses.clear()
            places = iter(results)
            self._arrays.begin(
                [
                    _flat(next(places))
                    if piece.tensor in self._present
                    else np.empty(piece.count, STORAGE[self._tensors[piece.tensor].dtype])
                    for piece in self._arrays.pieces
                ]
            )
        given = dict(zip(self._read[number], map(_flat, arrays), strict=True))
        for index, array in given.items():  # buckets may read it until a later call
            check_in_place(self._addresses.setdefault(index, address_of(array)), array)
        for index in self._lists[number]:
            self._arrays.arrived(index, given.get(index))
        if number == len(self._lists) - 1:
            self._finish()

    def _finish(self) -> None:
        unused = self._arrays.finish()
        lost = sorted({*range(len(self._tensors))} - self._present - {*unused})
        if lost:
            raise HorovodInternalError(
                f"Other ranks have a gradient of {self._tensors[lost[0]].name} in this step, but the program of this "
                f"rank was compiled without it. Compute a gradient of every variable on every rank."
            )


def _flat(array: Array) -> Array:
    storage = STORAGE[array.dtype.name]
    flat = array.reshape(-1)
    return flat if flat.dtype == storage else flat.view(storage)
