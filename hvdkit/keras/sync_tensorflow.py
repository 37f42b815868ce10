"""Gradients on the TensorFlow backend: reduced by operations of the step's graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdkit.keras.settings import Settings, name_variables
from hvdkit.tensorflow.sync import GradientSync
from hvdkit.tensorflow.tracing import call_in_graph


@dataclass(frozen=True)
class _Known:
    """What a GradientSync wants to know of a variable."""

    path: str
    shape: tuple[int, ...]
    dtype: str


class TensorflowReducer:
    """See backends.Reducer."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._reducers: dict[tuple[int, ...], GradientSync] = {}

    def prepare(self, variables: Sequence[Any]) -> None:
        """See Reducer.prepare: the graph starts each bucket when its gradients are there."""

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """See Reducer.reduce."""
        key = tuple(map(id, variables))
        if key not in self._reducers:
            self._reducers[key] = GradientSync(
                [
                    _Known(name, tuple(one.shape), keras.backend.standardize_dtype(one.dtype))
                    for name, one in zip(name_variables(variables), variables, strict=True)
                ],
                options=self._settings.options,
                process_set=self._settings.process_set,
                sparse_as_dense=self._settings.sparse_as_dense,
            )
        reduced: list[Any] = self._reducers[key].reduce(gradients)
        return reduced

    def reduce_window(self, gradients: Sequence[Any], variables: Sequence[Any], due: Callable[[], Any]) -> list[Any]:
        """See Reducer.reduce_window: the optimizer comes here at the end of a window only."""
        return self.reduce(gradients, variables)

    def agree(self, flag: Any) -> Any:
        """See Reducer.agree."""

        def ask(mine: Any) -> Any:
            return [np.asarray(self._settings.agree(mine))]

        if tf.executing_eagerly():
            return tf.constant(ask(flag.numpy())[0])
        (agreed,) = call_in_graph(ask, [flag], [tf.bool], "hvdkit_agree")
        agreed.set_shape(())
        return agreed

    def enter(self) -> None:
        """See Reducer.enter: graphs that were traced before make their plans anew."""

    def close(self) -> None:
        """See Reducer.close."""
        for reducer in self._reducers.values():
            reducer.close()
