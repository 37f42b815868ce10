"""Gradients on the JAX backend: reduced by a call from within the compiled step."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from hvdkit.engine.planned.arrays import ArraySource
from hvdkit.engine.planned.plan import TensorSpec
from hvdkit.engine.planned.reducer import Statistics
from hvdkit.keras.jax_in_place import InPlace, works
from hvdkit.keras.settings import Settings, name_variables
from hvdkit.transport.buffer import STORAGE, Array


class JaxReducer:
    """See backends.Reducer. What is called is ordered, so that every rank does its collectives in the same order."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._plans: dict[tuple[int, ...], _Gradients] = {}

    def prepare(self, variables: Sequence[Any]) -> None:
        """See Reducer.prepare: here all gradients come at once."""

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """See Reducer.reduce. Which gradients there are is the same on all ranks, as it is part of the program."""
        there = [at for at, one in enumerate(gradients) if one is not None]
        if not there:
            return list(gradients)
        key = tuple(id(variables[at]) for at in there)
        if key not in self._plans:
            self._plans[key] = _Gradients(self._settings, [variables[at] for at in there])
        reduced = list(gradients)
        for at, one in zip(there, self._plans[key].reduce([gradients[at] for at in there]), strict=True):
            reduced[at] = one
        return reduced

    def reduce_window(self, gradients: Sequence[Any], variables: Sequence[Any], due: Callable[[], Any]) -> list[Any]:
        """See Reducer.reduce_window."""
        result: list[Any] = jax.lax.cond(
            due(), lambda given: self.reduce(given, variables), lambda given: given, list(gradients)
        )
        return result

    def agree(self, flag: Any) -> Any:
        """See Reducer.agree."""

        def ask(mine: Any) -> Any:
            return np.asarray(self._settings.agree(mine))

        return io_callback(ask, jax.ShapeDtypeStruct((), np.bool_), flag, ordered=True)

    def enter(self) -> None:
        """See Reducer.enter: programs that were compiled before make their plans anew."""

    def close(self) -> None:
        """See Reducer.close."""
        for plan in self._plans.values():
            plan.close()


class _Gradients:
    """The gradients of some variables; their plan is made by the first step that runs, which all ranks do together."""

    def __init__(self, settings: Settings, variables: Sequence[Any]) -> None:
        self._settings, self._names = settings, name_variables(variables)
        self._plan: ArraySource | None = None
        self._in_place = InPlace(self._reduce)

    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients of all ranks, as values of the program that is being traced."""
        if not works():
            shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in gradients]
            copied: list[Any] = io_callback(self._reduce_copies, shapes, *gradients, ordered=True)
            return copied
        # The call itself is in no order with others, so it goes between two that are.
        begun = io_callback(_begin, jax.ShapeDtypeStruct((), np.int32), ordered=True)
        reduced, done = self._in_place(gradients, begun)
        io_callback(_end, None, done, ordered=True)
        return reduced

    def _reduce_copies(self, *gradients: Any) -> list[Array]:
        arrays = [np.asarray(one) for one in gradients]
        results = [np.empty_like(array, order="C") for array in arrays]
        self._reduce(arrays, results)
        return results

    def _reduce(self, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        if self._plan is None:
            self._plan = self._open(arrays)
        self._plan.reduce([_flat(array) for array in arrays], [_flat(array) for array in results])

    def _open(self, arrays: Sequence[Array]) -> ArraySource:
        return ArraySource(
            self._settings.group,
            [
                TensorSpec(name, array.size, array.dtype.name, shape=array.shape)
                for name, array in zip(self._names, arrays, strict=True)
            ],
            options=self._settings.options,
            compute_threads=os.cpu_count() or 1,  # XLA computes with all of them
            statistics=Statistics(),
        )

    def close(self) -> None:
        """Free the buckets; collective."""
        if self._plan is not None:
            self._plan.close()
            self._plan = None


def _begin() -> Array:
    return np.zeros((), np.int32)


def _end(_: Any) -> None:
    pass


def _flat(array: Array) -> Array:
    flat = array.reshape(-1)
    storage = STORAGE[array.dtype.name]
    return flat if flat.dtype == storage else flat.view(storage)
