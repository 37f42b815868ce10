"""Reduction on the TensorFlow backend, by operations of the step's graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.engine.gradient_hook import GradientHook
from hvdkit.keras.settings import OptimizerSettings, name_variables
from hvdkit.tensorflow.sync import GradientSync
from hvdkit.tensorflow.tensors import dtype_name
from hvdkit.tensorflow.tracing import call_in_graph
from hvdkit.tensorflow.variables import VariableSpec


class TensorflowDriver:
    """See backends.StrategyDriver."""

    def __init__(self, settings: OptimizerSettings) -> None:
        self._settings = settings
        self._syncs: dict[tuple[int, ...], GradientSync] = {}
        self._reduced: GradientSync | None = None  # the GradientSync whose gradients the step has reduced last
        self._gradient_hook: GradientHook | None = None

    def prepare(self, variables: Sequence[Any]) -> None:
        """See StrategyDriver.prepare. The graph then starts each bucket when its gradients are ready."""

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        self._reduced = self._sync_of(variables)
        reduced: list[Any] = self._reduced.reduce(gradients)
        return reduced

    def _sync_of(self, variables: Sequence[Any]) -> GradientSync:
        key = tuple(map(id, variables))
        if key not in self._syncs:
            self._syncs[key] = GradientSync(
                variables,
                strategy=self._settings.make_strategy(),
                process_set=self._settings.process_set,
                sparse_as_dense=self._settings.sparse_as_dense,
                specs=[
                    VariableSpec(name, tuple(variable.shape), dtype_name(variable.dtype))
                    for name, variable in zip(name_variables(variables), variables, strict=True)
                ],
            )
            if self._gradient_hook is not None:
                self._syncs[key].set_gradient_hook(self._gradient_hook)
        return self._syncs[key]

    def reduce_window(self, gradients: Sequence[Any], variables: Sequence[Any], due: Callable[[], Any]) -> list[Any]:
        """See StrategyDriver.reduce_window. The optimizer calls this only at the end of a window."""
        return self.reduce(gradients, variables)

    def attach(self, variables: Sequence[Any]) -> None:
        if self._reduced is None:
            self._reduced = self._sync_of(variables)
        self._reduced.attach()

    def after_step(self, due: Any) -> None:
        if self._reduced is not None:
            self._reduced.after_step(due)

    def change_values(self, change: Callable[[], None]) -> None:
        if self._reduced is not None:
            self._reduced.change_values(change)

    def set_gradient_hook(self, hook: GradientHook) -> None:
        self._gradient_hook = hook
        for sync in self._syncs.values():
            sync.set_gradient_hook(hook)

    def agree(self, flag: Any) -> Any:
        def ask(local_flag: Any) -> Any:
            return [np.asarray(self._settings.agree(local_flag))]

        if tf.executing_eagerly():
            return tf.constant(ask(flag.numpy())[0])
        (agreed,) = call_in_graph(ask, [flag], [tf.bool], "hvdkit_agree")
        agreed.set_shape(())
        return agreed

    def enter(self) -> None:
        """See StrategyDriver.enter. Earlier traced graphs attach their strategies anew."""

    def close(self) -> None:
        for sync in self._syncs.values():
            sync.close()
