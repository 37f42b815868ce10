"""Reduction on the JAX backend, by a call from within the compiled step, on the host or on the GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from hvdkit.engine.array_sync import CANNOT_WEIGHT, ArraySync
from hvdkit.engine.gradient_hook import GradientHook
from hvdkit.engine.planned.plan import TensorSpec
from hvdkit.keras.backends import settle
from hvdkit.keras.jax_device import DeviceReduction, open_device_reduction
from hvdkit.keras.jax_in_place import OrderedCall
from hvdkit.keras.settings import OptimizerSettings, check_shape, name_variables
from hvdkit.log import logger
from hvdkit.transport.buffer import STORAGE, Array


class JaxDriver:
    """See backends.StrategyDriver.

    Calls on the host are ordered, so that every rank runs its collectives in the same order; for calls on a GPU see
    jax_device.
    """

    def __init__(self, settings: OptimizerSettings) -> None:
        self._settings = settings
        self._lists: dict[tuple[int, ...], _Variables] = {}
        self._reduced: _Variables | None = None  # the variables whose gradients the program has reduced last
        self._gradient_hook: GradientHook | None = None

    def prepare(self, variables: Sequence[Any]) -> None:
        """See StrategyDriver.prepare. Does nothing: all gradients arrive at once."""

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """See StrategyDriver.reduce. The program determines which gradients exist: the same on all ranks."""
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        reduced = list(gradients)
        if not present:
            self._reduced = None
            return reduced
        self._reduced = self._list_of([variables[index] for index in present])
        results = self._reduced.before_step([gradients[index] for index in present])
        for index, result in zip(present, results, strict=True):
            reduced[index] = result
        return reduced

    def _list_of(self, variables: Sequence[Any]) -> _Variables:
        key = tuple(map(id, variables))
        if key not in self._lists:
            self._lists[key] = _Variables(self._settings, variables)
            self._lists[key].set_gradient_hook(self._gradient_hook)
        return self._lists[key]

    def reduce_window(self, gradients: Sequence[Any], variables: Sequence[Any], due: Callable[[], Any]) -> list[Any]:
        result: list[Any] = jax.lax.cond(
            due(), lambda averages: self.reduce(averages, variables), lambda averages: averages, list(gradients)
        )
        return result

    def attach(self, variables: Sequence[Any]) -> None:
        if self._reduced is None:
            self._reduced = self._list_of(variables)
        self._reduced.attach()

    def after_step(self, due: Any) -> None:
        if self._reduced is not None:
            self._reduced.after_step(due)

    def change_values(self, change: Callable[[], None]) -> None:
        settle()
        if self._reduced is not None:
            self._reduced.change_values(change)

    def set_gradient_hook(self, hook: GradientHook) -> None:
        self._gradient_hook = hook
        for variables in self._lists.values():
            variables.set_gradient_hook(hook)

    def agree(self, flag: Any) -> Any:
        def ask(local_flag: Any) -> Any:
            return np.asarray(self._settings.agree(local_flag))

        return io_callback(ask, jax.ShapeDtypeStruct((), np.bool_), flag, ordered=True)

    def enter(self) -> None:
        """See StrategyDriver.enter. Earlier compiled programs attach their strategies anew."""

    def close(self) -> None:
        if any(variables.on_device for variables in self._lists.values()):
            _finish_steps()
        for variables in self._lists.values():
            variables.close()


def _finish_steps() -> None:
    try:
        settle()
    except Exception as error:  # it has ended a step, whose results raise it as well
        logger.warning("A training step had failed before shutdown(): %s", error)


class _Variables:
    """A list of variables and their strategy.

    If NCCL can do the work of AllReduce on a GPU, the first traced step connects the ranks, and later programs use NCCL
    too. Otherwise the first running step attaches the strategy. All ranks do either together.
    """

    def __init__(self, settings: OptimizerSettings, variables: Sequence[Any]) -> None:
        self._settings, self._variables, self._names = settings, list(variables), name_variables(variables)
        self._strategy = settings.make_strategy()
        self._uses_values = self._strategy.uses_values
        self._sync: ArraySync | None = None
        self._device: DeviceReduction | None = None
        self._traced = False
        self._gradient_hook: GradientHook | None = None
        self._before, self._after = OrderedCall(self._before_step), OrderedCall(self._after_step)

    @property
    def on_device(self) -> bool:
        """Return whether gradients stay on the GPU."""
        return self._device is not None

    def set_gradient_hook(self, hook: GradientHook | None) -> None:
        """Set the object that takes part in each step, in place of an earlier one. ValueError for steps on a GPU."""
        self._gradient_hook = hook
        if self._sync is not None:
            self._sync.gradient_hook = hook
        self._check_hook()

    def _check_hook(self) -> None:
        if self._gradient_hook is not None and self._device is not None:
            raise ValueError(CANNOT_WEIGHT)

    def before_step(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the optimizer's gradients, as values of the program being traced.

        They have the dtypes of the variables, whatever those of `gradients`. ValueError for another shape.
        """
        for name, variable, gradient in zip(self._names, self._variables, gradients, strict=True):
            check_shape(name, gradient.shape, variable.shape)
        gradients = [
            gradient.astype(variable.dtype) for variable, gradient in zip(self._variables, gradients, strict=True)
        ]
        if not self._traced:
            settle()  # the host's part of earlier steps comes first
            self._device = open_device_reduction(self._settings, self._strategy, self._names, gradients)
            self._traced = True
            self._check_hook()
        if self._device is not None:
            return self._device(gradients)
        values = [variable.value for variable in self._variables] if self._uses_values else []
        return self._before([*gradients, *values])[: len(gradients)]

    def after_step(self, due: Any) -> None:
        """Assign, in the program being traced, the variables' new values that the strategy computes."""
        if not self._uses_values:
            return
        values = [variable.value for variable in self._variables]
        if due is True:
            values = self._after(values)
        else:
            values = jax.lax.cond(due, self._after, lambda own: own, values)
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)

    def _before_step(self, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        count = len(self._variables)
        values = [_flat(array) for array in arrays[count:]]
        if self._sync is None:
            self._sync = self._open(arrays[:count], values)
        self._sync.reduce(
            [_flat(array) for array in arrays[:count]], [_flat(array) for array in results[:count]], values
        )

    def _after_step(self, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        assert self._sync is not None
        self._sync.after_step([_flat(array) for array in arrays], [_flat(array) for array in results])

    def attach(self) -> None:
        """See StrategyDriver.attach; eagerly."""
        if self._sync is None:
            arrays = [np.asarray(variable.value) for variable in self._variables]
            self._sync = self._open(arrays, [_flat(array) for array in arrays] if self._uses_values else [])

    def change_values(self, change: Callable[[], None]) -> None:
        """See StrategyDriver.change_values; eagerly."""
        if self._sync is None or not self._uses_values:
            return
        values = [np.asarray(variable.value) for variable in self._variables]
        results = [np.empty_like(value) for value in values]
        self._sync.change_values(change, [_flat(value) for value in values], [_flat(one) for one in results])
        for variable, result in zip(self._variables, results, strict=True):
            variable.assign(result)

    def _open(self, gradients: Sequence[Array], values: Sequence[Array]) -> ArraySync:
        tensors = [
            TensorSpec(name, array.size, array.dtype.name, shape=array.shape)
            for name, array in zip(self._names, gradients, strict=True)
        ]
        # XLA uses all cores.
        threads = os.cpu_count() or 1
        sync = ArraySync(self._settings.group, tensors, self._strategy, compute_threads=threads, values=values)
        sync.gradient_hook = self._gradient_hook
        return sync

    def close(self) -> None:
        """Free the memory that the strategy has allocated; collective."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None
        if self._device is not None:
            self._device.close()


def _flat(array: Array) -> Array:
    flat = array.reshape(-1)
    storage = STORAGE[array.dtype.name]
    return flat if flat.dtype == storage else flat.view(storage)
