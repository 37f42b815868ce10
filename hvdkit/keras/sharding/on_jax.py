"""Pieces of variables on the JAX backend: reduced and gathered by calls from within the compiled step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import io_callback

from hvdkit.engine.groups import Group
from hvdkit.engine.planned.plan import TensorSpec
from hvdkit.engine.request import ReduceOptions
from hvdkit.engine.sharding.arrays import ShardedArrays
from hvdkit.engine.sharding.pieces import Piece
from hvdkit.errors import HorovodInternalError
from hvdkit.keras.backends import settle
from hvdkit.keras.jax_in_place import OrderedCall
from hvdkit.keras.sharding.drivers import Sum
from hvdkit.transport.buffer import STORAGE, Array


class JaxShards:
    """See ShardDriver. Numbers on a GPU go through the host's memory."""

    def __init__(
        self, group: Group, tensors: Sequence[TensorSpec], variables: Sequence[Any], options: ReduceOptions, add: Sum
    ) -> None:
        settle()
        self._tensors, self._variables, self._add = tensors, list(variables), add
        self.arrays = ShardedArrays(group, tensors, options, compute_threads=os.cpu_count() or 1)
        self._scatters: dict[tuple[int, ...], OrderedCall] = {}  # by the gradients that there are
        self._gather = OrderedCall(self._gather_now)

    def make_piece(self, piece: Piece, name: str) -> Any:
        """See ShardDriver.make_piece."""
        dtype = self._tensors[piece.tensor].dtype
        return keras.Variable(np.zeros(piece.count), dtype=dtype, trainable=False, name=name)

    def refresh(self, pieces: Sequence[Any]) -> None:
        """See ShardDriver.refresh."""
        for piece, variable in zip(self.arrays.pieces, pieces, strict=True):
            flat = jnp.reshape(self._variables[piece.tensor].value, (-1,))
            variable.assign(flat[piece.offset : piece.offset + piece.count])

    def scatter(self, gradients: Sequence[Any]) -> list[Any]:
        """See ShardDriver.scatter. Which gradients there are is part of the program, so the same on all ranks."""
        present = tuple(index for index, gradient in enumerate(gradients) if gradient is not None)
        if present not in self._scatters:
            self._scatters[present] = OrderedCall(lambda arrays, results: self._scatter_now(present, arrays, results))
        pieces, known = self.arrays.pieces, {*present}
        wanted = [index for index, piece in enumerate(pieces) if piece.tensor in known]
        dtypes = [self._tensors[piece.tensor].dtype for piece in pieces]
        inputs = [gradients[index].astype(self._tensors[index].dtype) for index in present]
        kinds = [jax.ShapeDtypeStruct((pieces[index].count,), dtypes[index]) for index in wanted]
        results = self._scatters[present](inputs, kinds)
        scattered: list[Any] = [None] * len(pieces)
        for index, result in zip(wanted, results, strict=True):
            scattered[index] = result
        return scattered

    def _scatter_now(self, present: Sequence[int], arrays: Sequence[Array], results: Sequence[Array]) -> None:
        gradients: list[Array | None] = [None] * len(self._tensors)
        for index, array in zip(present, arrays, strict=True):
            gradients[index] = _flat(array)
        known, places = {*present}, iter(results)
        targets = [
            _flat(next(places))
            if piece.tensor in known
            else np.empty(piece.count, STORAGE[self._tensors[piece.tensor].dtype])
            for piece in self.arrays.pieces
        ]
        unused = self.arrays.scatter(gradients, targets)
        lost = sorted({*range(len(self._tensors))} - known - {*unused})
        if lost:
            raise HorovodInternalError(
                f"Other ranks have a gradient of {self._tensors[lost[0]].name} in this step, but the program of this "
                f"rank was compiled without it. Compute a gradient of every variable on every rank."
            )

    def gather(self, pieces: Sequence[Any], due: Any) -> None:
        """See ShardDriver.gather."""
        kinds = [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in self._tensors]
        own = [one.value for one in pieces]
        if due is True:
            wholes = self._gather(own, kinds)
        else:
            now = [one.value for one in self._variables]
            wholes = jax.lax.cond(due, lambda: self._gather(own, kinds), lambda: now)
        for variable, whole in zip(self._variables, wholes, strict=True):
            variable.assign(whole)

    def _gather_now(self, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        self.arrays.gather([_flat(array) for array in arrays], [_flat(result) for result in results])

    def sum(self, numbers: Any) -> Any:
        """See ShardDriver.sum."""

        def run(array: Any) -> Array:
            total = np.array(array)
            self._add(total)
            return total

        return io_callback(run, jax.ShapeDtypeStruct(numbers.shape, np.float32), numbers, ordered=True)


def _flat(array: Array) -> Array:
    storage = STORAGE[array.dtype.name]
    flat = array.reshape(-1)
    return flat if flat.dtype == storage else flat.view(storage)
