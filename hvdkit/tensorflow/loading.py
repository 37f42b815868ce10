"""While steps are recorded: how long training waits for tf.data, eagerly and inside the graph of a step."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.engine.observe.recording import RECORDER, clock
from hvdkit.tensorflow.tracing import call_in_graph, in_python


@functools.cache
def watch_datasets() -> None:
    """Note the time that each element takes, of every iterator over a Dataset; in graphs traced from now on."""
    iterator: Any = type(iter(tf.data.Dataset.range(1)))
    advance = iterator._next_internal

    @in_python
    def _next_internal(self: Any) -> Any:
        if not tf.executing_eagerly():
            return _advance_in_graph(self)
        began = clock()
        try:
            return advance(self)
        finally:
            RECORDER.loading(began, clock())

    def _advance_in_graph(self: Any) -> Any:
        began = call_in_graph(_now, [], [tf.float64], "hvdkit_loading")
        with tf.control_dependencies(began):
            element = advance(self)
        with tf.control_dependencies(tf.nest.flatten(element, expand_composites=True)):
            call_in_graph(_loaded, began, [], "hvdkit_loaded")
        return element

    iterator._next_internal = _next_internal


def _now() -> list[Any]:
    return [np.asarray(clock())]


def _loaded(began: Any) -> list[Any]:
    RECORDER.loading(float(began), clock())
    return []
