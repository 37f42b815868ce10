"""Reduction on the JAX backend, by calls from within the compiled step, on the host or on the GPU.

What is on the left runs while JAX traces a step, once for each program: it adds calls to the program. What is on the
right is executed by these calls, each time the program runs:

    traced                                        executed
    Distributed.apply
      GradientSync.reduce
        JaxDriver.reduce
          JaxDriver._trace_reduction
            jax_in_place.trace_in_order ........> JaxDriver._run_reduction
                                                    ArraySync.reduce
                                                      Strategy.arrived, for each gradient, and Strategy.before_step
      the optimizer's own update
      GradientSync.after_step
        JaxDriver.after_step
          JaxDriver._trace_new_values
            jax_in_place.trace_in_order ........> JaxDriver._run_new_values
                                                    ArraySync.after_step
                                                      Strategy.after_step

On a GPU, DeviceReduction.trace and DeviceReduction._run take the place of the first trace_in_order and of what it
executes. Outside of a program JAX executes what it would trace: then the right follows the left at once, in each step.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from hvdkit.engine.array_sync import CANNOT_WEIGHT, ArraySync
from hvdkit.engine.gradient_hook import GradientHook
from hvdkit.engine.planned.plan import TensorSpec
from hvdkit.engine.strategy import Strategy
from hvdkit.keras import jax_in_place
from hvdkit.keras.backends import settle
from hvdkit.keras.jax_device import DeviceReduction, open_device_reduction
from hvdkit.keras.settings import OptimizerSettings, check_shape, name_variables
from hvdkit.log import logger
from hvdkit.transport.buffer import STORAGE, Array


@dataclass(eq=False)
class _Trained:
    """The state of a list of variables whose gradients are reduced together.

    variables: the list.
    names: of the variables, for errors and for the comparison between ranks.
    strategy: reduces their gradients.
    sync: drives the strategy on the host, from the first executed step, or attach(), to close().
    device: reduces the gradients on the GPU, from the first traced step on; None for the host.
    is_traced: has a step been traced, so that `device` is decided?
    calls: of the programs, which must find them as long as they run: the reduction, and the new values.
    """

    variables: list[Any]
    names: list[str]
    strategy: Strategy
    sync: ArraySync | None = None
    device: DeviceReduction | None = None
    is_traced: bool = False
    calls: tuple[jax_in_place.InPlace, ...] = ()


class JaxDriver:
    """See backends.StrategyDriver, and the module's docstring for what is traced and what is executed.

    Calls on the host are ordered, so that every rank runs its collectives in the same order; for calls on a GPU see
    jax_device. If NCCL can do the work of AllReduce on a GPU, the first traced step connects the ranks, and later
    programs use NCCL too. Otherwise the first executed step attaches the strategy. All ranks do either together.
    """

    def __init__(self, settings: OptimizerSettings) -> None:
        self._settings = settings
        self._lists: dict[tuple[int, ...], _Trained] = {}
        self._reduced: _Trained | None = None  # the variables whose gradients the program has reduced last
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
        results = self._trace_reduction(self._reduced, [gradients[index] for index in present])
        for index, result in zip(present, results, strict=True):
            reduced[index] = result
        return reduced

    def _list_of(self, variables: Sequence[Any]) -> _Trained:
        key = tuple(map(id, variables))
        if key not in self._lists:
            trained = _Trained(list(variables), name_variables(variables), self._settings.make_strategy())
            trained.calls = (
                jax_in_place.InPlace(functools.partial(self._run_reduction, trained)),
                jax_in_place.InPlace(functools.partial(self._run_new_values, trained)),
            )
            self._lists[key] = trained
        return self._lists[key]

    def reduce_window(self, gradients: Sequence[Any], variables: Sequence[Any], due: Callable[[], Any]) -> list[Any]:
        result: list[Any] = jax.lax.cond(
            due(), lambda averages: self.reduce(averages, variables), lambda averages: averages, list(gradients)
        )
        return result

    def attach(self, variables: Sequence[Any]) -> None:
        """See StrategyDriver.attach; eagerly."""
        if self._reduced is None:
            self._reduced = self._list_of(variables)
        trained = self._reduced
        if trained.sync is None:
            arrays = [np.asarray(variable.value) for variable in trained.variables]
            self._open(trained, arrays, [_flat(array) for array in arrays] if trained.strategy.uses_values else [])

    def after_step(self, due: Any) -> None:
        """See StrategyDriver.after_step. Assigns, in the program being traced, the new values of the strategy."""
        trained = self._reduced
        if trained is None or not trained.strategy.uses_values:
            return
        values = [variable.value for variable in trained.variables]
        trace = functools.partial(self._trace_new_values, trained)
        values = trace(values) if due is True else jax.lax.cond(due, trace, lambda own: own, values)
        for variable, value in zip(trained.variables, values, strict=True):
            variable.assign(value)

    def change_values(self, change: Callable[[], None]) -> None:
        """See StrategyDriver.change_values; eagerly."""
        settle()
        trained = self._reduced
        if trained is None or trained.sync is None or not trained.strategy.uses_values:
            return
        values = [np.asarray(variable.value) for variable in trained.variables]
        results = [np.empty_like(value) for value in values]
        trained.sync.change_values(change, [_flat(value) for value in values], [_flat(one) for one in results])
        for variable, result in zip(trained.variables, results, strict=True):
            variable.assign(result)

    def set_gradient_hook(self, hook: GradientHook) -> None:
        self._gradient_hook = hook
        for trained in self._lists.values():
            if trained.sync is not None:
                trained.sync.gradient_hook = hook
            self._check_hook(trained)

    def _check_hook(self, trained: _Trained) -> None:
        """Raise ValueError if there is a hook and the gradients stay on the GPU, where they cannot be weighted."""
        if self._gradient_hook is not None and trained.device is not None:
            raise ValueError(CANNOT_WEIGHT)

    def agree(self, flag: Any) -> Any:
        def run_agree(local_flag: Any) -> Any:
            return np.asarray(self._settings.agree(local_flag))

        return io_callback(run_agree, jax.ShapeDtypeStruct((), np.bool_), flag, ordered=True)

    def enter(self) -> None:
        """See StrategyDriver.enter. Earlier compiled programs attach their strategies anew."""

    def close(self) -> None:
        if any(trained.device is not None for trained in self._lists.values()):
            _finish_steps()
        for trained in self._lists.values():
            if trained.sync is not None:
                trained.sync.close()
                trained.sync = None
            if trained.device is not None:
                trained.device.close()

    def _trace_reduction(self, trained: _Trained, gradients: Sequence[Any]) -> list[Any]:
        """Return the optimizer's gradients, as values of the program being traced.

        They have the dtypes of the variables, whatever those of `gradients`. ValueError for another shape.
        """
        variables = trained.variables
        for name, variable, gradient in zip(trained.names, variables, gradients, strict=True):
            check_shape(name, gradient.shape, variable.shape)
        gradients = [gradient.astype(variable.dtype) for variable, gradient in zip(variables, gradients, strict=True)]
        if not trained.is_traced:
            settle()  # the host's part of earlier steps comes first
            trained.device = open_device_reduction(self._settings, trained.strategy, trained.names, gradients)
            trained.is_traced = True
            self._check_hook(trained)
        if trained.device is not None:
            return trained.device.trace(gradients)
        values = [variable.value for variable in variables] if trained.strategy.uses_values else []
        return jax_in_place.trace_in_order(trained.calls[:1], [[*gradients, *values]])[: len(gradients)]

    def _trace_new_values(self, trained: _Trained, values: Sequence[Any]) -> list[Any]:
        """Return the variables' new values, as values of the program being traced. values: after the own update."""
        return jax_in_place.trace_in_order(trained.calls[1:], [values])

    def _run_reduction(self, trained: _Trained, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        """Reduce the gradients of a step. arrays: gradients, then values. results: only the first are used."""
        count = len(trained.variables)
        values = [_flat(array) for array in arrays[count:]]
        sync = trained.sync if trained.sync is not None else self._open(trained, arrays[:count], values)
        sync.reduce([_flat(array) for array in arrays[:count]], [_flat(array) for array in results[:count]], values)

    def _run_new_values(self, trained: _Trained, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        """Have the strategy compute the new values of a step. arrays: the values after the optimizer's own update."""
        assert trained.sync is not None
        trained.sync.after_step([_flat(array) for array in arrays], [_flat(array) for array in results])

    def _open(self, trained: _Trained, gradients: Sequence[Array], values: Sequence[Array]) -> ArraySync:
        """Attach the strategy to the variables; collective. gradients: their shapes and dtypes count."""
        tensors = [
            TensorSpec(name, array.size, array.dtype.name, shape=array.shape)
            for name, array in zip(trained.names, gradients, strict=True)
        ]
        threads = os.cpu_count() or 1  # XLA uses all cores
        sync = ArraySync(self._settings.group, tensors, trained.strategy, compute_threads=threads, values=values)
        sync.gradient_hook = self._gradient_hook
        trained.sync = sync
        return sync


def _finish_steps() -> None:
    try:
        settle()
    except Exception as error:  # it has ended a step, whose results raise it as well
        logger.warning("A training step had failed before shutdown(): %s", error)


def _flat(array: Array) -> Array:
    flat = array.reshape(-1)
    storage = STORAGE[array.dtype.name]
    return flat if flat.dtype == storage else flat.view(storage)
