"""Gradients on the JAX backend: reduced by a callback from within the compiled step."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from hvdkit.engine.array_plan import ArrayPlan
from hvdkit.engine.buckets import TensorSpec
from hvdkit.engine.planned import Statistics
from hvdkit.keras.settings import Settings, name_variables
from hvdkit.transport.base import STORAGE, Array


class JaxReducer:
    """See backends.Reducer. All callbacks are ordered, so that every rank does its collectives in the same order."""

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
        given = [gradients[at] for at in there]
        shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in given]
        reduced = list(gradients)
        for at, one in zip(there, io_callback(self._plans[key].reduce, shapes, *given, ordered=True), strict=True):
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

    def close(self) -> None:
        """See Reducer.close."""
        for plan in self._plans.values():
            plan.close()
        self._plans.clear()


class _Gradients:
    """The gradients of some variables; their plan is made by the first step that runs, which all ranks do together."""

    def __init__(self, settings: Settings, variables: Sequence[Any]) -> None:
        self._settings, self._names = settings, name_variables(variables)
        self._plan: ArrayPlan | None = None

    def reduce(self, *gradients: Any) -> list[Any]:
        """Reduce the gradients of a step; returns new arrays."""
        arrays = [np.asarray(one) for one in gradients]
        if self._plan is None:
            self._plan = self._open(arrays)
        results = [np.empty_like(array, order="C") for array in arrays]
        self._plan.reduce([_flat(array) for array in arrays], [_flat(array) for array in results])
        return results

    def _open(self, arrays: Sequence[Array]) -> ArrayPlan:
        return ArrayPlan(
            self._settings.group,
            [
                TensorSpec(name, array.size, array.dtype.name, 0, "x".join(map(str, array.shape)))
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


def _flat(array: Array) -> Array:
    flat = array.reshape(-1)
    storage = STORAGE[array.dtype.name]
    return flat if flat.dtype == storage else flat.view(storage)
